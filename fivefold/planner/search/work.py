"""The work of a search in units that do not depend on the computer, and the gap to the optimum that it then allows.

    exact until ``EXACT_UNITS`` are spent, then the allowed gap doubles every ``DOUBLING_UNITS``

As the work limit and the gap of a mixed-integer solver: wall time would make results depend on the machine.
"""

from __future__ import annotations

UNITS_PER_FIGURE = 500  # of a figure that is computed, compared with a row of a table that is read
EXACT_UNITS = 18_000_000  # Llama 3 405B on 16,384 GPUs takes 16 million
DOUBLING_UNITS = 300_000
FIRST_GAP = 0.01  # allowed first, as a share of the optimum: less than the error of a prediction


class SearchWork:
    """Units of work that a search has spent; the tables of its bounds share one and count into it."""

    def __init__(self, *, exact_units: int = EXACT_UNITS, doubling_units: int = DOUBLING_UNITS) -> None:
        self.exact_units, self.doubling_units = exact_units, doubling_units
        self.units = 0

    def add(self, *, figures: int, rows: int) -> None:
        """Count figures that were computed and rows of tables that were read."""
        self.units += figures * UNITS_PER_FIGURE + rows

    @property
    def allowed_gap(self) -> float:
        """Return the share of the optimum by which the result may exceed it; layouts within it are not examined."""
        over = self.units - self.exact_units
        return FIRST_GAP * 2.0 ** (over // self.doubling_units) if over > 0 else 0.0
