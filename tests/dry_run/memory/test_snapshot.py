"""A snapshot through torch's own readers of snapshots: segments, trace, pictures; and what the viewer needs."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any

import pytest

viz = pytest.importorskip("torch.cuda._memory_viz")

from fivefold.dry_run.memory.reserved import replay_allocator  # noqa: E402
from fivefold.dry_run.memory.snapshot import build_snapshot, write_snapshot  # noqa: E402
from fivefold.dry_run.record.tape import ALLOC, FREE, SCOPE, CodeSite, Scope, Tape  # noqa: E402
from fivefold.errors import RunFailure  # noqa: E402
from fivefold.units import MIB  # noqa: E402

WEIGHTS = CodeSite("", "", "", "parameters")
PRODUCT = CodeSite("blocks.0.mlp", "fivefold/trainer/model/linear.py:144 _FusedLinears.forward", "aten::mm")
UPDATE = CodeSite("", "fivefold/trainer/engine.py:70 Engine.step", "aten::_fused_adamw_")
# what the viewer's unpickler knows besides numbers, strings, tuples, lists and dicts of strings: nothing
OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "EMPTY_DICT", "EMPTY_LIST", "APPEND",
    "APPENDS", "SETITEM", "SETITEMS", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE",
    "TUPLE2", "NONE", "NEWTRUE", "NEWFALSE",
}  # fmt: skip


def tapes() -> list[Tape]:
    """First step: weights of 40 MiB, an activation of 30 that is freed, moments of 12. Steady: 30, 4 and 300 bytes."""
    first, steady = Tape(), Tape()
    weights, moments = (40 * MIB, WEIGHTS), (12 * MIB, UPDATE._replace(category="optimizer"))
    for tape, living in ((first, {0: weights}), (steady, {0: weights, 2: moments})):
        tape.add(SCOPE, tape.scope(Scope("start")))
        for storage, (size, site) in living.items():
            tape.add(ALLOC, storage, size, tape.site(site))
        tape.add(SCOPE, tape.scope(Scope("forward", 0, 0)))
    first.add(ALLOC, 1, 30 * MIB, first.site(PRODUCT))
    first.add(FREE, 1)
    first.add(ALLOC, 2, 12 * MIB, first.site(UPDATE))
    for storage, size in ((3, 30 * MIB), (4, 4 * MIB), (5, 300)):
        steady.add(ALLOC, storage, size, steady.site(PRODUCT))
    steady.add(FREE, 3)
    return [first, steady]


def write(folder: Path, *, expandable: bool) -> dict[str, Any]:
    path = folder / "new" / "rank0.pickle"
    write_snapshot(tapes(), path, expandable=expandable)
    assert [item.name for item in path.parent.iterdir()] == ["rank0.pickle"]
    assert {opcode.name for opcode, *_ in pickletools.genops(path.read_bytes())} <= OPCODES
    result: dict[str, Any] = pickle.loads(path.read_bytes())
    return result


@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
def test_torchs_own_readers_find_the_totals(tmp_path: Path, expandable: bool) -> None:
    result = write(tmp_path, expandable=expandable)
    # segments: 40, 30 that later hold 12 and 4, 30 anew, 2 for the 300 bytes; pages: 2, 2 (10 too many), 1, 2 MiB
    total = 40 + 40 + 20 + 2 if expandable else 40 + 30 + 30 + 2
    text = viz.segsum(result)
    assert f"total_reserved: {total:.1f}MiB" in text
    assert "total_allocated: 56.0MiB" in text  # of tensors
    assert f"total_free: {total - 56:.1f}MiB" in text
    segments = result["segments"]
    assert sum(segment["total_size"] for segment in segments) == total * MIB
    assert replay_allocator(tapes(), expandable=expandable).reserved_bytes == total * MIB
    assert sum(segment["allocated_size"] for segment in segments) == 56 * MIB + 512
    assert sum(segment["requested_size"] for segment in segments) == 56 * MIB + 300
    assert {segment["segment_type"] for segment in segments} == {"small", "large"}


def test_the_snapshot_trace_has_the_events_of_the_step(tmp_path: Path) -> None:
    result = write(tmp_path, expandable=False)
    lines = viz.trace(result).splitlines()
    assert lines[0] == "Device 0 ----------------"
    assert lines[1] == "14 entries"
    assert [re.sub(r".* = |\(.*|\[.*", "", line) for line in lines[2:7]] == [
        "cudaMalloc",
        "a",
        "cudaMalloc",
        "c",
        "del d # 30.0MiB",
    ]
    (trace,) = result["device_traces"]
    assert [entry["time_us"] for entry in trace] == list(range(14))
    live = peak = 0
    for entry in trace:
        live += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        peak = max(peak, live)
    assert (live, peak) == (56 * MIB + 300, 86 * MIB + 300)
    assert replay_allocator(tapes(), expandable=False).requested_bytes == peak


def test_frames_are_operation_line_and_module(tmp_path: Path) -> None:
    result = write(tmp_path, expandable=True)
    text = viz.memory(result, format_flamegraph=str).splitlines()
    mine = "stream_0;active_allocated;module:0:blocks.0.mlp;linear.py:144:_FusedLinears.forward;torch:0:aten::mm"
    assert f"{mine} {4 * MIB}" in text
    assert f"stream_0;active_allocated;module:0:parameters {40 * MIB}" in text
    assert sum(int(line.rpartition(" ")[2]) for line in text) == 102 * MIB


def test_categories_are_those_that_the_viewer_can_show(tmp_path: Path) -> None:
    trace = write(tmp_path, expandable=False)["device_traces"][0]
    named = [entry["category"] for entry in trace if entry["action"] == "alloc"]
    assert named == ["parameters", "unknown", "optimizer", "unknown", "unknown", "unknown"]


@pytest.mark.parametrize("plot", [viz.trace_plot, viz.segment_plot])
def test_the_page_of_the_memory_viewer_has_the_snapshot(tmp_path: Path, plot: Any) -> None:
    result = write(tmp_path, expandable=False)
    page = plot(result)
    (held,) = json.loads(re.search(r"local_files = (.*)\n", page)[1])  # type: ignore[index]
    assert pickle.loads(base64.b64decode(held["base64"])) == result


def test_addresses_lie_in_segments_when_they_are_used() -> None:
    """What the viewer's history relies on: every tensor within what was allocated or mapped by then."""
    for expandable in (False, True):
        mapped: list[tuple[int, int]] = []
        for entry in build_snapshot(tapes(), expandable=expandable)["device_traces"][0]:
            start, end = entry["addr"], entry["addr"] + entry["size"]
            if entry["action"] in ("segment_alloc", "segment_map"):
                assert all(end <= begin or start >= stop for begin, stop in mapped)
                before = [(begin, stop) for begin, stop in mapped if stop == start]
                mapped = [item for item in mapped if item not in before] + [(before[0][0] if before else start, end)]
            elif entry["action"] == "alloc":
                assert any(begin <= start and end <= stop for begin, stop in mapped)


def test_snapshot_ends_with_the_final_memory() -> None:
    result = build_snapshot(tapes(), expandable=False, capacity_bytes=80 * MIB)
    last = result["device_traces"][0][-1]
    # 40 and the 30 with 12 in it cannot be given back
    assert (last["action"], last["size"], last["device_free"]) == ("oom", 30 * MIB, 10 * MIB)
    assert "raise OutOfMemoryError # 30.0MiB requested, 10.0MiB free in CUDA" in viz.trace(result)


def test_a_failed_write_of_a_snapshot_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank0.pickle"
    path.write_bytes(b"former")

    def fail_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fivefold.dry_run.memory.snapshot.pickle.dump", fail_full)
    with pytest.raises(RunFailure, match="the snapshot cannot be written: No space left on device; free some space"):
        write_snapshot(tapes(), path, expandable=False)
    assert [item.name for item in tmp_path.iterdir()] == ["rank0.pickle"]
    assert path.read_bytes() == b"former"
