"""Patterns of layouts against nested loops, and against the layouts they are read as."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.layout.pattern import expand_alternatives, fill_degree
from fivefold.layout.spec import Layout

WORDS = {"tp": [1, 2, 3, 4, 8], "pp": [1, 2, 4, 6], "cp": [1, 2, 4], "mbs": [1, 2, 4], "zero": [0, 1, 2, 3]}


def test_pattern_without_wildcards_is_unchanged() -> None:
    assert expand_alternatives("dp8 zero3") == ["dp8 zero3"]
    assert expand_alternatives(" dp*  tp{1,2}{,  nosp} ") == ["dp* tp1", "dp* tp1 nosp", "dp* tp2", "dp* tp2 nosp"]
    assert expand_alternatives("pp{2,2 v2,2}") == ["dp* pp2", "dp* pp2 v2"]
    assert expand_alternatives("dp=*,tp={1,2} {fsdp,ddp}") == [
        "dp* tp1 zero3",
        "dp* tp1 zero0",
        "dp* tp2 zero3",
        "dp* tp2 zero0",
    ]
    assert expand_alternatives("tp{1,2} {fsdp,hsdp/4,zero3}") == [
        "dp* tp1 zero3",
        "dp* tp1 zero3/4",
        "dp* tp2 zero3",
        "dp* tp2 zero3/4",
    ]
    assert expand_alternatives("tp{1,2} hsdp") == ["dp* tp1 hsdp", "dp* tp2 hsdp"]
    assert expand_alternatives("{ddp,zero3 mbs2}") == ["dp* zero0", "dp* zero3 mbs2"]
    assert expand_alternatives("TP 8/PP {2,4} ZeRO 1") == ["dp* tp8 pp2 zero1", "dp* tp8 pp4 zero1"]
    assert expand_alternatives("fsdp cp2") == ["dp* zero3 cp2"]
    assert fill_degree("dp* tp2 pp2 v2 mbs4", ranks=16) == "dp4 tp2 pp2 v2 mbs4"
    assert fill_degree("dp2 tp* zero1", ranks=16) == "dp2 tp8 zero1"
    assert fill_degree("dp* tp2x2", ranks=8) == "dp2 tp2x2"
    assert fill_degree("dp* tp3", ranks=16) is None
    assert (fill_degree("dp8 ep4", ranks=8), fill_degree("dp8", ranks=16)) == ("dp8 ep4", None)


@given(
    st.dictionaries(st.sampled_from(list(WORDS)), st.data(), min_size=1).flatmap(
        lambda chosen: st.fixed_dictionaries(
            {name: st.lists(st.sampled_from(WORDS[name]), min_size=1, max_size=4, unique=True) for name in chosen}
        )
    ),
    st.sampled_from([1, 2, 6, 8, 12, 16, 48, 64]),
)
def test_a_pattern_is_nested_loops(axes: dict[str, Any], ranks: int) -> None:
    pattern = "dp* " + " ".join(f"{name}{{{','.join(map(str, sizes))}}}" for name, sizes in axes.items())
    results = {
        text
        for alternative in expand_alternatives(pattern)
        if (text := fill_degree(alternative, ranks=ranks)) is not None
    }
    expected = set()
    for sizes in product(*axes.values()):
        fields = dict(zip(axes, sizes, strict=True))
        taken = fields.get("tp", 1) * fields.get("pp", 1) * fields.get("cp", 1)
        if ranks % taken == 0:
            expected.add(Layout(dp=ranks // taken, **fields))
    assert {Layout.parse(text) for text in results} == expected
    assert len(results) == len(expected)
    assert all(layout.world == ranks for layout in expected)


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("dp* tp{1,2", "has an unmatched brace, or braces within braces"),
        ("dp* tp{1,{2,4}}", "has an unmatched brace, or braces within braces"),
        ("dp* tp*", "has two open degrees; keep one *"),
        ("dp2 tq{1,2}", "unknown layout token 'tq1'"),
        ("dp2 zero*", r"unknown layout token 'zero\*'"),
        ("dp2 zero{1,4}", "ZeRO has stages 0 to 3"),
    ],
)
def test_invalid_pattern_is_an_error(pattern: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        expand_alternatives(pattern)
