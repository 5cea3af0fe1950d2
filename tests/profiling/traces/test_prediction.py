"""A predicted step compared with traces: torch.profiler recorded exactly the messages that the planner predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.planner.predict import predict
from fivefold.profiling.traces import read
from fivefold.profiling.traces.prediction import compare_with_prediction, find_axes
from fivefold.step import Step
from tests.profiling.traces import kineto
from tests.profiling.traces.recorded import MODEL, STEPS, engine_traces, job
from tests.selection import mark_share


def predict_step(layout: Layout) -> Step:
    machine = resolve(f"h100:{layout.world}", local=Path("none"))
    return predict(model=MODEL, machine=machine, layout=layout, job=job())


@pytest.mark.parametrize(
    "text", mark_share(5, ["dp2 zero3 mbs2", "dp2 zero2 mbs2", "tp2 mbs2", "cp2 cp=ulysses mbs2", "pp2 mbs2"])
)
def test_the_profiler_records_the_messages_that_were_predicted(text: str, tmp_path: Path) -> None:
    layout = Layout.parse(text)
    traced = read(engine_traces(tmp_path, text), axes=find_axes(layout))
    assert len(traced.report.steps) == STEPS
    rows = compare_with_prediction(predict_step(layout), traced.report, messages=traced.lowest)
    counts = [row for row in rows if row.unit in ("calls", "bytes") and "barrier" not in row.quantity]
    assert len(counts) >= 4
    for row in counts:
        assert row.predicted == row.measured > 0, row
    assert traced.report.remarks == ()
    matched = {item.rank: item.matched for item in traced.report.arrivals}
    assert matched == dict.fromkeys((0, 1), round(STEPS * sum(line.calls for line in traced.lowest)))


def test_the_trace_of_one_process_is_compared_with_its_prediction(tmp_path: Path) -> None:
    layout = Layout.parse("dp1 mbs2")
    traced = read(engine_traces(tmp_path, "dp1 mbs2"), axes=find_axes(layout))
    rows = {
        row.quantity: row
        for row in compare_with_prediction(predict_step(layout), traced.report, messages=traced.lowest)
    }
    assert rows["step time"].measured == traced.report.step_seconds > 0
    windows = traced.report.breakdown
    parts = [
        rows[name].measured for name in ("compute", "optimizer", "exposed communication, bubble", "copies, idle host")
    ]
    assert sum(parts) == pytest.approx(sum(window.window_seconds for window in windows) / len(windows))
    kinds = {line.category: line for line in traced.report.categories}
    assert {"GEMM", "attention", "elementwise", "optimizer"} <= kinds.keys()


def test_process_groups_are_mapped_to_axes() -> None:
    assert find_axes(Layout.parse("dp2 tp2")) == {
        (0, 1): "tp",
        (2, 3): "tp",
        (0, 2): "dp",
        (1, 3): "dp",
        (0, 1, 2, 3): "world",
    }
    assert find_axes(Layout.parse("dp4 zero2/2")) == {
        (0, 1): "dp",
        (2, 3): "dp",
        (0, 2): "dp",
        (1, 3): "dp",
        (0, 1, 2, 3): "world",
    }
    assert find_axes(Layout.parse("dp2")) == {(0, 1): "dp, world"}


def test_another_number_of_ranks_is_a_user_error(tmp_path: Path) -> None:
    traced = read(kineto.write(kineto.draw(1), tmp_path))
    with pytest.raises(UserError, match="--against has a layout of 4 ranks, but the traces have 2"):
        compare_with_prediction(predict_step(Layout.parse("dp4 mbs2")), traced.report, messages=traced.lowest)
