"""FLOPs of one optimizer step over all ranks, and the parameters they act on.

model FLOPs = 3 x forward (backward is twice forward); causal: only visible pairs, full: the whole square
hardware FLOPs = model FLOPs (full) + forwards repeated by recomputation
"""

from __future__ import annotations

from functools import lru_cache

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.plan.count.layer import unit_lists
from fivefold.plan.count.part import Local, Part
from fivefold.plan.count.recompute import recompute
from fivefold.step import Work


def work(model: Model, *, layout: Layout, job: Job) -> Work:
    """FLOPs of the whole step."""
    full, causal, again = _per_sequence(model, job.replace(global_batch=1), layout.recomputed)
    return Work(
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        model_flops_causal=3 * causal * job.global_batch,
        model_flops_full=3 * full * job.global_batch,
        hardware_flops=(3 * full + again // layout.recompute_every) * job.global_batch,
    )


@lru_cache(maxsize=256)
def _per_sequence(model: Model, job: Job, recomputed: frozenset[str]) -> tuple[int, int, int]:
    """Forward FLOPs of one sequence: attention as the full square, causal, and what recomputation repeats."""
    lists = list(unit_lists(Local(model, job, Part(sequences=1))))
    full = sum(times * sum(op.flops for op in ops) for times, ops in lists)
    causal = sum(times * sum(op.causal_flops for op in ops) for times, ops in lists)
    again = sum(
        times * sum(op.flops for op in recompute(ops, recomputed).ops if op.again) for times, ops in lists[1:-1]
    )
    return full, causal, again
