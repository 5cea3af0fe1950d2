"""Numbers of units on three ranks of a pipeline, for the bounds: the first, the first with most layers, the last.

1f1b, gpipe, zb1p, zb2p   rank r: stage r          interleaved   r, r + pp, r + 2·pp ...
zbv, dualpipev            r, 2·pp-1-r              dualpipe      r, pp-1-r, each for half of the micro-batches
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.schedule import PIPELINE_SCHEDULES, PipelineSchedule
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Name, UnitGroup
from fivefold.planner.search.columns import Ints
from fivefold.planner.search.space import PipelineShape

NEVER = 0  # ``recompute_every`` if no layer is recomputed
RECORDS = tuple(PIPELINE_SCHEDULES[name] for name in SCHEDULES)


def _mark_schedules(has_property: Callable[[PipelineSchedule], bool]) -> NDArray[np.bool_]:
    """Return a mask of the schedules of which something holds, in the order of ``SCHEDULES``."""
    return np.array([has_property(schedule) for schedule in RECORDS])


PAIRED = _mark_schedules(lambda record: record.pairs_passes)  # with FB
SPLIT = _mark_schedules(lambda record: record.splits_backward and not record.pairs_passes)  # with W, and without FB
SPLITTING = _mark_schedules(lambda record: record.splits_backward)
BOTH_WAYS = _mark_schedules(lambda record: record.enters_both_ends)
WEIGHT_LAG = np.array([record.weight_lag for record in RECORDS])


class PipelineUnits(NamedTuple):
    """Numbers of units [3, units] and facts [3] of three ranks; for n candidates [n, 3, units] and [n, 3]."""

    rank_units: NDArray[np.float64]  # on the rank
    units_before: NDArray[np.float64]  # in the stages before the rank's first one
    first_stage_units: NDArray[np.float64]  # in its first stage
    first_unit: Ints  # index of its first unit
    first_stage: Ints  # index of its first stage
    rank: Ints
    stages_per_rank: Ints
    schedule: Ints
    pp: Ints
    v: Ints


class StageUnitsCache(dict[tuple[PipelineShape, int], tuple[NDArray[np.float64], Ints]]):
    """The units of the stages of each pipeline, by its shape and ``recompute_every``."""


def count_stage_units(
    counts: Counts, shape: PipelineShape, *, recompute_every: int, runs: list[UnitGroup]
) -> tuple[NDArray[np.float64], Ints]:
    """Return numbers of units of each stage [stages, units], and the index of the first unit of each.

    ``recompute_every``: see ``count_pipeline_units``.

    Embedding and head have one column each. The blocks of multi-token prediction in the head are recomputed if and
    only if the layout recomputes anything, and the figures of that column are of the layout.
    """
    cache = counts.caches.get_cache(StageUnitsCache)
    if (shape, recompute_every) not in cache:
        cache[shape, recompute_every] = _count_stage_units(counts, shape, recompute_every=recompute_every, runs=runs)
    return cache[shape, recompute_every]


def _count_stage_units(
    counts: Counts, shape: PipelineShape, *, recompute_every: int, runs: list[UnitGroup]
) -> tuple[NDArray[np.float64], Ints]:
    """Return ``count_stage_units``, computed anew."""
    stages = counts.stage_work(build_pipeline_layout(shape, recompute_every=recompute_every))
    table = np.zeros((len(stages), len(runs)))
    columns = {make_column_key(run): column for column, run in enumerate(runs)}
    for stage, work in enumerate(stages):
        for run, n_units in work:
            table[stage, columns[make_column_key(run)]] += n_units
    return table, np.array([columns[make_column_key(work[0][0])] for work in stages])


def make_column_key(run: UnitGroup) -> tuple[Name, bool]:
    """Return the key of a unit's column: its name and, for blocks, whether it is recomputed."""
    return run.name, run.recomputed and not isinstance(run.name, str)


def count_pipeline_units(
    counts: Counts, shape: PipelineShape, *, recompute_every: int, runs: list[UnitGroup]
) -> PipelineUnits:
    """Return the units of one pipeline in which one of ``recompute_every`` layers is recomputed (0: none)."""
    table, first_units = count_stage_units(counts, shape, recompute_every=recompute_every, runs=runs)
    units_before = np.concatenate([np.zeros((1, len(runs))), np.cumsum(table, axis=0)])
    rank_stages = [shape.pipeline.stages_of_rank(rank, pp=shape.pp, v=shape.v) for rank in range(shape.pp)]
    layers = [table[list(stages), 2:].sum() for stages in rank_stages]
    last = shape.pp // 2 if shape.pipeline.enters_both_ends else shape.pp - 1  # farthest from the first stage
    ranks = [0, int(np.argmax(layers)), last]
    rows = [table[list(rank_stages[rank])] for rank in ranks]
    return PipelineUnits(
        rank_units=np.array([row.sum(axis=0) for row in rows]),
        units_before=np.array([units_before[rank_stages[rank][0]] for rank in ranks]),
        first_stage_units=np.array([row[0] for row in rows]),
        first_unit=np.array([first_units[rank_stages[rank][0]] for rank in ranks]),
        first_stage=np.array([rank_stages[rank][0] for rank in ranks]),
        rank=np.array(ranks),
        stages_per_rank=np.full(3, len(rank_stages[0])),
        schedule=np.full(3, SCHEDULES.index(shape.schedule)),
        pp=np.full(3, shape.pp),
        v=np.full(3, shape.v),
    )


def build_pipeline_layout(shape: PipelineShape, *, recompute_every: int) -> Layout:
    """Return a layout with this pipeline in which one of ``recompute_every`` layers is recomputed (0: none)."""
    return Layout(
        pp=shape.pp,
        v=shape.v,
        schedule=shape.schedule,
        ac="none" if recompute_every == NEVER else f"full/{recompute_every}",
    )


def bound_last_wgrads(
    pipe: PipelineUnits, first_stage_seconds: NDArray[np.float64], other_stage_seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return an upper bound in seconds [n, 3] of all W after a rank's last B, as ``layout/schedule`` orders them.

    That B belongs to the rank's first stage. A W of this stage takes ``first_stage_seconds``, a W of its other stages
    takes ``other_stage_seconds``.
    """
    earlier_wgrads = pipe.first_stage * WEIGHT_LAG[pipe.schedule]
    separate = (earlier_wgrads + 1) * first_stage_seconds + earlier_wgrads * other_stage_seconds
    paired = (earlier_wgrads + 1) * np.maximum(first_stage_seconds, other_stage_seconds)
    return np.where(PAIRED[pipe.schedule], paired, np.where(SPLIT[pipe.schedule], separate, 0.0))


def sum_units(counts: NDArray[np.float64], unit_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums over units, weighted by their counts: [n, ranks, units] x [n, units] → [n, ranks]."""
    return np.asarray(np.einsum("npu,nu->np", counts, unit_bytes))
