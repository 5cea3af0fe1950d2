from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.layout.spans import Span
from fivefold.record import Fault
from fivefold.show import trace

ROWS = (
    (Span("F", "F0.3", 0.001, 0.003, 0.0005, ("tp", "cp"), 0, 3), Span("update", "update", 0.003, 0.004)),
    (Span("BW", "BW1.0", 0.002, 0.003, 0.0, (), 1, 0),),
)


def test_a_trace_in_microseconds_with_a_process_per_rank(tmp_path: Path) -> None:
    trace.save(ROWS, tmp_path / "t.json", about={"model": "tiny"})
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["otherData"] == {"model": "tiny"}
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(s["name"], s["cat"], s["pid"], s["tid"]) for s in spans] == [
        ("F0.3", "F", 0, 0), ("tp, cp", "messages", 0, 1), ("update", "update", 0, 0), ("BW1.0", "BW", 1, 0),
    ]  # fmt: skip
    assert [(s["ts"], s["dur"]) for s in spans[:2]] == [
        (pytest.approx(1000), pytest.approx(2000)), (pytest.approx(2500), pytest.approx(500)),
    ]  # fmt: skip
    assert spans[0]["args"] == {"stage": 0, "micro_batch": 3}
    assert spans[2]["args"] == {}
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert names == ["pipeline rank 0", "pipeline rank 1"]


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="the trace cannot be written: No such file or directory"):
        trace.save(ROWS, tmp_path / "none" / "t.json", about={})
