"""The command explain: pages, data, comparison with the prediction, and errors in one line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import UserError

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of "
    "which 1.10 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated "
    "memory 75.50 GiB is allocated by PyTorch, and 0.40 GiB is reserved by PyTorch but unallocated.\n"
)
LAYOUT = ("--against", "llama3-8b", "h100:8", "dp8 zero3 mbs2", "--seq", "8192", "--gbs", "64")


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["explain", *map(str, words)], catch_exceptions=False, env={"COLUMNS": "150"})
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text(MESSAGE)
    return path


def test_explain_prints_cause_of_out_of_memory_and_what_holds_the_memory(log: Path) -> None:
    page = run(log)
    assert "GPU 0 ran out of memory: 4.00 GiB were asked for, and tensors hold 75.50 GiB of 79.10 GiB" in page
    assert "2.90 GiB more are needed" in page
    assert "the rest of this process" in page


def test_the_advised_change_fits_and_is_the_fastest_that_does(log: Path) -> None:
    data = json.loads(run(log, *LAYOUT, "--json"))
    against = data["against"]
    needed = 79.5 * 2**30
    assert against["excess_bytes"] == max(0, round(needed) - against["predicted"]["memory"]["peak_bytes"])
    change = against["change"]
    assert change["memory_bytes"] + against["excess_bytes"] <= against["available_bytes"]
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import resolve as machine
    from fivefold.model.catalog import build_model
    from fivefold.planner.questions.changes import list_changes

    others = list_changes(
        model=build_model("llama3-8b"),
        machine=machine("h100:8", local=Path()),
        job=Job(sequence=8192, global_batch=64),
        layout=Layout.parse("dp8 zero3 mbs2"),
    )
    same = [item for item in others if item.change not in ("fp8", "adamw8bit")]
    fits = [item for item in same if item.memory_bytes + against["excess_bytes"] <= against["available_bytes"]]
    assert change["step_seconds"] == min(fit.step_seconds for fit in fits)
    assert "least change that fits: " + change["change"] in run(log, *LAYOUT)


@pytest.mark.long  # a search
@pytest.mark.slow
def test_another_layout_is_proposed_if_no_single_change_fits(log: Path) -> None:
    """On a smaller device than the machine's, as the message says."""
    log.write_text(MESSAGE.replace("79.10", "24.10").replace("77.90", "22.90").replace("75.50", "21.50"))
    against = json.loads(run(log, "--against", "llama3-8b", "h100:8", "dp8 mbs1", "--seq", 4096, "--gbs", 8, "--json"))[
        "against"
    ]
    assert against["change"] is None
    assert any("of a device with 24.10 GiB" in line for line in against["findings"])
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import resolve as machine
    from fivefold.model.catalog import build_model
    from fivefold.planner.counts.memory.allocator import count_driver_bytes
    from fivefold.planner.predict import predict
    from fivefold.stack.spec import Stack

    chips = machine("h100:8", local=Path())
    taken = count_driver_bytes(chips, Layout.parse("dp8 mbs1"), Stack())
    assert against["available_bytes"] == pytest.approx(24.1 * 2**30 - taken, abs=2)
    step = predict(
        model=build_model("llama3-8b"),
        machine=chips,
        layout=Layout.parse(against["layout"]),
        job=Job(sequence=4096, global_batch=8),
    )
    assert step.memory.peak_bytes <= against["available_bytes"]


def test_a_folder_is_read_as_its_files(log: Path) -> None:
    block = {"size": 512, "state": "active_allocated"}
    (log.parent / "rank0.pickle").write_bytes(pickle.dumps([{"total_size": 2048, "blocks": [block]}]))
    data = json.loads(run(log.parent, "--json"))
    assert [item["kind"] for item in data["explanations"]] == ["out of memory", "memory snapshot"]


@pytest.mark.parametrize(
    ("content", "words", "line"),
    [
        (None, (), "no such file"),
        (b"", (), "is empty; write the file again"),
        (b"hello\n", (), "neither a memory snapshot, a flight recorder"),
        (b"{\"a\": 1}", (), "neither"),
        (pickle.dumps({"segments": [{"blocks": 3}]}), (), "not in the format that torch writes"),
        (pickle.dumps({"segments": [{"blocks": [7]}]}), (), "not in the form"),
        (pickle.dumps({"entries": [{"process_group": 7}], "version": "2"}), (), "not in the form"),
        (pickle.dumps({"a": 1}), (), "holds a dict of a; it is neither"),
        (b"PK\x03\x04rest", (), "torch.save"),
        (b"\x80\x04cos\nsystem\n.", (), "names os.system"),
        (b"\xff\xfe\x00\x01", (), "neither"),
        (bytes(2**24), (), "neither"),
        (MESSAGE.encode(), ("--seq", "128"), "add --against"),
        (MESSAGE.encode(), ("--against", "llama3-8b", "h100:8", "dp3"), "dp3"),
    ],
)  # fmt: skip
def test_user_errors_are_one_line_errors(tmp_path: Path, content: bytes | None, words: Any, line: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=line) as told:
        CliRunner().invoke(app, ["explain", str(path), *words], catch_exceptions=False)
    assert "\n" not in str(told.value)
