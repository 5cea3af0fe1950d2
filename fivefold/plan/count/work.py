"""FLOPs of one optimizer step over all ranks, and the parameters they act on.

model FLOPs = 3 x forward (backward is twice forward); causal: only visible pairs, full: the whole square
hardware FLOPs = model FLOPs (full) + forwards repeated by recomputation
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.plan.count.counts import Counts, Name
from fivefold.plan.count.part import Part
from fivefold.step import Work


def work(model: Model, *, layout: Layout, job: Job) -> Work:
    """FLOPs of the whole step."""
    one = job.replace(global_batch=1)
    full, causal, again = _per_sequence(model, one, layout.recomputed, layout.recompute_every)
    return Work(
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        model_flops_causal=3 * causal * job.global_batch,
        model_flops_full=3 * full * job.global_batch,
        hardware_flops=(3 * full + again) * job.global_batch,
    )


@lru_cache(maxsize=256)
def _per_sequence(model: Model, job: Job, recomputed: frozenset[str], every: int) -> tuple[int, int, int]:
    """Forward FLOPs of one sequence: attention as the full square, causal, and what runs again in the backward."""
    counts, part = Counts(model, job), Part(sequences=1, recomputed=recomputed)
    names: tuple[Name, ...] = ("embed", *counts.example, "head")
    lists = {name: counts.unit(part, name).ops for name in names}
    tally = Counter[Name](("embed", *counts.kinds, "head"))
    again = Counter[Name](("head", *counts.kinds[::every]))  # of the head, a loss in chunks
    return (
        sum(times * sum(op.flops for op in lists[name]) for name, times in tally.items()),
        sum(times * sum(op.causal_flops for op in lists[name]) for name, times in tally.items()),
        sum(times * sum(op.flops for op in lists[name] if op.again) for name, times in again.items()),
    )
