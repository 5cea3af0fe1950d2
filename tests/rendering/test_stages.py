from __future__ import annotations

import pytest

from fivefold.rendering.stages import StageTable
from fivefold.step import StageMemory
from tests.printed import to_text

GIB = 2**30


def stage(number: int, *, activations: int, cause: str = "") -> StageMemory:
    return StageMemory(
        stage=number,
        parameters_bytes=5 * GIB,
        gradients_bytes=3 * GIB,
        optimizer_bytes=9 * GIB,
        activations_bytes=activations * GIB,
        temporary_bytes=2 * GIB,
        peak_bytes=(19 + activations) * GIB,
        peak_cause=cause,
    )


def pipeline(count: int) -> list[StageMemory]:
    """The first and last stage differ, all between are equal."""
    middle = [stage(i, activations=9, cause=f"block {i} backward") for i in range(1, count - 1)]
    return [stage(0, activations=21, cause="embed"), *middle, stage(count - 1, activations=1, cause="head")]


def test_equal_adjacent_stages_share_a_line() -> None:
    lines = to_text(StageTable(pipeline(64)), width=100).splitlines()
    assert [line.split() for line in lines] == [
        ["stage", "states", "activations", "temporary", "peak", "cause"],
        ["0", "17.00", "21.00", "2.00", "40.00", "█" * 8 + "▒" * 11 + "·", "embed"],
        ["1–62", "17.00", "9.00", "2.00", "28.00", "█" * 8 + "▒" * 5 + "·", "backward", "of", "a", "block"],
        ["63", "17.00", "1.00", "2.00", "20.00", "█" * 8 + "▒" + "·", "head"],
    ]


def test_unequal_stages_have_a_line_each() -> None:
    text = to_text(StageTable([stage(i, activations=64 - i) for i in range(64)]), width=80)
    assert len(text.splitlines()) == 65


def test_a_single_stage_is_printed() -> None:
    assert to_text(StageTable(pipeline(2)[:1])).splitlines()[1].startswith("0")


@pytest.mark.parametrize(("width", "last"), [(88, "embed"), (72, "·"), (50, "40.00"), (30, "40.00"), (12, "40.00")])
def test_columns_of_stages_are_left_out_on_a_narrow_terminal(width: int, last: str) -> None:
    lines = to_text(StageTable(pipeline(4)), width=width).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= width
    assert lines[1].rstrip().endswith(last)
