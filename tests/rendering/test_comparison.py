from __future__ import annotations

from typing import Any

import pytest

from fivefold.rendering import comparison
from fivefold.results.comparison import Comparison, Quantity, Variant
from fivefold.units import show_seconds
from tests.printed import to_text
from tests.rendering.conftest import SMALL


def side_by_side(count: int, *, error: str = "") -> Comparison:
    steps = [
        SMALL.replace(
            time=SMALL.time.replace(step_seconds=0.82 + i),
            tokens_per_second_per_gpu=1000 / (0.82 + i),
        )
        for i in range(count)
    ]
    variants = [Variant(name="ABCDEFGH"[i], facts=(f"mbs{i + 1}",), step=step) for i, step in enumerate(steps)]
    rows = (
        Quantity(name="step", unit="seconds", better="less", values=tuple(step.time.step_seconds for step in steps)),
        Quantity(name="peak memory", unit="bytes", better="less", values=(2.0**30,) * count),
        Quantity(
            name="free memory", unit="bytes", better="more", values=tuple((i - 1) * 2.0**30 for i in range(count))
        ),
    )
    if error:
        variants.append(Variant(name="Z", facts=("dp99",), error=error))
    return Comparison(common=("tiny", "dp2"), variants=tuple(variants), rows=rows)


def test_differences_are_marked_and_what_is_equal_comes_last() -> None:
    text = to_text(comparison.render_page(side_by_side(2, error="needs 99 ranks")))
    assert "in all columns: tiny dp2" in text
    assert "A trains most tokens per second, 122.0% more than B" in text
    step = next(line for line in text.splitlines() if line.startswith("step"))
    assert step.split() == ["step", "820.0", "ms*", "1.82", "s", "(+122.0%)"]
    left = next(line for line in text.splitlines() if line.startswith("free"))
    assert left.split() == ["free", "memory", "−1.00", "GiB", "0", "B*"]
    assert "Equal in all\npeak memory 1.00 GiB" in text
    assert "not possible: needs 99 ranks" in text


def test_values_that_print_equal_are_no_difference() -> None:
    near = side_by_side(2)
    rows = (Quantity(name="gradient state", unit="bytes", better="less", values=(2.0**30, 2.0**30 + 64)),)
    text = to_text(comparison.render_page(near.replace(rows=rows)))
    assert "Equal in all\ngradient state 1.00 GiB" in text
    assert "*" not in text.partition("gradient")[0].partition("differs")[2]


def test_many_variants_are_printed_as_rows() -> None:
    text = to_text(comparison.render_page(side_by_side(6)))
    rows = [line.split()[0] for line in text.splitlines() if line[:2] in ("A ", "B ", "C ", "D ", "E ", "F ")]
    assert rows == [*"ABCDEF", "A", *"ABCDEF"]  # what each is, what was found, the figures of each


def test_steps_within_the_uncertainty_are_called_indistinguishable() -> None:
    near = side_by_side(2)
    second = near.variants[1].replace(step=SMALL.replace(tokens_per_second_per_gpu=1000 / 0.83))
    text = to_text(comparison.render_page(near.replace(variants=(near.variants[0], second))))
    assert "1.2% more than B; the difference is too small for a prediction" in text


def test_a_remark_on_several_variants_is_printed_once() -> None:
    """Of the remarks of B and C, which differ only in their figures, B's is shown."""
    three = side_by_side(3)
    remarks = [("shared",), ("shared", "takes 970.3 ms instead of 1.14 s"), ("takes 1.39 s instead of 1.65 s",)]
    variants = [
        variant.replace(step=variant.step.replace(remarks=lines))
        for variant, lines in zip(three.variants, remarks, strict=True)
        if variant.step is not None
    ]
    assert comparison.list_remarks(three.replace(variants=tuple(variants))) == [
        "A and B: shared",
        "B (C: with other figures): takes 970.3 ms instead of 1.14 s",
    ]


def test_difference_is_explained_by_part() -> None:
    """Of steps of as many tokens; the others' seconds are no comparison."""
    near = side_by_side(2)
    first, second = (variant.step for variant in near.variants)
    assert first is not None
    assert second is not None
    tokens = first.tokens_per_second_per_gpu * first.time.step_seconds
    time = first.time.replace(step_seconds=1.02, bubble_seconds=first.time.bubble_seconds + 0.3, compute_seconds=0.64)
    longer = first.replace(time=time, tokens_per_second_per_gpu=tokens / 1.02)
    by = first.time.compute_seconds - 0.64
    result = near.replace(variants=(near.variants[0], near.variants[1].replace(step=longer)))
    line = f"B takes 200.0 ms longer than A: bubble +300.0 ms, compute −{show_seconds(by)}"
    assert line in to_text(comparison.render_page(result))
    fewer = longer.replace(tokens_per_second_per_gpu=longer.tokens_per_second_per_gpu / 2)
    other = result.replace(variants=(near.variants[0], near.variants[1].replace(step=fewer)))
    assert comparison.explain_differences(other) == []


def test_a_bar_for_each_variant_and_part() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    drawn: dict[str, Any] = {name: chart.to_dict() for name, chart in comparison.draw_charts(side_by_side(3)).items()}
    assert sorted(drawn) == ["memory", "time"]
    bars, ends = (layer["data"]["values"] for layer in drawn["time"]["layer"])
    assert [end["text"] for end in ends] == ["820.0 ms", "1.82 s", "2.82 s"]
    assert {bar["part"] for bar in bars} == {"compute", "bubble", "exposed", "update"}
    assert sum(bar["size"] for bar in bars if bar["bar"] == "A  mbs1") == pytest.approx(0.74 + 0.05 + 0.03)
