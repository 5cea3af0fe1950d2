"""A lower bound of a pipeline's step that simulates its schedule, for all candidates of one schedule at once.

    time ≥ end of a rank in the first rounds + rounds left · the busiest rank's + exposed reductions + update

The seconds of a pass are those of ``bounds.py``, which does not model how stages wait for one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.schedule.simulation import Waves, divide_into_waves, simulate_schedules
from fivefold.planner.search.bounds import SAFE, Bounds
from fivefold.planner.search.columns import CandidateLayouts, Floats, Ints
from fivefold.planner.search.shapes import count_stage_units
from fivefold.planner.time.steady_state import build_step_table, split_rounds

MAX_GROUPED = 512  # candidates that are simulated at once


def group_schedules(bounds: Bounds, candidates: CandidateLayouts) -> Ints:
    """Assign a number to each group of candidates that ``simulate_group`` simulates together.

    The number is -1 for candidates without a pipeline or with paired passes, which it does not simulate.
    """
    is_simulated = np.array([shape.pp > 1 and not shape.pipeline.pairs_passes for shape in bounds.space.shapes])
    recompute_every = bounds.recompute_every[bounds.partials.ac[candidates.partial]]
    code = (candidates.shape << 16 | recompute_every) << 32 | _count_micro_batches(bounds, candidates)
    return np.where(is_simulated[candidates.shape], code, -1)


def simulate_group(bounds: Bounds, candidates: CandidateLayouts) -> Floats:
    """Return the seconds [n] of candidates of one group of ``group_schedules``."""
    shape = bounds.space.shapes[candidates.shape[0]]
    recompute_every = int(bounds.recompute_every[bounds.partials.ac[candidates.partial[0]]])
    has_reference = bounds.space.job.has_reference
    rounds = split_rounds(*shape, int(_count_micro_batches(bounds, candidates)[0]), has_reference)
    pipe = bounds.pipelines(candidates)
    unit_seconds = bounds.estimates.units(candidates)
    parallel = bounds.estimates.parallel(candidates)
    (forward_dp, backward_dp), _, ends, update = bounds.compute_data_parallel_seconds(
        pipe, candidates, unit_seconds, parallel
    )
    p2p_delay, p2p_send = bounds.estimates.stage_message_seconds(candidates).T
    table, _ = count_stage_units(
        bounds.planner.counts, shape, recompute_every=recompute_every, runs=bounds.estimates.runs
    )
    forward, backward, weight = (
        table @ column.T
        for column in (unit_seconds[:, 0] + forward_dp, unit_seconds[:, 1] + backward_dp, unit_seconds[:, 2])
    )
    kinds = {"F": forward + p2p_send, "B": backward + p2p_send, "BW": backward + weight + p2p_send, "W": weight}
    (first, first_tasks), *later_tables = rounds.tables
    seconds = np.array([kinds[task.kind][task.stage] for task in first.order.tasks])
    micro_batches = first.micro_batches // (2 if has_reference else 1)
    rank_finish = simulate_schedules(_get_waves(*shape, has_reference, micro_batches), seconds, p2p_delay, pp=shape.pp)
    if later_tables:
        round_tasks = _count_tasks(later_tables[0][1], first.order.tasks) - _count_tasks(first_tasks, first.order.tasks)
        rank_finish += rounds.rounds * (round_tasks @ seconds).max(axis=0)
    step_end = np.take_along_axis(rank_finish.T, pipe.rank, axis=1) + ends + update
    return np.asarray(np.maximum(rank_finish.max(axis=0), step_end.max(axis=1)) * SAFE)


def _count_micro_batches(bounds: Bounds, candidates: CandidateLayouts) -> Ints:
    """Return the micro-batches of a step with the full global batch, which an estimate describes."""
    partials = bounds.partials.take(candidates.partial)
    return bounds.space.job.global_batch // (partials.dp * partials.mbs)


def _count_tasks(counts: tuple[Mapping[Task, int], ...], tasks: tuple[Task, ...]) -> Floats:
    """Return how often each rank runs each of ``tasks``, [ranks, tasks]."""
    return np.array([[rank_counts.get(task, 0) for task in tasks] for rank_counts in counts], float)


@lru_cache(maxsize=256)
def _get_waves(name: ScheduleName, pp: int, v: int, has_reference: bool, micro_batches: int) -> Waves:
    return divide_into_waves(build_step_table(name, pp, v, has_reference, micro_batches).order, pp=pp)
