"""Several predicted steps side by side as a record: what they share, in what they differ, and each quantity of all.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat

from fivefold.display import Shown, flat
from fivefold.record import Record
from fivefold.step import FITS_RISK, Step

EQUAL = 5e-4  # share by which two values differ that print alike
Unit = Literal["seconds", "bytes", "share", "per second", "count", "dollars", "words"]


class Variant(Record):
    """One of the things compared; ``facts``: the words in which it differs from the others."""

    name: str  # A, B, …
    facts: tuple[str, ...]
    step: Step | None = None
    refused: str = ""  # why there is no step, in one line
    dollars_per_rank_hour: NonNegativeFloat | None = None


class Quantity(Record):
    """One quantity of every variant that has a step, in their order; None where a variant has none of it."""

    name: str
    unit: Unit
    better: Literal["less", "more", "neither"]
    values: tuple[float | str | None, ...]

    @property
    def differs(self) -> bool:
        """Whether the variants differ in it."""
        return len(set(self.values)) > 1

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The values that are numbers; None for the others."""
        return tuple(value if isinstance(value, float) else None for value in self.values)

    @property
    def best(self) -> tuple[bool, ...]:
        """Whether each value is the best, or as good but for ``EQUAL``; all False if none is better than another."""
        known = [value for value in self.numbers if value is not None]
        if self.better == "neither" or not self.differs or not known:
            return tuple(False for _ in self.values)
        if self.unit == "seconds" and None in self.values:  # of messages that a variant does not send
            return tuple(value is None for value in self.values)
        least = min(known) if self.better == "less" else max(known)
        return tuple(value is not None and abs(value - least) <= EQUAL * abs(least) for value in self.numbers)

    @property
    def relative(self) -> tuple[float | None, ...]:
        """Each value over that of the first, less 1; None without both."""
        first = self.numbers[0]
        return tuple(value / first - 1 if first and value is not None else None for value in self.numbers)


class Comparison(Shown):
    """What ``plan.compare`` returns. ``rows`` are of the variants that have a step, ``common`` the words of all."""

    drawn_by: ClassVar[str] = "fivefold.rendering.html:comparison"

    common: tuple[str, ...]
    variants: tuple[Variant, ...]
    rows: tuple[Quantity, ...]
    risk: float = FITS_RISK  # probability of running out of memory up to which a variant fits

    def fits(self, step: Step) -> bool:
        """Whether a step runs out of memory with at most the risk that was asked for."""
        memory = step.memory
        return memory.verdict in ("fits", None) if memory.risk is None else memory.risk <= self.risk

    def line(self) -> str:
        """How many, and what they share."""
        return f"of {len(self.variants)}: {' · '.join(self.common)}"

    def table(self) -> list[dict[str, Any]]:
        """A row for each variant that has a step."""
        return [{"name": each.name, **flat(each.step.model_dump(mode="json"))} for each in self.variants if each.step]

    @property
    def predicted(self) -> tuple[Variant, ...]:
        """The variants that have a step."""
        return tuple(variant for variant in self.variants if variant.step is not None)
