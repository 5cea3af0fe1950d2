"""The record of a predicted ratio of speeds, with the uncertainty of the ratio itself."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from fivefold.record import Record


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
