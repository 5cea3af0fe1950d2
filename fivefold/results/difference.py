"""Explains why one step takes longer than another: the difference in seconds of each part of its time.

parts   {"compute": 4.83, "bubble": 0.24, "tp communication": 0.56, "update": 0.01}
"""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.units import show_seconds

Parts = Mapping[str, float]
MIN_NAMED_RATIO = 0.1  # differences below this share of the largest are not named


def list_differences(before: Parts, after: Parts) -> list[tuple[str, float]]:
    """Return the seconds by which each part of ``after`` differs from ``before``, largest first."""
    seconds = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in dict.fromkeys((*before, *after))}
    return sorted(
        ((part, difference) for part, difference in seconds.items() if difference),
        key=lambda part_and_difference: -abs(part_and_difference[1]),
    )


def name_largest_part(before: Parts, after: Parts) -> str:
    """Name the part that contributes most to the total difference: ``bubble +322 ms``; "" if there is no difference."""
    changes = list_differences(before, after)
    total = sum(difference for _, difference in changes)
    return next((_format_part(part, difference) for part, difference in changes if difference * total > 0), "")


def break_down(before: Parts, after: Parts) -> str:
    """List every part that contributes notably to the difference: ``bubble +322 ms, compute −120 ms``."""
    changes = list_differences(before, after)
    threshold = MIN_NAMED_RATIO * abs(changes[0][1]) if changes else 0.0
    return ", ".join(_format_part(part, difference) for part, difference in changes if abs(difference) >= threshold)


def _format_part(part: str, seconds: float) -> str:
    """Write a part with its signed difference: ``bubble +322 ms``."""
    return f"{part} {'+' if seconds > 0 else '−'}{show_seconds(abs(seconds))}"
