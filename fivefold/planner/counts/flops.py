"""FLOPs of one optimizer step over all ranks, and the parameters that they act on.

model FLOPs = 3 x forward (backward is twice forward; once where a weight is frozen); causal: only visible pairs, full:
the full square; of DPO 4 x forward, one of them the reference's
hardware FLOPs = what PyTorch's FLOP counter counts on all ranks: the full square (with a window or dropout of
attention only its visible part), recomputed forwards, replicated key heads, padded vocabulary, and Muon's products;
ring attention skips about half of the blocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from fivefold.job import Job
from fivefold.layout.sharding import is_trained, list_units
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.vision_weights import PREFIX, count_vision, list_vision_weights
from fivefold.model.weights import count_adapters
from fivefold.planner.counts.counts import Counts, Name, get_group_degrees
from fivefold.planner.counts.operations.adapters import is_per_step, runs_in_reference
from fivefold.planner.counts.operations.local_shapes import LocalDegrees, get_local_degrees
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.update import update_flops
from fivefold.step import Work


def work(model: Model, *, layout: Layout, job: Job) -> Work:
    """Count parameters, model FLOPs and hardware FLOPs of one step over all ranks."""
    full, causal = _count_sequence(model, job.replace(global_batch=1, attention="flash"))  # without padding
    tower = count_vision(model.vision) if model.vision is not None and job.images else 0
    return Work(
        parameters=model.parameters + tower,
        active_parameters=model.active_parameters + tower,
        trainable_parameters=_count_trainable(model, job),
        vision_parameters=tower or None,
        vision_flops=_count_vision_flops(model, job.replace(global_batch=1)) * job.global_batch if tower else None,
        model_flops_causal=causal * job.global_batch,
        model_flops_non_causal=full * job.global_batch,
        hardware_flops=_count_hardware_flops(model, layout, job),
    )


def _count_trainable(model: Model, job: Job) -> int | None:
    """Count the trained parameters; None if all are."""
    if job.adapter is not None:
        return count_adapters(model, job.adapter, merged=job.stack.merges_adapters)
    if job.freeze:
        trained = (
            weight.numel for unit in list_units(model, job) for weight in unit.weights if is_trained(weight, job)
        )
        return sum(trained)
    if model.vision is None or not job.freeze_vision_tower:
        return None
    return model.parameters + sum(
        weight.numel for weight in list_vision_weights(model.vision) if is_trained(weight, job)
    )


def _count_vision_flops(model: Model, job: Job) -> int:
    """Return the FLOPs of a sequence's images, forward and backward."""
    ops = Counts(model, job).unit(LocalDegrees(sequences=1), "embed").ops
    return sum(_count_passes(op, job) * op.flops for op in ops if op.name.startswith(PREFIX))


def _count_hardware_flops(model: Model, layout: Layout, job: Job) -> int:
    """Return the hardware FLOPs of all ranks, without expert imbalance.

    The loop counts one micro-batch on one tp rank over all stages and cp ranks; it is multiplied by dp, tp and the
    micro-batches.
    """
    job = job.replace(imbalance=1.0)
    counts, part = Counts(model, job), get_local_degrees(layout)
    micro_batch_flops = sum(
        times
        * (_count_extra_backward(op) * part.cp + (1 + op.backward_products + op.recomputed) * _count_executed(op, part))
        for op, times in _list_operations(counts, layout)
    )
    if job.objective == "dpo":  # the reference runs without dropout, and so with another kernel of attention
        plain = model.replace(dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)
        micro_batch_flops += sum(
            times * runs_in_reference(op, job) * _count_executed(op, part)
            for op, times in _list_operations(Counts(plain, job), layout)
        )
    return micro_batch_flops * layout.dp * layout.tp * layout.micro_batches(job) + update_flops(counts, layout)


def _list_operations(counts: Counts, layout: Layout) -> Iterator[tuple[Op, int]]:
    """Yield the operations of one micro-batch in all stages, and how often each runs."""
    for unit, times in counts.tally_units(layout).items():
        for op in counts.unit(get_group_degrees(get_local_degrees(layout), unit), unit.name).ops:
            yield op, times


def _count_extra_backward(op: Op) -> int:
    """Return the FLOPs of an operation's backward above twice its forward: a scan computes its states again."""
    return op.backward_flops - 2 * op.flops if op.backward_flops else 0


def _count_executed(op: Op, part: LocalDegrees) -> int:
    """Return the forward FLOPs that the ranks of cp execute; a ring computes (cp + 1) / 2cp of the full square."""
    if op.windowed_flops:
        return op.windowed_flops
    if op.kind == "attention" and not part.ulysses and part.cp > 1:
        return op.flops * (part.cp + 1) // (2 * part.cp) * part.cp
    return op.flops * part.cp


def _count_passes(op: Op, job: Job) -> int:
    """Return the forwards that the FLOPs of an operation's passes equal: 3, less where weights stay, DPO's one more."""
    if is_per_step(op):
        return 0
    return 1 + op.backward_products + runs_in_reference(op, job)


@lru_cache(maxsize=256)
def _count_sequence(model: Model, job: Job) -> tuple[int, int]:
    """Return the FLOPs of one sequence, forward and backward: attention as the full square, and causal."""
    counts, part = Counts(model, job), LocalDegrees(sequences=1)
    names: tuple[Name, ...] = ("embed", *counts.example, "head")
    ops_by_unit = {name: counts.unit(part, name).ops for name in names}
    tally = Counter[Name](("embed", *counts.kinds, "head"))
    return (
        sum(
            times * sum(_count_passes(op, job) * op.flops for op in ops_by_unit[name]) for name, times in tally.items()
        ),
        sum(
            times * sum(_count_passes(op, job) * op.causal_flops for op in ops_by_unit[name])
            for name, times in tally.items()
        ),
    )
