from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, START, Tape
from fivefold.dry_run.time import trace
from fivefold.dry_run.time.simulation import SimulatedTapes, simulate
from fivefold.errors import RunFailure
from fivefold.job import Job
from fivefold.machine.catalog import resolve

H100 = resolve("h100:8", local=Path())


@pytest.fixture(scope="module")
def simulation(make_tapes: Callable[..., list[Tape]]) -> SimulatedTapes:
    return simulate(make_tapes("tp2 pp2"), machine=H100, job=Job(), world=4)


def write_trace(simulation: SimulatedTapes, path: Path, *ranks: int) -> list[dict[str, Any]]:
    trace.write_trace(simulation, path, ranks=ranks, metadata={"model": "tiny"})
    result = json.loads(path.read_text())
    assert result["otherData"] == {"model": "tiny"}
    events: list[dict[str, Any]] = result["traceEvents"]
    return events


@pytest.mark.slow
def test_a_dry_run_trace_has_kernels_messages_scopes_and_memory(simulation: SimulatedTapes, tmp_path: Path) -> None:
    events = write_trace(simulation, tmp_path / "t.json", 0, 3)
    assert {event["pid"] for event in events} == {0, 3}
    for rank in (0, 3):
        tape = simulation.tapes[rank]
        mine = [event for event in events if event["pid"] == rank]
        lines = {e["args"]["name"]: e["tid"] for e in mine if e["name"] == "thread_name"}
        assert list(lines)[:3] == ["scopes", "modules", "compute"]
        assert {"tp", "world"} < set(lines)
        assert {"pp 1", "pp 2"} < set(lines)  # onward and back
        on = {line: [e for e in mine if e["ph"] == "X" and e["tid"] == tid] for line, tid in lines.items()}
        assert len(on["compute"]) == sum(kind == KERNEL for kind, *_ in tape)
        assert sum(len(on[line]) for line in list(lines)[3:]) == sum(kind == START for kind, *_ in tape)
        for line in on.values():  # nothing overlaps with itself
            assert all(one["ts"] + one["dur"] <= two["ts"] + 2e-3 for one, two in pairwise(line))
        names = [event["name"] for event in on["scopes"]]
        assert names[-1] == "update"
        assert any(name.startswith("forward of micro-batch 0") for name in names)
        assert any(event["name"].startswith("blocks.") for event in on["modules"])
        assert on["tp"][0]["args"]["at"].endswith(")")


def test_the_dry_run_trace_marks_the_memory_peak(simulation: SimulatedTapes, tmp_path: Path) -> None:
    tape = simulation.tapes[0]
    live = peak = 0
    sizes: dict[int, int] = {}
    for kind, storage, size, _ in tape:
        if kind == ALLOC:
            sizes[storage] = size
            live += size
        elif kind == FREE:
            live -= sizes[storage]
        peak = max(peak, live)
    told = [e["args"]["bytes"] for e in write_trace(simulation, tmp_path / "t.json", 0) if e["ph"] == "C"]
    assert max(told) == peak
    assert len(told) < len(tape)


def test_trace_keeps_the_longest_of_many_kernels(
    simulation: SimulatedTapes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [e["dur"] for e in write_trace(simulation, tmp_path / "a.json", 0) if e["ph"] == "X" and e["tid"] == 2]
    monkeypatch.setattr(trace, "MAX_SPANS", 40)
    few = [e["dur"] for e in write_trace(simulation, tmp_path / "b.json", 0) if e["ph"] == "X" and e["tid"] == 2]
    assert sorted(few) == sorted(whole)[-40:]


def test_a_path_that_cannot_be_written_is_a_one_line_error(simulation: SimulatedTapes, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFailure, match="the trace cannot be written: File exists"):
        trace.write_trace(simulation, tmp_path / "file" / "t.json", ranks=[0], metadata={})
