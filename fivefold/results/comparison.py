"""Predicted steps side by side, as records: what they share, how they differ, and every quantity of each.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat

from fivefold.display import Shown, flatten
from fivefold.record import Record
from fivefold.results.ratio import SpeedRatio
from fivefold.step import FITS_RISK, Step

EQUAL = 5e-4  # relative difference up to which two values print the same
Unit = Literal["seconds", "bytes", "share", "per second", "count", "FLOPs", "dollars", "words"]


class Variant(Record):
    """One of the compared steps; ``facts``: the keywords in which it differs from the others."""

    name: str  # A, B, …
    facts: tuple[str, ...]
    step: Step | None = None
    error: str = ""  # why there is no step, in one line
    dollars_per_rank_hour: NonNegativeFloat | None = None


class Quantity(Record):
    """One quantity of every variant that has a step, in order; None where it does not apply to a variant."""

    name: str
    unit: Unit
    better: Literal["less", "more", "neither"]
    values: tuple[float | str | None, ...]

    @property
    def is_different(self) -> bool:
        """Tell whether the variants differ in it."""
        return len(set(self.values)) > 1

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """Return the values, with None for those that are not numbers."""
        return tuple(value if isinstance(value, float) else None for value in self.values)

    @property
    def is_best(self) -> tuple[bool, ...]:
        """Tell of each value whether it is the best, within ``EQUAL``; all False if no value is better than another."""
        numbers = [value for value in self.numbers if value is not None]
        if self.better == "neither" or not self.is_different or not numbers:
            return tuple(False for _ in self.values)
        if self.unit == "seconds" and None in self.values:  # a variant that does not send such messages is best
            return tuple(value is None for value in self.values)
        best = min(numbers) if self.better == "less" else max(numbers)
        return tuple(value is not None and abs(value - best) <= EQUAL * abs(best) for value in self.numbers)

    @property
    def relative_values(self) -> tuple[float | None, ...]:
        """Return each value relative to the first, minus 1; None if either is missing."""
        first = self.numbers[0]
        return tuple(value / first - 1 if first and value is not None else None for value in self.numbers)


class VariantRatio(Record):
    """The predicted speed of one variant over that of another, by their names."""

    first: str
    second: str
    speed: SpeedRatio


class Comparison(Shown):
    """The result of ``planner.compare``: ``rows`` cover the variants with a step, ``common`` the keywords all share.

    ``ratios``: of every two variants on GPUs, unless no published runs differ as they do.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_comparison"
    charted_by: ClassVar[str] = "fivefold.rendering.comparison:draw_times"

    common: tuple[str, ...]
    variants: tuple[Variant, ...]
    rows: tuple[Quantity, ...]
    ratios: tuple[VariantRatio, ...] = ()
    risk: float = FITS_RISK  # probability of running out of memory up to which a variant fits

    def ratio(self, first: str, second: str) -> SpeedRatio | None:
        """Return the speed of variant ``first`` over that of ``second``; None if its uncertainty is not known."""
        for pair in self.ratios:
            if (pair.first, pair.second) == (first, second):
                return pair.speed
            if (pair.first, pair.second) == (second, first):
                return pair.speed.invert()
        return None

    def fits(self, step: Step) -> bool:
        """Tell whether a step's risk of running out of memory is at most the requested one."""
        memory = step.memory
        return memory.verdict in ("fits", None) if memory.risk is None else memory.risk <= self.risk

    def line(self) -> str:
        """Return the number of variants and what they share, as one line."""
        return f"of {len(self.variants)}: {' · '.join(self.common)}"

    def table(self) -> list[dict[str, Any]]:
        """Return one row per variant that has a step."""
        return [
            {"name": variant.name, **flatten(variant.step.model_dump(mode="json"))}
            for variant in self.variants
            if variant.step
        ]

    @property
    def predicted_variants(self) -> tuple[Variant, ...]:
        """Return the variants that have a step."""
        return tuple(variant for variant in self.variants if variant.step is not None)
