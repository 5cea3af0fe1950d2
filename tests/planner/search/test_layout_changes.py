"""What a single change of a layout rules out goes with it, and nothing else does."""

from __future__ import annotations

import pytest

from fivefold.layout.spec import Layout
from fivefold.planner.search.layout_changes import change, rank_moves, with_virtual_stages, with_zero
from fivefold.planner.search.simplest import _list_moves


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("dp4 pp2 v2 zero1 mbs1", {"dp": 8, "pp": 1}, "dp8 zero1 mbs1"),
        ("dp4 pp4 mbs1 ac=full@2", {"dp": 8, "pp": 2}, "dp8 pp2 mbs1 ac=full"),
        ("dp4 pp4 mbs1 ac=full@1", {"dp": 8, "pp": 2}, "dp8 pp2 mbs1 ac=full@1"),
        ("dp2 cp2 zero1/2 mbs1 cp=ulysses", {"dp": 2, "cp": 1, "tp": 2}, "dp2 tp2 zero1 mbs1"),
        ("dp8 zero3/4 mbs1", {"dp": 1, "tp": 8}, "tp8 mbs1"),
        ("dp8 zero3/8 mbs1", {"mbs": 2}, "dp8 zero3/8 mbs2"),  # as it was written
        ("dp2 tp4 mbs1 nosp", {"dp": 8, "tp": 1}, "dp8 mbs1"),
    ],
)
def test_change_drops_fields_that_other_degrees_exclude(text: str, fields: dict[str, int], expected: str) -> None:
    assert change(Layout.parse(text), **fields) == Layout.parse(expected)


def test_a_change_that_contradicts_the_layout_gives_none() -> None:
    assert change(Layout.parse("dp4 mbs1"), ep=3) is None
    assert change(Layout.parse("dp4 mbs1"), cp_kind="ulysses") is None


def test_single_changes_give_the_expected_layouts() -> None:
    layout = Layout.parse("dp4 pp2 v2 zero2/2 mbs1")
    assert [str(with_zero(layout, zero)) for zero in (0, 3)] == [
        str(Layout.parse(text)) for text in ("dp4 pp2 v2 zero0 mbs1", "dp4 pp2 v2 zero3/2 mbs1")
    ]
    assert with_virtual_stages(layout, 1) == Layout.parse("dp4 pp2 zero2/2 mbs1")
    assert with_virtual_stages(layout, 4) == Layout.parse("dp4 pp2 v4 zero2/2 mbs1")


def test_ranks_move_between_all_axes_of_the_world() -> None:
    moved = [rank_move for rank_move in rank_moves(Layout.parse("dp2 tp2 mbs1")) if rank_move]
    assert {str(item) for item in moved} == {
        str(Layout.parse(text))
        for text in ("tp4 mbs1", "tp2 cp2 mbs1", "tp2 pp2 mbs1", "dp4 mbs1", "dp2 cp2 mbs1", "dp2 pp2 mbs1")
    }


def test_a_pipeline_that_recomputes_on_some_ranks_has_simpler_layouts_without_it() -> None:
    """``ac=full@1`` goes with the pipeline whose ranks it names; it does not rule out a layout without pipeline."""
    simpler = set(_list_moves(Layout.parse("dp4 pp2 mbs1 ac=full@1")))
    assert Layout.parse("dp8 mbs1 ac=full") in simpler
