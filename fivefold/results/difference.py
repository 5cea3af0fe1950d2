"""Why one step takes longer than another: by how many seconds each part of its time differs.

parts   {"compute": 4.83, "bubble": 0.24, "tp messages": 0.56, "update": 0.01}
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.units import show_seconds

Parts = Mapping[str, float]
TOLD = 0.1  # share of the largest difference below which others are not named


def differences(before: Parts, after: Parts) -> list[tuple[str, float]]:
    """Seconds by which ``after`` differs from ``before``, part by part, the largest first."""
    found = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in dict.fromkeys((*before, *after))}
    return sorted(((part, by) for part, by in found.items() if by), key=lambda each: -abs(each[1]))


def because(before: Parts, after: Parts) -> str:
    """The part that differs most the way the whole does: ``bubble +322 ms``; "" if the steps take as long."""
    found = differences(before, after)
    whole = sum(by for _, by in found)
    return next((_word(part, by) for part, by in found if by * whole > 0), "")


def taken_apart(before: Parts, after: Parts) -> str:
    """Every part that matters to the difference: ``bubble +322 ms, compute −120 ms``."""
    found = differences(before, after)
    least = TOLD * abs(found[0][1]) if found else 0.0
    return ", ".join(_word(part, by) for part, by in found if abs(by) >= least)


def _word(part: str, by: float) -> str:
    return f"{part} {'+' if by > 0 else '−'}{show_seconds(abs(by))}"
