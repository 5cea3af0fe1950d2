from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.errors import RunFailure
from fivefold.rendering import trace
from fivefold.results.spans import RankStep, RankTrace, Span, TracedMessage

ROWS = (
    (Span("F", "F0.3", 0.001, 0.003, 0.0005, ("tp", "cp"), 0, 3), Span("update", "update", 0.003, 0.004)),
    (Span("BW", "BW1.0", 0.002, 0.003, 0.0, (), 1, 0),),
)


def test_a_trace_in_microseconds_with_a_process_per_rank(tmp_path: Path) -> None:
    trace.save(ROWS, tmp_path / "t.json", about={"model": "tiny"})
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["otherData"] == {"model": "tiny"}
    spans = [event for event in result["traceEvents"] if event["ph"] == "X"]
    assert [(s["name"], s["cat"], s["pid"], s["tid"]) for s in spans] == [
        ("F0.3", "F", 0, 0),
        ("tp, cp", "messages", 0, 1),
        ("update", "update", 0, 0),
        ("BW1.0", "BW", 1, 0),
    ]
    assert [(s["ts"], s["dur"]) for s in spans[:2]] == [
        (pytest.approx(1000), pytest.approx(2000)),
        (pytest.approx(2500), pytest.approx(500)),
    ]
    assert spans[0]["args"] == {"stage": 0, "micro_batch": 3}
    assert spans[2]["args"] == {}
    names = [event["args"]["name"] for event in result["traceEvents"] if event["name"] == "process_name"]
    assert names == ["pipeline rank 0", "pipeline rank 1"]


def test_a_path_that_cannot_be_written_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailure, match="the trace cannot be written: File exists"):
        trace.save(ROWS, tmp_path / "file" / "t.json", about={})


def test_predicted_dry_run_and_measured_are_lanes_of_one_picture(tmp_path: Path) -> None:
    spans = (
        Span("step", "step 4", 0.0, 0.01, own=0.004),
        Span("F", "F0.0", 0.001, 0.005, 0.0, (), 0, 0, own=0.002, within=0),
        Span("op", "norm1", 0.002, 0.003, way="forward", own=0.001, within=1),
        Span("wait", "tp all_gather", 0.003, 0.004, own=0.001, within=1),
    )
    sent = TracedMessage("tp", "tp", (0, 1), "all_gather", 128, 64, 1, (), (), 0.002, 0.0025, 0.003, 0.004, False, 3)
    measured = [
        RankTrace(
            rank,
            2,
            0,
            0.0,
            0.0,
            (RankStep(4, 7.0 + rank / 1000, spans, (sent, sent._replace(early=True))),),
            (Span("evaluate", "evaluation after step 4", 8.0, 9.0), Span("evaluate", "before", 1.0, 2.0)),
        )
        for rank in range(2)
    ]
    trace.write(trace.list_lanes(measured, predicted=ROWS, dry_run=ROWS), tmp_path / "t.json", about={})
    result = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in result if event["name"] == "process_name"]
    assert names == [
        "predicted, pipeline rank 0",
        "predicted, pipeline rank 1",
        "dry run, pipeline rank 0",
        "dry run, pipeline rank 1",
        "measured, rank 0 (pipeline rank 0)",
        "measured, rank 1 (pipeline rank 0)",
    ]
    last = [event for event in result if event["pid"] == 5 and event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in last] == [
        ("step 4", 0, 1000, 10000),
        ("F0.0", 0, 2000, 4000),
        ("norm1", 1, 3000, 1000),
        ("tp all_gather", 1, 4000, 1000),
        ("evaluation after step 4", 0, 1e6, 1e6),
    ]
    assert last[1]["args"] == {"own_us": 2000, "stage": 0, "micro_batch": 0}
    ways = [(e["ph"], e["id"], e["ts"]) for e in result if e["pid"] == 5 and e["ph"] in "be"]
    assert ways == [("b", "4.0", 3500), ("e", "4.0", 5000), ("b", "4.1", 3500), ("e", "4.1", 4000)]
