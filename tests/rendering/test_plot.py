"""Numbers and places of axes."""

from __future__ import annotations

import re

import pytest

from fivefold.rendering.drawing.parallel import ParallelAxis, ParallelLine, draw_parallel_axes
from fivefold.rendering.drawing.plot import show_ticks


def test_the_numbers_of_an_axis_have_one_unit() -> None:
    assert show_ticks([0, 5000, 10000]) == ["0", "5 k", "10 k"]
    assert show_ticks([0, 500_000, 1_000_000]) == ["0", "500 k", "1 M"]
    assert show_ticks([2.5, 5, 7.5]) == ["2.5", "5", "7.5"]
    assert show_ticks([]) == []


def test_an_axis_with_long_texts_has_room_for_them() -> None:
    texts = ("norm+rope+act", "none", "full")
    axes = [ParallelAxis("tp", [1, 2, 4]), ParallelAxis("ac", texts), ParallelAxis("memory, GiB", [3, 2, 1], True)]
    picture = str(draw_parallel_axes(axes, [ParallelLine("", "", "")] * 3, label="choices"))
    first, second, third = sorted({float(place) for place in re.findall(r'x1="([\d.]+)%"', picture)})
    assert (first, third) == (0, 100)
    assert (third - second) / (second - first) == pytest.approx(13 / 10, rel=1e-3)
