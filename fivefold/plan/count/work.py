"""FLOPs of one optimizer step over all ranks, and the parameters they act on.

model FLOPs = 3 x forward (backward is twice forward); causal: only visible pairs, full: the whole square
hardware FLOPs = model FLOPs (full) + forwards repeated by recomputation
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.plan.count.layer import block, embedding, head, kinds
from fivefold.plan.count.ops import Op
from fivefold.step import Work


def operations(model: Model, job: Job, *, sequences: int) -> Iterator[tuple[int, list[Op]]]:
    """The distinct lists of operations of the model, each with how often it occurs."""
    yield 1, embedding(model, job, sequences=sequences)
    for layer, times in kinds(model).items():
        yield times, block(model, job, layer=layer, sequences=sequences)
    yield 1, head(model, job, sequences=sequences)


def work(model: Model, *, layout: Layout, job: Job) -> Work:
    """FLOPs of the whole step."""
    full, causal = _per_sequence(model, job)
    return Work(
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        model_flops_causal=3 * causal * job.global_batch,
        model_flops_full=3 * full * job.global_batch,
        hardware_flops=3 * full * job.global_batch,
    )


@lru_cache(maxsize=256)
def _per_sequence(model: Model, job: Job) -> tuple[int, int]:
    """Forward FLOPs of one sequence: attention as the full square, and causal."""
    lists = list(operations(model, job, sequences=1))
    full = sum(times * sum(op.flops for op in ops) for times, ops in lists)
    return full, sum(times * sum(op.causal_flops for op in ops) for times, ops in lists)
