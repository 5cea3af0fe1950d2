"""Numbers of units on three ranks of a pipeline (the first, the first with most layers, the last), for the bounds.

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

NEVER = 0  # ``every`` if no layer is recomputed
RECORDS = tuple(PIPELINE_SCHEDULES[name] for name in SCHEDULES)


def _numbers(holds: Callable[[PipelineSchedule], bool]) -> tuple[int, ...]:
    """Return the numbers, in ``SCHEDULES``, of the schedules of which something holds."""
    return tuple(number for number, record in enumerate(RECORDS) if holds(record))


PAIRED = _numbers(lambda record: record.pairs_passes)  # with FB
SPLIT = _numbers(lambda record: record.splits_backward and not record.pairs_passes)  # with W, and without FB
SPLITTING = _numbers(lambda record: record.splits_backward)
BOTH_WAYS = _numbers(lambda record: record.enters_both_ends)
WEIGHT_LAG = np.array([record.weight_lag for record in RECORDS])


class PipelineUnits(NamedTuple):
    """Numbers of units [3, units] and facts [3] of three ranks; for n candidates [n, 3, units] and [n, 3]."""

    held: NDArray[np.float64]  # on the rank
    before: NDArray[np.float64]  # in the stages before the rank's first one
    lead: NDArray[np.float64]  # in its first stage
    start: Ints  # index of its first unit
    first: Ints  # index of its first stage
    rank: Ints
    chunks: Ints
    schedule: Ints
    pp: Ints
    v: Ints


def stage_units(
    counts: Counts, shape: PipelineShape, *, every: int, runs: list[UnitGroup]
) -> tuple[NDArray[np.float64], Ints]:
    """Return numbers of units of each stage [stages, units], and the index of the first unit of each.

    ``every``: see ``pipeline_units``.

    Embedding and head have one column each. The blocks of multi-token prediction in the head are recomputed if and
    only if the layout recomputes anything, and the figures of that column are of the layout.
    """
    stages = counts.stage_work(pipeline_layout(shape, every=every))
    table = np.zeros((len(stages), len(runs)))
    columns = {column_key(run): at for at, run in enumerate(runs)}
    for stage, work in enumerate(stages):
        for run, times in work:
            table[stage, columns[column_key(run)]] += times
    return table, np.array([columns[column_key(work[0][0])] for work in stages])


def column_key(run: UnitGroup) -> tuple[Name, bool]:
    """Return what tells the columns of units apart."""
    return run.name, run.recomputed and not isinstance(run.name, str)


def pipeline_units(counts: Counts, shape: PipelineShape, *, every: int, runs: list[UnitGroup]) -> PipelineUnits:
    """Return the units of one pipeline in which one of ``every`` layers is recomputed (0: none)."""
    table, firsts = stage_units(counts, shape, every=every, runs=runs)
    before = np.concatenate([np.zeros((1, len(runs))), np.cumsum(table, axis=0)])
    held = [shape.pipeline.stages_of_rank(rank, pp=shape.pp, v=shape.v) for rank in range(shape.pp)]
    layers = [table[list(stages), 2:].sum() for stages in held]
    last = shape.pp // 2 if shape.pipeline.enters_both_ends else shape.pp - 1  # farthest from the first stage
    ranks = [0, int(np.argmax(layers)), last]
    rows = [table[list(held[rank])] for rank in ranks]
    return PipelineUnits(
        held=np.array([row.sum(axis=0) for row in rows]),
        before=np.array([before[held[rank][0]] for rank in ranks]),
        lead=np.array([row[0] for row in rows]),
        start=np.array([firsts[held[rank][0]] for rank in ranks]),
        first=np.array([held[rank][0] for rank in ranks]),
        rank=np.array(ranks),
        chunks=np.full(3, len(held[0])),
        schedule=np.full(3, SCHEDULES.index(shape.schedule)),
        pp=np.full(3, shape.pp),
        v=np.full(3, shape.v),
    )


def pipeline_layout(shape: PipelineShape, *, every: int) -> Layout:
    """Return a layout with this pipeline in which one of ``every`` layers is recomputed (0: none)."""
    return Layout(pp=shape.pp, v=shape.v, schedule=shape.schedule, ac="none" if every == NEVER else f"full/{every}")


def bound_last_wgrads(pipe: PipelineUnits, near: NDArray[np.float64], far: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return an upper bound in seconds [n, 3] of all W after a rank's last B, as ``layout/schedule`` orders them.

    That B is of the rank's first stage. ``near``, ``far``: seconds of a W of its first stage, and of its others.
    """
    first = pipe.first * WEIGHT_LAG[pipe.schedule]
    separate = (first + 1) * near + first * far
    paired = (first + 1) * np.maximum(near, far)
    return np.where(np.isin(pipe.schedule, PAIRED), paired, np.where(np.isin(pipe.schedule, SPLIT), separate, 0.0))


def sum_units(counts: NDArray[np.float64], unit_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums over units, weighted by their counts: [n, ranks, units] x [n, units] → [n, ranks]."""
    return np.asarray(np.einsum("npu,nu->np", counts, unit_bytes))
