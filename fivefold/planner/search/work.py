"""The work of a search in units that do not depend on the computer, and the gap to the optimum that it then allows.

    exact until ``EXACT_UNITS`` are spent, then the allowed gap doubles every ``DOUBLING_UNITS``

As the work limit and the gap of a mixed-integer solver: wall time would make results depend on the machine. A unit is
a row of a table that is read; figures that are computed are weighed by the rows that take as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

UNITS_PER_PASS = 100  # to list the operations of a model's unit and to time them, or to simulate their memory
UNITS_PER_STATE = 40  # to count the states of a model's unit, or to time its data-parallel messages
UNITS_PER_PLACE = 30  # to find the groups of a layout
UNITS_PER_ESTIMATE = 3000  # to estimate a layout
EXACT_UNITS = 5_000_000
REFINING_UNITS = 1_000_000  # spent on layouts with the mesh of the best after the limit
DOUBLING_UNITS = 100_000
FIRST_GAP = 0.01  # allowed first, as a share of the optimum: less than the error of a prediction
MAX_DOUBLINGS = 20  # beyond which nothing is left to examine


class SearchWork:
    """Units of work that a search has spent; the tables of its bounds share one and count into it."""

    def __init__(self, *, exact_units: int = EXACT_UNITS, doubling_units: int = DOUBLING_UNITS) -> None:
        self.exact_units, self.doubling_units = exact_units, doubling_units
        self.units = 0

    def add(self, units: int) -> None:
        """Count units of work that were spent."""
        self.units += units

    @property
    def is_spent(self) -> bool:
        """Return whether the limit is exceeded."""
        return self.units > self.exact_units

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
        return FIRST_GAP * 2.0 ** min(excess_units // self.doubling_units, MAX_DOUBLINGS) if excess_units > 0 else 0.0
