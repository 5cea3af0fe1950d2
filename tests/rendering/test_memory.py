from __future__ import annotations

import pytest

from fivefold.errors import UserError
from fivefold.rendering import memory
from fivefold.rendering.drawing import memory as drawing
from fivefold.results.spans import Level
from fivefold.step import Step
from tests.printed import to_text

GIB = 2**30


def level(seconds: float, *, activations: int, temporary: int = 0, cause: str = "") -> Level:
    return Level(seconds, 4 * GIB, 2 * GIB, activations * GIB, 0, 0, temporary * GIB, cause)


LEVELS = (
    level(0.0, activations=0),
    level(1.0, activations=4),
    level(1.0, activations=4, temporary=2, cause="head backward"),
    level(2.0, activations=0),
    level(3.0, activations=0),
)


def test_the_memory_picture_stacks_its_categories() -> None:
    """12 lines for 12 GiB: four of states, two of gradients, activations up to ten, two of temporaries for a moment."""
    lines = to_text(memory.MemoryPicture(LEVELS, rank=1, capacity_bytes=16 * GIB), width=69).splitlines()
    columns = [line[8:].ljust(60) for line in lines[:12]]
    assert [line[0] for line in columns[-4:]] == ["█"] * 4
    assert [line[0] for line in columns[-6:-4]] == ["▓"] * 2
    peak = next(i for i, letter in enumerate(columns[0]) if letter == "·")
    assert peak == pytest.approx(60 / 3, abs=1)
    assert [line[peak] for line in columns] == list("··▒▒▒▒▓▓████")
    assert all(line[-1] == " " for line in columns[:6])  # back to six
    assert lines[0].startswith("12 GiB │")
    assert lines[12].split() == ["0", "GiB", "└", "3.00", "s"]
    words = "Rank 1 peaks at 12.00 GiB, which leaves 25% of 16.00 GiB; in backward of head"
    assert " ".join(" ".join(lines[14:]).split()) == words
    assert "gathers" not in lines[13]


def test_memory_grows_evenly_between_two_levels_of_the_picture() -> None:
    lines = to_text(memory.MemoryPicture(LEVELS[:2], rank=0, capacity_bytes=16 * GIB), width=49).splitlines()
    heights = [sum(line[i] not in " " for line in lines[:12]) for i in range(8, 47)]
    assert heights == sorted(heights)
    assert heights[len(heights) // 2] == pytest.approx(12 * 0.8, abs=1)  # 8 of 10 GiB half-way


@pytest.mark.parametrize("width", [1, 9, 20, 40, 200])
def test_the_memory_picture_is_printed_at_any_width(width: int) -> None:
    text = to_text(memory.MemoryPicture(LEVELS, rank=0, capacity_bytes=16 * GIB), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_the_memory_picture_says_that_a_step_does_not_fit() -> None:
    assert memory.describe_peak(LEVELS, rank=0, capacity_bytes=10 * GIB) == (
        "Rank 0 peaks at 12.00 GiB, which is 2.00 GiB too much of 10.00 GiB"
    )


def test_the_memory_picture_shows_the_capacity_if_it_is_near_the_peak(large: Step) -> None:
    near, far = (drawing.draw_file(LEVELS, step=large, rank=0, capacity_bytes=n * GIB) for n in (16, 800))
    assert "chip 16.00 GiB" in near.to_svg()
    assert "chip" not in far.to_svg()
    assert "in backward of head" in near.to_svg()
    assert [name for _, name in near.looks] == ["states", "gradients", "activations", "temporary"]


def test_a_memory_picture_without_levels_is_an_error(large: Step) -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        drawing.draw_file([], step=large, rank=0, capacity_bytes=GIB)
