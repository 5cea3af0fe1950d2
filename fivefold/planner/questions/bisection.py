"""The largest number that fits, by bisection."""

from __future__ import annotations

from collections.abc import Callable

MAX_GROWTH = 64  # of the largest size that fits, to the next one that is tried


def find_largest(fits: Callable[[int], bool], *, limit: int, start: int = 1) -> int:
    """Return the largest number up to ``limit`` that fits, or 0, by bisection from ``start``.

    Every smaller number must fit too.
    """
    low, high = 0, start
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def find_largest_by_bytes(count_spare_bytes: Callable[[int], int], *, limit: int, start: int) -> int:
    """Return the largest number up to ``limit`` of which no bytes are missing, or 0.

    Bytes grow nearly in proportion, so that the number where none are spare is near the line through two known ones;
    every third step halves what is left. Every smaller number must fit too.
    """
    spare_bytes = {1: count_spare_bytes(1)}
    if spare_bytes[1] < 0:
        return 0
    low, high = 1, limit + 1
    tried = min(max(2, start), limit)
    while high - low > 1:
        spare_bytes[tried] = count_spare_bytes(tried)
        if spare_bytes[tried] >= 0:
            low = tried
        else:
            high = tried
        other = high if high in spare_bytes else max(number for number in spare_bytes if number != low)
        slope = (spare_bytes[low] - spare_bytes[other]) / (other - low)
        guess = low + int(spare_bytes[low] / slope) if slope > 0 else high
        if high > limit:
            tried = max(low + 1, min(guess, MAX_GROWTH * low, limit))
        elif len(spare_bytes) % 3 == 0:
            tried = (low + high) // 2
        else:
            tried = max(low + 1, min(guess, high - 1))
    return low
