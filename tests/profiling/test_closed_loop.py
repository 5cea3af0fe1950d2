"""Around a run: a trace that cannot be written ends no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.profiling.closed_loop import write_trace
from fivefold.results import trace_file
from fivefold.results.spans import RankStep, RankTrace, Span


def test_a_rank_that_cannot_write_its_trace_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = RankTrace(0, 1, 0, 0.0, 0.0, (RankStep(4, 0.0, (Span("step", "step 4", 0.0, 1.0),), ()),))
    write_trace(trace, tmp_path)
    assert trace_file.read(tmp_path) == [trace]
    assert capsys.readouterr().err == ""
    (tmp_path / "other").write_text("a file")
    write_trace(trace, tmp_path / "other")
    line = capsys.readouterr().err
    assert line.startswith("fivefold: ")
    assert "the trace cannot be written" in line
    assert line.count("\n") == 1
