"""Messages of one optimizer step: what each rank sends, by axis and collective.

zero0      one all_reduce of every unit's gradients
zero1, 2   all_gather of every unit after the update, reduce_scatter of its gradients
zero3      all_gather of every unit for each forward and each backward (the embedding goes back without its
           weights, the head is still there), one reduce_scatter
always     one all_reduce of the gradient norm, the loss and the wish to stop: three fp32 numbers
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import padded_numel, policy, units
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.step import Traffic, sent_bytes


class Message(NamedTuple):
    """``times`` equal messages per step; ``payload`` is the full tensor in bytes, ``ranks`` the group."""

    axis: str
    collective: str
    times: int
    payload: int
    ranks: int


def messages(model: Model, *, layout: Layout, job: Job) -> list[Message]:
    """Every message of a step, in no particular order."""
    if layout.dp == 1:
        return []
    shards, copies, recipe = layout.shards, layout.dp // layout.shards, job.precision
    micro_batches = layout.micro_batches(job)
    found = [Message("dp", "all_reduce", 1, 12, layout.dp)]
    for unit in units(model):
        padded = padded_numel(unit, shards=shards)
        if shards > 1:
            twice = unit.name not in ("embed", "head")
            gathers = 1 if policy(layout).weights_stay else micro_batches * (2 if twice else 1)
            found.append(Message("dp", "all_gather", gathers, padded * recipe.weights_bytes, shards))
            found.append(Message("dp", "reduce_scatter", 1, padded * recipe.summed_bytes, shards))
        if copies > 1:
            found.append(Message("dp", "all_reduce", 1, padded // shards * recipe.summed_bytes, copies))
    return found


def traffic(model: Model, *, layout: Layout, job: Job) -> tuple[Traffic, ...]:
    """The messages summed by axis and collective, in bytes sent per rank."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for message in messages(model, layout=layout, job=job):
        key = message.axis, message.collective
        count, sent = totals.get(key, (0, 0))
        each = sent_bytes(message.collective, payload=message.payload, ranks=message.ranks)
        totals[key] = count + message.times, sent + message.times * each
    return tuple(
        Traffic(axis=axis, collective=collective, messages=count, bytes=sent)
        for (axis, collective), (count, sent) in sorted(totals.items())
    )
