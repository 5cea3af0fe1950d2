from __future__ import annotations

from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.rendering.compare import render_table
from fivefold.results.step_comparison import QuantityComparison, compare, compare_unfinished, describe_assumption
from fivefold.step import Step, Traffic
from tests.printed import to_text


def map_by_name(rows: list[QuantityComparison]) -> dict[str, QuantityComparison]:
    assert len({row.quantity for row in rows}) == len(rows)
    return {row.quantity: row for row in rows}


def test_predicted_and_measured_quantities_are_compared(small: Step, measured: Step) -> None:
    rows = map_by_name(compare(small, measured))
    assert list(rows) == [
        "parameters",
        "parameter state",
        "gradient state",
        "optimizer state",
        "all states",
        "activations",
        "peak memory",
        "hardware FLOPs",
        "dp reduce_scatter, calls",
        "dp reduce_scatter, sent",
        "dp all_gather, calls",
        "dp all_gather, sent",
        "step time",
        "tokens/s per GPU",
    ]
    estimates = ["activations", "peak memory", "step time", "tokens/s per GPU"]
    assert [name for name, row in rows.items() if not row.exact] == estimates
    assert all(row.error == 0 and not row.is_wrong for row in rows.values() if row.exact)
    assert rows["step time"].error == pytest.approx(0.82 / 0.79 - 1)
    assert rows["all states"].predicted == 24_117_248 * 2 + 24_117_256


def test_a_run_that_still_trains_is_compared_by_its_log(small: Step) -> None:
    """From its first step; once its memory is measured, by the steps after that one."""
    batch = small.job["global_batch"]
    line: dict[str, Any] = {"seconds": 2.0, "batch": batch}
    assert compare_unfinished(small, []) == []
    first = map_by_name(compare_unfinished(small, [line]))
    assert (first["step time"].measured, [*first]) == (2.0, ["step time", "tokens/s per GPU"])
    assert first["step time"].predicted == small.time.step_seconds
    speed = small.tokens_per_second_per_gpu * small.time.step_seconds / 2.0
    assert first["tokens/s per GPU"].measured == pytest.approx(speed)
    peak = small.memory.stages[0].peak_bytes
    log = [
        line,
        line | {"peak_bytes": peak, "seconds": 9.0},
        line | {"seconds": 1.0, "batch": 1},
        line | {"seconds": 3.0},
    ]
    later = map_by_name(compare_unfinished(small, log))
    assert (later["step time"].measured, later["peak memory of the first rank"].error) == (3.0, 0.0)
    assert compare_unfinished(small, [{"seconds": float("nan")}, {"seconds": "x"}, {"seconds": 0}]) == []


def test_a_count_that_differs_is_marked_with_its_difference(small: Step, measured: Step) -> None:
    more = small.replace(work=small.work.replace(hardware_flops=small.work.hardware_flops + 1))
    rows = compare(more, measured)
    assert [row.quantity for row in rows if row.is_wrong] == ["hardware FLOPs"]
    assert "off by +1 (+0.00%)" in to_text(render_table(rows))


def test_traffic_that_one_step_lacks(small: Step, measured: Step) -> None:
    extra = Traffic(axis="tp", collective="all_gather", calls=3, bytes=100)
    rows = map_by_name(
        compare(small.replace(traffic=(*small.traffic, extra)), measured.replace(traffic=small.traffic[1:]))
    )
    row = rows["tp all_gather, sent"]
    assert (row.predicted, row.measured, row.error, row.is_wrong) == (100, 0, None, True)
    assert rows["dp reduce_scatter, calls"].is_wrong
    assert not rows["dp all_gather, calls"].is_wrong
    reverse = map_by_name(compare(small.replace(traffic=()), small))
    assert reverse["dp all_gather, sent"].error == -1.0


def test_traffic_split_in_entries_is_summed(small: Step) -> None:
    first, second = small.traffic
    halves = (first.replace(bytes=first.bytes // 2, calls=4),) * 2
    assert not any(row.is_wrong for row in compare(small.replace(traffic=(*halves, second)), small))


def test_order_of_traffic_does_not_matter(small: Step) -> None:
    assert not any(row.is_wrong for row in compare(small.replace(traffic=small.traffic[::-1]), small))


def test_stages_are_compared_one_by_one(large: Step) -> None:
    first, *rest = large.memory.stages
    other = large.replace(memory=large.memory.replace(stages=(first.replace(optimizer_bytes=1), *rest)))
    wrong = [row.quantity for row in compare(other, large) if row.is_wrong]
    assert wrong == ["optimizer state, stage 0", "all states, stage 0"]


def test_comparing_steps_of_two_layouts_is_an_error(small: Step, large: Step) -> None:
    with pytest.raises(UserError, match=r"'dp2 zero1 mbs4' and 'dp16 .*' are different layouts"):
        compare(small, large)


def test_a_step_without_times_and_messages_is_printed(small: Step) -> None:
    idle = small.replace(
        traffic=(), time=small.time.replace(step_seconds=0.0, compute_seconds=0.0), tokens_per_second_per_gpu=0.0
    )
    rows = map_by_name(compare(small.replace(traffic=()), idle))
    assert rows["step time"].error is None
    text = to_text(render_table(list(rows.values()), headings=("dry run", "measured")))
    assert text.count("not measured") == 2
    assert "dry run" in text
    assert map_by_name(compare(idle, idle))["step time"].error == 0.0


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_number_of_a_comparison_is_printed_at_any_width(small: Step, measured: Step, width: int) -> None:
    words = to_text(render_table(compare(small, measured)), width=width).split()
    for number in ("6.03", "169.00", "166.14", "+1.7%", "-3.7%"):
        assert number in words
    assert words.count("exact") == 10


def test_comparison_text_has_no_colour_and_fits_the_width(small: Step) -> None:
    text = to_text(render_table(compare(small, small)), width=80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_prediction_of_experts_says_how_rows_are_shared_out(small: Step) -> None:
    """Only where they are cut over ranks, and routing may not be so."""
    sparse = small.replace(work=small.work.replace(active_parameters=2_000_000))
    assert (
        describe_assumption(small)
        == describe_assumption(sparse)
        == describe_assumption(small.replace(layout="dp2 ep2 zero1 mbs4"))
        == ""
    )
    even = sparse.replace(layout="dp2 ep2 zero1 mbs4")
    assert describe_assumption(even).startswith(
        "assumed: every rank's experts get as many rows as any other's; activations"
    )
    uneven = even.replace(job=even.job | {"imbalance": 1.5})
    assert "the most loaded rank's experts get 1.5 times the even share" in describe_assumption(uneven)
