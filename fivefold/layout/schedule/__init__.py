"""Pipeline schedules as data: ``schedule("1f1b", pp=4, v=1, micro_batches=8)`` is a table of actions per rank.

one_f_one_b · zero_bubble · v_shaped   generators: GPipe, 1F1B, interleaved; ZB1P, ZB2P; ZB-V, DualPipe, DualPipeV
table · action · columns · csv_file    actions of each rank, with ``check``; F, B, W; as arrays; reads and writes CSV
simulation                             simulates a table with given durations, or with many at once
order · p2p                            topological order of the actions; point-to-point messages of a rank
pipeline_schedule                      properties of each schedule, one record each

To add a schedule, write its generator and its record in ``pipeline_schedule``; no other code names it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fivefold.errors import UserError
from fivefold.layout.schedule.pipeline_schedule import (
    PIPELINE_SCHEDULES,
    PipelineSchedule,
    ScheduleName,
    list_one_way_pairing_names,
)
from fivefold.layout.schedule.table import Table

__all__ = ["PIPELINE_SCHEDULES", "PipelineSchedule", "schedule"]


def schedule(name: ScheduleName, *, pp: int, v: int, micro_batches: int, first_backward: int = 0) -> Table:
    """Return the table for ``pp`` ranks with ``v`` stages each; ``UserError`` if the schedule does not support them.

    ``first_backward``: the first stage with a trained weight. Tables are cached: equal arguments return the same
    object, so its ``order`` is computed once.
    """
    return _generate(name, pp, v, micro_batches, first_backward)


@lru_cache(maxsize=1024)
def _generate(name: ScheduleName, pp: int, v: int, micro_batches: int, first_backward: int) -> Table:
    pipeline = PIPELINE_SCHEDULES[name]
    reason = _reason(pipeline, pp=pp, v=v, micro_batches=micro_batches)
    if reason:
        raise UserError(f"{name} {reason}")
    extra = {"v": v} if pipeline.is_interleaved else {}
    return replace(pipeline.generate(pp=pp, micro_batches=micro_batches, **extra), first_backward=first_backward)


def _reason(pipeline: PipelineSchedule, *, pp: int, v: int, micro_batches: int) -> str:
    """Return why the schedule does not support these numbers; empty if it does."""
    if min(pp, v, micro_batches) < 1:
        return f"needs one of each or more, not pp={pp} v={v} and {micro_batches} micro-batches"
    stages = pipeline.stages_per_rank or v
    if v != stages:
        return f"runs {stages} stages per rank, not v={v}; write v{stages} or interleaved"
    if pipeline.enters_both_ends and (pp % 2 or micro_batches % 2):
        fix = (
            f"pp{pp + pp % 2} and {micro_batches + micro_batches % 2} micro-batches, or {list_one_way_pairing_names()}"
        )
        return f"halves its ranks and micro-batches, but pp={pp} and {micro_batches} are not both even; try {fix}"
    if pipeline.pairs_passes and micro_batches < pipeline.min_rounds * pp:
        return f"needs 2·pp={2 * pp} micro-batches or more, not {micro_batches}; raise gbs or lower dp·mbs"
    return ""
