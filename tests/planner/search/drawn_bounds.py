"""Random layouts of every schedule against the bounds of a search: a bound above the estimate would hide a layout."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import with_ranks
from fivefold.planner.predict import Planner
from fivefold.planner.search.bounds import Bounds
from fivefold.planner.search.columns import CandidateLayouts
from fivefold.planner.search.simplest import bound_resting_bytes
from fivefold.planner.search.simulated_bound import group_schedules, simulate_group
from fivefold.planner.search.space import Space
from fivefold.planner.search.tables import MICRO_BATCH_SIZES, SMALL_MICRO_BATCH
from tests.planner.draws import case

WORLDS = (1, 2, 4, 8, 8, 12, 16, 32)
DRAWN, LARGER = 60, 1 + 1e-9
SIMULATED = 4  # layouts of which the schedule is simulated


class Compared(NamedTuple):
    """The largest bounds of one layout and what the planner finds; seconds are 0 where time is not compared."""

    layout: Layout
    bound_bytes: float
    peak_bytes: int
    bound_seconds: float
    seconds: float

    @property
    def is_exceeded(self) -> bool:
        """Return whether a bound is above what it bounds."""
        return self.bound_bytes > self.peak_bytes * LARGER or self.bound_seconds > self.seconds * LARGER


def drawn_space(seed: int, *, bare_ends: bool = False) -> tuple[Planner, Space] | None:
    """Return the space of a random model, machine and job with every field of it; None if it has no layout.

    ``bare_ends``: there may be one or two pipeline stages more than layers.
    """
    drawn, some = case(seed), random.Random(seed)
    world = some.choice(WORLDS)
    if bare_ends:
        world = (drawn.model.layers + some.choice((1, 2, 2))) * some.choice((1, 1, 2))
    job = drawn.job.replace(global_batch=some.choice((1, 2, 3, 4, 6, 8, 12, 40)) * some.choice((1, 2, 4, 8)))
    machine = with_ranks(drawn.machine, world)
    try:
        space = Space(drawn.model, job, world=world)
        return (Planner(model=drawn.model, machine=machine, job=job), space) if space.layouts else None
    except UserError:
        return None


def compare_bounds(
    planner: Planner, space: Space, *, seed: int, count: int, timed: bool = True, bare_ends: bool = False
) -> Iterator[Compared]:
    """Yield ``count`` random layouts of one space, as many of each schedule as can be, with their bounds.

    ``bare_ends``: only those with more stages than layers.
    """
    partials, some = space.partials.take(space.count_candidates(space.partials) > 0), np.random.default_rng(seed)
    is_bare = np.array([shape.pp * shape.v > planner.model.layers for shape in space.shapes])
    if bare_ends:
        partials = partials.take(np.isin(partials.pp, space.shape_pp[is_bare]))
    if not len(partials.dp):
        return
    result = space.expand(partials, some.integers(0, len(partials.dp), DRAWN))
    if bare_ends:
        result = result.take(is_bare[result.shape])
    if not len(result.partial):
        return
    schedules = [np.flatnonzero(result.shape == shape) for shape in np.unique(result.shape)]
    chosen = np.concatenate([some.permutation(rows)[: -(-2 * count // len(schedules))] for rows in schedules])
    candidates = _draw(space.place(partials, result.take(chosen)), 4 * count, some)
    candidates = _draw(space.shard(partials, candidates), count, some)
    bounds = Bounds(planner, space, partials)
    light = bounds.estimates.bound_states(candidates)
    sizes = [bounds.resting_bytes()[candidates.partial]]
    sizes += [bounds.memory(candidates, states=states, scaled=limit) for states in (None, light) for limit in (0, 1)]
    if "activations" not in planner.job.offload:
        sizes.append(bounds.memory(candidates, states=light, scaled=True, any_recomputation=True))
    seconds = [np.zeros(len(candidates.partial))]
    if timed:
        floors = [
            bounds.floor(max_sequences=most, complete=complete)
            for most in MICRO_BATCH_SIZES
            for complete in (False, True)
        ]
        seconds += [floor[candidates.partial] for floor in floors]
        seconds += [bounds.seconds(candidates)[0], bounds.seconds_of_adjacent_units(candidates)[0]]
        seconds += [
            bounds.bound_seconds_of_any_order(candidates, max_sequences=most)[0] for most in (*MICRO_BATCH_SIZES, 1)
        ]
        seconds += [
            bounds.bound_seconds_of_any_order(candidates, max_sequences=most, any_recomputation=True)[0]
            for most in (SMALL_MICRO_BATCH, 1)
        ]
        grouped = np.flatnonzero(group_schedules(bounds, candidates) >= 0)[:SIMULATED]
        simulated = np.zeros(len(candidates.partial))
        for row in grouped:
            simulated[row] = simulate_group(bounds, candidates.take(np.array([row])))[0]
        seconds.append(simulated)
    for at, (size, least) in enumerate(zip(np.max(sizes, axis=0), np.max(seconds, axis=0), strict=True)):
        layout = space.layout(partials, candidates, at)
        try:
            ranks = planner.memory(layout)
            time = planner.estimate(layout, ranks=ranks).step_time.seconds if timed else 0.0
        except UserError:  # more bytes than are counted
            continue
        size = max(float(size), bound_resting_bytes(layout, planner.counts))
        yield Compared(layout, size, max(rank.peak_bytes for rank in ranks), float(least), time)


def _draw(candidates: CandidateLayouts, most: int, some: np.random.Generator) -> CandidateLayouts:
    return candidates.take(some.permutation(len(candidates.partial))[:most])
