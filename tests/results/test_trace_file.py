"""Files of traces: read as written; what is missing, cut off or of another run is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import RunFailure, UserError
from fivefold.results import trace_file
from fivefold.results.spans import RankStep, RankTrace, Span, TracedMessage

SPANS = (
    Span("step", "step 4", 0.0, 1.0, own=0.25),
    Span("F", "F0.3", 0.25, 0.75, 0.0, (), 0, 3, own=0.25, within=0),
    Span("wait", "tp all_gather", 0.5, 0.75, own=0.25, within=1),
)
MESSAGE = TracedMessage("tp", "tp", (0, 1), "all_gather", 128, 64, 1, (), (), 0.375, 0.4375, 0.5, 0.75, False, 2)


def trace(rank: int, *, step: int = 4) -> RankTrace:
    steps = (RankStep(step, 10.0 + rank, SPANS, (MESSAGE, MESSAGE._replace(to=(1,), ranks=(0, 1, 2)))),)
    return RankTrace(rank, 2, 0, 0.5 * rank, 1e-6, steps, (Span("evaluate", "evaluation", 12.0, 13.0),))


def test_written_trace_reads_back(tmp_path: Path) -> None:
    for rank in range(2):
        assert trace_file.write(trace(rank), tmp_path) == tmp_path / "trace" / f"rank{rank}.json"
    assert trace_file.read(tmp_path) == [trace(0), trace(1)]


def test_unreadable_trace_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no trace; train again with --trace"):
        trace_file.read(tmp_path)
    first = trace_file.write(trace(0), tmp_path)
    with pytest.raises(UserError, match=r"of 2 ranks 1 have no file here \(1\); copy them from their hosts"):
        trace_file.read(tmp_path)
    trace_file.write(trace(1, step=6), tmp_path)
    with pytest.raises(UserError, match=r"rank1\.json has different steps from rank 0"):
        trace_file.read(tmp_path)
    text = first.read_text()
    first.write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match=r"rank0.json is cut off or damaged at character \d+"):
        trace_file.read(tmp_path)
    for wrong in ("", "[]", "{}", text.replace("own", "mine").replace('"world"', '"word"')):
        first.write_text(wrong)
        with pytest.raises(UserError, match=r"rank0.json is (not a trace|cut off)"):
            trace_file.read(tmp_path)


def test_predicted_spans_are_stored_next_to_the_traces(tmp_path: Path) -> None:
    assert trace_file.read_planned(tmp_path) == {}
    trace_file.write(trace(0), tmp_path)
    trace_file.write_planned({"predicted": (SPANS[1:],), "dry_run": []}, tmp_path)
    assert trace_file.read_planned(tmp_path) == {"predicted": [list(SPANS[1:])], "dry_run": []}
    (tmp_path / "trace" / "planned.json").write_text("{")
    with pytest.raises(UserError, match=r"planned\.json is damaged; train again"):
        trace_file.read_planned(tmp_path)


def test_a_folder_that_cannot_be_created_is_a_run_failure(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    with pytest.raises(RunFailure, match="the trace cannot be written: File exists; the run itself is saved"):
        trace_file.write(trace(0), tmp_path)
