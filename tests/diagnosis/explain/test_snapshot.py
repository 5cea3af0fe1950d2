"""Snapshots of a step with real stacks, of torch's own writer and of a dry run, compared with what is known of each."""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.cuda._memory_viz import _profile_to_snapshot  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from fivefold.diagnosis.explain import safe_pickle  # noqa: E402
from fivefold.diagnosis.explain.snapshot import explain  # noqa: E402
from fivefold.errors import UserError  # noqa: E402
from fivefold.results.explanation import HeldMemory  # noqa: E402


class History(TorchDispatchMode):
    """Writes what ``_record_memory_history`` does, with the stacks of this process, for storages on the CPU."""

    def __init__(self, *, backward_stacks: bool) -> None:
        super().__init__()
        self.trace: list[dict[str, Any]] = []
        self.known: dict[int, int] = {}
        self.backward_stacks = backward_stacks
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.known:
                self.on_alloc(leaf.untyped_storage())
        return out

    def on_alloc(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known[key] = size
        result = traceback.extract_stack()[:-2][::-1]
        frames = [{"filename": item.filename, "line": item.lineno, "name": item.name} for item in result]
        if torch._C._current_graph_task_id() != -1 and not self.backward_stacks:
            frames = []  # as on a GPU: the engine's thread runs no Python
        self.add("alloc", key, size, frames)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.on_free, key)

    def on_free(self, key: int) -> None:
        size = self.known.pop(key)
        self.live -= size
        for action in ("free_requested", "free_completed"):
            self.add(action, key, size, [])

    def add(self, action: str, key: int, size: int, frames: list[dict[str, Any]]) -> None:
        self.trace.append({"action": action, "addr": key, "size": size, "stream": 0, "frames": frames})


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False))


def real_step(
    *, backward_stacks: bool, rows: int = 16, stop: str = ""
) -> tuple[list[dict[str, Any]], int, dict[str, int]]:
    """Trace and peak of two steps of an MLP with AdamW, and its states; ``stop``: where a shortage is last."""
    with History(backward_stacks=backward_stacks) as history:
        model = nn.Sequential(block(64), block(64)).to(torch.float64)  # moved, so that no step made its weights
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for step in range(2):
            x = torch.randn(rows, 64, dtype=torch.float64)
            loss = model(x).square().mean()
            if stop == "forward" and step:
                history.add("oom", 0, 2**30, [{"filename": "/job/train.py", "line": 7, "name": "step"}])
                break
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        weights = sum(p.nbytes for p in model.parameters())
        moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
        kept = 2 * rows * (4 * 64 + 64) * 8  # of each block what ReLU gives, and its output
        trace = list(history.trace)  # before everything is freed
        return (
            trace,
            history.peak,
            {"parameters": weights, "optimizer": moments, "gradients": weights, "activations": kept},
        )


def read(trace: list[dict[str, Any]], *, segments: Any = ()) -> HeldMemory:
    data = {"segments": list(segments), "device_traces": [trace]}
    memory = explain(data, files=("x",), top=50).memory
    assert memory is not None
    return memory


@pytest.mark.parametrize("backward_stacks", [True, False], ids=["one thread", "an engine's thread"])
def test_stacks_classify_each_memory_block(backward_stacks: bool) -> None:
    trace, peak, known = real_step(backward_stacks=backward_stacks)
    memory = read(trace)
    assert memory.held_bytes == peak == sum(memory.parts.values())
    assert memory.parts["parameters"] == known["parameters"]
    assert memory.parts["gradients"] == known["gradients"], "the peak is in the first update"
    assert memory.parts["optimizer"] >= known["optimizer"] - 4 * 8
    made = {line.category: line.line for line in reversed(memory.lines)}
    assert made["optimizer"].startswith("tests/diagnosis/explain/test_snapshot.py:")
    assert made["optimizer"].endswith(" real_step")


def test_an_out_of_memory_in_a_forward_lists_live_blocks() -> None:
    trace, _, known = real_step(backward_stacks=False, stop="forward")
    result = explain({"segments": [], "device_traces": [trace]}, files=("x",), top=50)
    assert result.verdict.startswith("GPU 0 ran out of memory, at /job/train.py:7 step: 1.00 GiB were asked for")
    memory = result.memory
    assert memory is not None
    assert {part: memory.parts[part] for part in ("parameters", "optimizer")} == {
        part: known[part] for part in ("parameters", "optimizer")
    }
    assert "gradients" not in memory.parts
    assert memory.parts["activations"] == known["activations"]


def test_a_truncated_history_has_the_same_peak() -> None:
    """What lived before the trace is in its frees, or in the segments at the end."""
    trace, _, _ = real_step(backward_stacks=True)
    live = {entry["addr"]: entry for entry in trace if entry["action"] == "alloc"}
    freed = Counter(e["addr"] for e in trace if e["action"] == "free_completed")
    made = Counter(e["addr"] for e in trace if e["action"] == "alloc")
    blocks = [
        {
            "address": at,
            "size": entry["size"] + 100,
            "requested_size": entry["size"],
            "state": "active_allocated",
            "frames": entry["frames"],
        }
        for at, entry in live.items()
        if made[at] > freed[at]
    ]
    segments = [{"device": 0, "address": 0, "total_size": 2**20, "blocks": blocks}]
    half = len(trace) // 2
    whole, cut = read(trace, segments=segments), read(trace[half:], segments=segments)
    levels, level = [], sum(block["requested_size"] for block in blocks)
    for entry in reversed(trace[half:]):  # by hand, backwards from the end
        levels.append(level)
        level -= {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
    assert cut.held_bytes == max(*levels, level) <= whole.held_bytes


def test_the_categories_of_torchs_own_writer_are_read() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(128, 64)
    with torch.profiler.profile(profile_memory=True, with_stack=True, record_shapes=True) as profile:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    data = _profile_to_snapshot(profile)
    memory = explain(data, files=("x",), top=12).memory
    assert memory is not None
    weights = sum(p.nbytes for p in model.parameters())
    assert memory.parts["parameters"] == weights
    assert memory.parts["optimizer"] >= 2 * weights
    assert memory.parts["activations"] >= 128 * 256 * 4  # what ReLU gives


@pytest.mark.slow
def test_a_snapshot_of_a_dry_run_has_its_totals(tmp_path: Path) -> None:
    from fivefold.dry_run import dryrun
    from fivefold.dry_run.memory.snapshot import write_snapshot
    from fivefold.dry_run.report import describe_peak
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import resolve as machine
    from fivefold.model.catalog import resolve as model

    chips = machine("h100:2", local=tmp_path)
    result = dryrun(
        model=model("nano"), machine=chips, layout=Layout.parse("dp2 zero3 mbs2"), job=Job(sequence=128, global_batch=8)
    )
    tapes = result.tapes[0]
    write_snapshot((tapes.first, tapes.steady), tmp_path / "x.pickle", expandable=False)
    memory = explain(safe_pickle.load(tmp_path / "x.pickle"), files=("x",), top=99).memory
    assert memory is not None
    assert result.step is not None
    assert memory.held_bytes == result.step.memory.peak_bytes
    assert memory.parts == describe_peak(tapes).parts
    assert sum(line.bytes for line in memory.lines) == memory.held_bytes
    write_snapshot((tapes.first, tapes.steady), tmp_path / "x.pickle", expandable=False, capacity_bytes=2 * 2**20)
    short = explain(safe_pickle.load(tmp_path / "x.pickle"), files=("x",), top=1)
    assert "ran out of memory, at fivefold/trainer/" in short.verdict


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"segments": 3}, "not a list"),
        ({"segments": []}, "allocated nothing"),
        ({"segments": [], "device_traces": 3}, "not a list"),
    ],
)  # fmt: skip
def test_invalid_snapshot_is_a_one_line_error(data: Any, word: str) -> None:
    with pytest.raises(UserError, match=word):
        explain(data, files=("x",), top=1)


def test_a_snapshot_without_history_lists_live_blocks() -> None:
    block = {"size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []}
    data = [{"device": 1, "address": 7, "total_size": 4096, "blocks": [block, {"size": 3072, "state": "inactive"}]}]
    result = explain(data, files=("x",), top=1)  # of 1.x: a list of segments
    assert result.memory is not None
    assert (result.memory.device, result.memory.held_bytes, result.memory.reserved_bytes) == ("GPU 1", 1000, 4096)
    assert "no history" in result.findings[0]
