"""The work of a search in units that do not depend on the computer, and the gap to the optimum that it then allows.

    no gap until ``EXACT_UNITS`` are used; then ``FIRST_GAP`` for ``FIRST_GAP_SHARE`` of them
    then the gap doubles every ``DOUBLING_UNITS``

It is like the work limit and gap of a mixed-integer solver. Wall time would make results depend on the machine. One
unit is a row of a table that is read for a layout, also if it is read once for several; computed figures count as the
number of rows that take as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.job import Job
from fivefold.layout.schedule.pipeline_schedule import ScheduleName
from fivefold.layout.spec import Layout

UNITS_PER_PASS = 100  # to list the operations of a model's unit and to time them, or to simulate their memory
UNITS_PER_STATE = 40  # to count the states of a model's unit, or to time its data-parallel messages
UNITS_PER_PLACE = 30  # to find the groups of a layout
UNITS_PER_ESTIMATE = 3000  # to estimate a layout, or to count its memory
UNITS_PER_ACTION = 4  # to list an action of a schedule, once for all layouts with this schedule
ACTIONS_PER_UNIT = 4  # of a schedule that are simulated in each estimate
PLACES_PER_UNIT = 16  # stages of a rank that an action of a new schedule is compared over, to find the peak's passes
PLACES_PER_PEAK_UNIT = 1000  # the same in each count of memory
PERIODIC_ROUNDS = 4  # rounds of pp micro-batches of which a longer schedule is extrapolated (``time/steady_state.py``)
EXACT_UNITS = 5_000_000
QUESTION_UNITS = 23 * EXACT_UNITS // 20  # of all searches that answer one question
RANKING_SHARE = 0.75  # of the limit, after which a search that proposes a layout proves only the best
REFINING_UNITS = 1_000_000  # spent on layouts near the best after the limit
CLIMBING_UNITS = 1_000_000  # spent on single changes of a layout that fits, where few do
DOUBLING_UNITS = 100_000
FIRST_GAP = 0.01  # allowed first, as a share of the optimum: less than the error of a prediction
FIRST_GAP_SHARE = 0.5  # of the limit, for which the gap stays the first: many searches end in it
MAX_DOUBLINGS = 20  # beyond which nothing is left to examine


class SearchWork:
    """Units of work that a search has spent; the tables of its bounds share one and count into it."""

    def __init__(
        self,
        *,
        exact_units: int = EXACT_UNITS,
        doubling_units: int = DOUBLING_UNITS,
        refining_units: int = REFINING_UNITS,
    ) -> None:
        self.exact_units, self.doubling_units, self.refining_units = exact_units, doubling_units, refining_units
        self.first_gap_units = int(FIRST_GAP_SHARE * exact_units)
        self.units = 0
        self.schedules: set[tuple[ScheduleName, int, int, int]] = set()  # that were simulated

    def add(self, units: int) -> None:
        """Count units of work that were spent."""
        self.units += units

    def add_estimate(self, layout: Layout, job: Job) -> None:
        """Count an estimate of a layout, or of its memory."""
        self.add(self.price_estimate(layout, job))
        self.schedules.add((layout.schedule, layout.pp, layout.v, layout.micro_batches(job)))

    def price_estimate(self, layout: Layout, job: Job) -> int:
        """Return the units that the next estimate of a layout takes: more if its schedule was not simulated before."""
        pp, v, micro_batches = layout.pp, layout.v, layout.micro_batches(job)
        if pp == 1:
            return UNITS_PER_ESTIMATE
        simulated = micro_batches if layout.pipeline.forwards_first else min(micro_batches, PERIODIC_ROUNDS * pp)
        actions = 2 * pp * v * simulated
        is_known = (layout.schedule, pp, v, micro_batches) in self.schedules
        units_of_schedule = 0 if is_known else UNITS_PER_ACTION * actions + actions * v // PLACES_PER_UNIT
        return (
            UNITS_PER_ESTIMATE + actions // ACTIONS_PER_UNIT + actions * v // PLACES_PER_PEAK_UNIT + units_of_schedule
        )

    def can_afford(self, layout: Layout, job: Job) -> bool:
        """Return whether the next estimate of a layout keeps to the limit."""
        return self.units + self.price_estimate(layout, job) <= self.exact_units

    @property
    def is_spent(self) -> bool:
        """Return whether the limit is exceeded."""
        return self.units > self.exact_units

    @property
    def is_ranking_spent(self) -> bool:
        """Return whether the share of the limit that is meant for other layouts than the best is exceeded."""
        return self.units > RANKING_SHARE * self.exact_units

    @contextmanager
    def extend(self, units: int) -> Iterator[None]:
        """Allow no gap within until ``units`` more are spent."""
        limit, self.exact_units = self.exact_units, self.units + units
        try:
            yield
        finally:
            self.exact_units = limit

    @property
    def allowed_gap(self) -> float:
        """Return the share of the optimum by which the result may exceed it; layouts within it are not examined."""
        excess_units = self.units - self.exact_units
        if excess_units <= 0:
            return 0.0
        doublings = max(0, excess_units - self.first_gap_units) // self.doubling_units
        return FIRST_GAP * 2.0 ** min(doublings, MAX_DOUBLINGS)


class WorkBudget:
    """Units of work that the searches of one question share, which keeps the time of its answer near that of one."""

    def __init__(self, units: int = QUESTION_UNITS) -> None:
        self.units = units
        self._searches = list[SearchWork]()

    @property
    def remaining_units(self) -> int:
        """Return the units that no search has spent."""
        return max(0, self.units - sum(work.units for work in self._searches))

    def allot(self, units: int = EXACT_UNITS, *, reserve: int = 0) -> SearchWork:
        """Return the work of the next search: at most ``units``, and what is left except a ``reserve`` for later ones.

        What a search spends beyond its limit, while the gap widens and on layouts near the best, is in proportion.
        """
        limit = min(units, max(0, self.remaining_units - reserve))
        work = SearchWork(
            exact_units=limit,
            doubling_units=max(1, limit * DOUBLING_UNITS // EXACT_UNITS),
            refining_units=limit * REFINING_UNITS // EXACT_UNITS,
        )
        self._searches.append(work)
        return work
