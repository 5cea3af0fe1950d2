"""The time of a step by cause, and the budget of the error: lines that add up to the difference exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.rendering import budget
from fivefold.step import Step, Time
from tests.printed import to_text

PARTS = st.dictionaries(st.sampled_from([f"part {n}" for n in range(30)]), st.floats(0, 10), max_size=30)


def make_time(parts: dict[str, float]) -> Time:
    return Time(step_seconds=sum(parts.values()), compute_seconds=0.0, parts=parts)


@given(PARTS, PARTS, st.integers(0, 40))
def test_the_listed_parts_add_up_to_the_difference_of_two_step_times(
    predicted: dict[str, float], measured: dict[str, float], shown: int
) -> None:
    ours, theirs = make_time(predicted), make_time(measured)
    *lines, rest = budget.list_differences(ours, theirs, shown=shown)
    assert rest.part == "rest"
    assert len(lines) == min(shown, len(predicted.keys() | measured.keys()))
    everything = [*lines, rest]
    assert sum(line.difference for line in everything) == pytest.approx(ours.step_seconds - theirs.step_seconds)
    assert sum(line.measured for line in everything) == pytest.approx(theirs.step_seconds)
    sizes = [abs(line.difference) for line in lines]
    assert sizes == sorted(sizes, reverse=True)
    left = [abs(predicted.get(name, 0.0) - measured.get(name, 0.0)) for name in predicted.keys() | measured.keys()]
    assert sizes == sorted(left, reverse=True)[:shown]


def test_overlap_is_the_hidden_share_of_the_messages() -> None:
    time = Time(
        step_seconds=1.0, compute_seconds=1.0, exposed_seconds={"dp": 0.1, "tp": 0.2}, overlapped_seconds={"dp": 0.3}
    )
    assert budget.overlap(time) == {"dp": pytest.approx(0.75), "tp": 0.0}


def test_the_page_breaks_down_the_error_of_a_prediction(small: Step, measured: Step) -> None:
    split = Time(
        step_seconds=0.82,
        compute_seconds=0.5,
        bubble_seconds=0.1,
        exposed_seconds={"dp": 0.12},
        overlapped_seconds={"dp": 0.04},
        optimizer_seconds=0.05,
        data_seconds=0.03,
        host_seconds=0.02,
        parts={
            "attention.core backward": 0.5,
            "dp reduce_scatter": 0.12,
            "bubble": 0.1,
            "optimizer": 0.05,
            "data": 0.03,
            "host in forward": 0.02,
        },
    )
    page = budget.render_page((small, measured.replace(time=split)), findings=["stalled loader: rank 0 waits"])
    text = to_text(page, width=80)
    lines = [line.split() for line in text.splitlines()]
    assert ["bubble", "0.0", "µs", "100.0", "ms", "-100.0", "ms"] in lines
    assert ["data", "0.0", "µs", "30.0", "ms", "-30.0", "ms"] in lines
    assert ["compute", "740.0", "ms", "500.0", "ms", "+240.0", "ms"] in lines
    assert ["step", "820.0", "ms", "820.0", "ms", "+0.0", "µs"] in lines
    assert "overlapped with compute, measured: dp 25%" in text
    assert ["attention.core", "backward", "0.0", "µs", "500.0", "ms", "-500.0", "ms"] in lines
    assert text.rstrip().endswith("stalled loader: rank 0 waits")


def test_the_page_says_that_a_step_was_not_traced(small: Step, measured: Step) -> None:
    assert (
        to_text(budget.render_page((small, measured)))
        == "no step was traced, so the measured time is not broken down\n"
    )
