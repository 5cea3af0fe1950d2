"""Predicted steps side by side, as records: what they share, how they differ, and every quantity of each.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from fivefold.display import Shown, flatten
from fivefold.record import Record
from fivefold.step import FITS_RISK, Step
from fivefold.units import show_seconds


class SpeedRatio(Record):
    """Tokens per second of one step over those of another, with the intervals that hold 50 and 90 % of the pairs."""

    ratio: PositiveFloat
    low_90: PositiveFloat
    low_50: PositiveFloat
    high_50: PositiveFloat
    high_90: PositiveFloat
    differences: tuple[str, ...]  # what the two steps differ in

    @property
    def verdict(self) -> Literal["clear", "likely", "not distinguishable"]:
        """Tell whether nine tenths, or half, of the measured ratios lie on one side of 1."""
        if self.high_90 < 1 or self.low_90 > 1:
            return "clear"
        return "likely" if self.high_50 < 1 or self.low_50 > 1 else "not distinguishable"

    def invert(self) -> SpeedRatio:
        """Return the ratio of the second speed over the first."""
        return SpeedRatio(
            ratio=1 / self.ratio,
            low_90=1 / self.high_90,
            low_50=1 / self.high_50,
            high_50=1 / self.low_50,
            high_90=1 / self.low_90,
            differences=self.differences,
        )


Parts = Mapping[str, float]
MAX_NAMED = 3  # parts of a difference that are named
UNNAMED_RATIO = 0.15  # share of a difference, or of its largest part if that is larger, that may stay without a name
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


def list_differences(before: Parts, after: Parts) -> list[tuple[str, float]]:
    """Return the seconds by which each part of ``after`` differs from ``before``, largest first."""
    seconds = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in dict.fromkeys((*before, *after))}
    return sorted(
        ((part, difference) for part, difference in seconds.items() if difference),
        key=lambda part_and_difference: -abs(part_and_difference[1]),
    )


def break_down(before: Parts, after: Parts) -> str:
    """List the parts that explain the difference, the largest first: ``compute −1.65 s, bubble +1.58 s``.

    One to three are named, until the rest is little. Instead of the third, all others are added together if it does not
    explain them. "" if there is no difference.
    """
    named, differences = list[str](), list_differences(before, after)
    rest = total = sum(seconds for _, seconds in differences)
    little = UNNAMED_RATIO * max([abs(total), *(abs(seconds) for _, seconds in differences[:1])])
    for place, (part, seconds) in enumerate(differences, start=1):
        if place == MAX_NAMED and abs(rest - seconds) > little:
            part, seconds = "others", rest
        named.append(_format_part(part, seconds))
        rest -= seconds
        if abs(rest) <= little:
            break
    return ", ".join(named)


def _format_part(part: str, seconds: float) -> str:
    """Write a part with its signed difference: ``bubble +322 ms``."""
    return f"{part} {'+' if seconds > 0 else '−'}{show_seconds(abs(seconds))}"
