"""Messages of one optimizer step: what one rank sends, by axis and collective.

zero0 one all_reduce of each unit's gradients · zero1, 2 its all_gather after the update and its reduce_scatter ·
zero3 an all_gather for each forward and backward (the embedding goes back without its weights, the head is still
there), one reduce_scatter or one per micro-batch · tp, cp, ep those of the lists of operations · pp the residual
stream over each boundary, and back its gradient · always one all_reduce of three fp32 numbers (norm, loss, stop)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.sharding import padded_numel, policy
from fivefold.layout.spec import V_SHAPED, Layout
from fivefold.model.spec import Model
from fivefold.plan.count.counts import Counts, Name, run_part
from fivefold.plan.count.ops import Message as Exchange
from fivefold.plan.count.ops import Op
from fivefold.plan.count.part import part_of
from fivefold.plan.count.states import local_parts
from fivefold.step import Traffic, sent_bytes


class Message(NamedTuple):
    """``times`` equal messages per step; ``payload`` is the full tensor in bytes, among the ranks of ``group``."""

    axis: str
    collective: str
    times: int
    payload: int
    ranks: int
    group: str = "shard"  # as in ``mesh.group``


def messages(counts: Counts, layout: Layout, *, chunks: tuple[int, ...] = (0,)) -> list[Message]:
    """Every message of a rank that holds the stages ``chunks``, in no particular order."""
    micro_batches, stages = layout.micro_batches(counts.job), counts.stage_work(layout)
    if layout.schedule == "dualpipe":  # the other half goes through the rank that holds the same stages
        micro_batches //= 2
    found = list(_once(counts, layout, ends={0, len(stages) - 1} & set(chunks)))
    for chunk in chunks:
        for run, times in stages[chunk]:
            found += [
                message._replace(times=message.times * times) for message in unit_messages(counts, layout, run.name)
            ]
            for op in counts.unit(run_part(part_of(layout), run), run.name).ops:
                if op.message is not None:
                    found += _spoken(op, op.message, layout, times=times * micro_batches)
        found += _boundaries(counts, layout, chunk=chunk, micro_batches=micro_batches)
    return found


def unit_messages(counts: Counts, layout: Layout, name: Name) -> Iterator[Message]:
    """What data parallelism says about one unit in a step."""
    recipe, micro_batches = counts.job.precision, layout.micro_batches(counts.job)
    each = counts.job.reduce == "micro_batch" and not policy(layout).gradients_stay
    weights = counts.weights(layout, name)
    for unit, shards, copies in local_parts(weights, model=counts.model, layout=layout, job=counts.job):
        padded = padded_numel(unit, shards=shards)
        prefix = "expert_" if unit.name == "experts" else ""
        if shards > 1:
            twice = name not in ("embed", "head")
            gathers = 1 if policy(layout).weights_stay else micro_batches * (2 if twice else 1)
            group = f"{prefix}shard"
            yield Message("dp", "all_gather", gathers, padded * recipe.weights_bytes, shards, group)
            reduces = micro_batches if each else 1
            yield Message("dp", "reduce_scatter", reduces, padded * recipe.summed_bytes, shards, group)
        if copies > 1:
            payload = padded // shards * recipe.summed_bytes
            yield Message("dp", "all_reduce", 1, payload, copies, f"{prefix}replica")


def _once(counts: Counts, layout: Layout, *, ends: set[int]) -> Iterator[Message]:
    """``ends`` of the model that the rank holds; with both it adds up a tied table's gradient by itself."""
    if layout.dp > 1:
        yield Message("dp", "all_reduce", 1, 12, layout.dp, "dp")
    if layout.pp > 1 and counts.model.tied_embeddings and len(ends) == 1:
        table = counts.local(part_of(layout)).vocab * counts.model.width
        yield Message("pp", "all_reduce", 1, table * counts.job.precision.summed_bytes, 2, "pp")


def _spoken(op: Op, message: Exchange, layout: Layout, *, times: int) -> Iterator[Message]:
    """Forward, backward, and what is said again because it was let go or is recomputed."""
    ranks = group(layout, message.axis).ranks
    times *= message.times
    if message.forward:
        yield Message(
            message.axis, message.forward, times * (2 if op.again else 1), message.payload, ranks, message.axis
        )
    if message.again and not op.again:
        yield Message(message.axis, message.again, times, message.payload, ranks, message.axis)
    if message.backward:
        payload = message.payload if message.backward_payload is None else message.backward_payload
        yield Message(message.axis, message.backward, times, payload, ranks, message.axis)


def _boundaries(counts: Counts, layout: Layout, *, chunk: int, micro_batches: int) -> Iterator[Message]:
    """A stage sends its output on and its input's gradient back, unless its neighbour is the same rank."""
    if layout.pp == 1:
        return
    last = layout.pp * layout.v - 1
    turn = layout.pp - 1 if layout.schedule in V_SHAPED else -1  # where the V turns, on one rank
    sends = micro_batches * ((chunk < last and chunk != turn) + (chunk > 0 and chunk - 1 != turn))
    if not sends:
        return
    size, tp = counts.local(part_of(layout)).stream_bytes, layout.tp
    if counts.job.scatter_hops and tp > 1 and not layout.sp:
        yield Message("pp", "p2p", sends, size // tp, 2, "pp")
        yield Message("tp", "all_gather", sends, size, tp, "tp")  # as many arrive
    else:
        yield Message("pp", "p2p", sends, size, 2, "pp")


def first_rank(layout: Layout) -> tuple[int, ...]:
    """The stages that the first pipeline rank holds."""
    if layout.schedule in (*V_SHAPED, "dualpipe"):
        return 0, layout.pp * layout.v - 1
    return tuple(range(0, layout.pp * layout.v, layout.pp))


def traffic(counts: Counts, layout: Layout) -> tuple[Traffic, ...]:
    """The messages of the first pipeline rank summed by axis and collective, in bytes sent."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for message in messages(counts, layout, chunks=first_rank(layout)):
        key = message.axis, message.collective
        count, sent = totals.get(key, (0, 0))
        each = sent_bytes(message.collective, payload=message.payload, ranks=message.ranks)
        totals[key] = count + message.times, sent + message.times * each
    return tuple(
        Traffic(axis=axis, collective=collective, messages=count, bytes=sent)
        for (axis, collective), (count, sent) in sorted(totals.items())
    )


def per_step(model: Model, *, layout: Layout, job: Job) -> tuple[Traffic, ...]:
    """``traffic`` from the nouns."""
    return traffic(Counts(model, job), layout)
