"""``make gpu`` without a GPU: its course with simulated parts, and real parts run with small sizes on CPU."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import run as module
from tests.gpu import suite, traces
from tests.gpu.harness import LATER
from tests.gpu.run import PARTS, Part, State, main, page, run
from tests.gpu.test_speed import TINY

COUNT = """
import pathlib, sys
calls = pathlib.Path("{state}") / "{name}.calls"
done = len(calls.read_text()) if calls.exists() else 0
calls.write_text("x" * (done + 1))
print("| call | {{}} |".format(done))
sys.exit(%s)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def part(name: str, code: str, folder: Path) -> Part:
    """A part whose exit code is the expression ``code`` of ``done``, its earlier calls."""
    folder.mkdir(exist_ok=True)
    script = folder / f"{name}.py"
    script.write_text((COUNT % code).format(state=folder, name=name))
    return Part(name, name.capitalize(), str(script))


def calls(folder: Path, name: str) -> int:
    return len((folder / f"{name}.calls").read_text())


def test_run_continues_until_all_parts_are_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part("long", "75 if done < 2 else 0", folder), part("bad", "3", folder), part("good", "0", folder)]
    assert run(parts, State(folder), seconds=math.inf, small=True) == 1
    assert [calls(folder, name) for name in ("long", "bad", "good")] == [3, 1, 1]
    assert "bad has failed: exit code 3" in capsys.readouterr().err
    state = State(folder)  # another call: what is done is not run again, what failed is
    assert run(parts, state, seconds=math.inf, small=True) == 1
    assert [calls(folder, name) for name in ("long", "bad", "good")] == [3, 2, 1]
    text = page(parts, state, {"device": "none", "torch": "9"}, small=True)
    assert text.startswith("# 010 · On a GPU\n\nA trial on CPU")
    assert "device none; torch 9." in text
    assert "## Long" in text
    assert "| call | 2 |" in text
    assert "**Failed: exit code 3.**" in text


def test_a_call_with_a_time_limit_stops_in_time_and_reports_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [part("long", "75", folder), part("next", "0", folder)]
    assert run(parts, State(folder), seconds=60, small=True) == LATER
    assert (calls(folder, "long"), calls(folder, "next")) == (1, 1)
    assert "not all is done; the same command goes on" in capsys.readouterr().err
    assert run(parts, State(folder), seconds=1, small=True) == LATER  # no time for any
    assert (calls(folder, "long"), calls(folder, "next")) == (1, 1)


def test_a_part_that_hangs_has_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE", 0.0)
    monkeypatch.setattr(module, "LIMIT", 0.5)
    hangs = part("hangs", "__import__('time').sleep(60)", folder)
    state = State(folder)
    assert run([hangs], state, seconds=math.inf, small=True) == 1
    assert state.parts["hangs"]["why"].startswith("was not done in ")


def test_without_a_gpu_the_checks_end_in_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--state", str(tmp_path / "state")]) == 2
    assert capsys.readouterr().err == "there is no GPU here\n"
    assert not (tmp_path / "state").exists()
    with pytest.raises(SystemExit):
        main(["memroy"])
    assert "no part 'memroy'; there are tests, calibrate, memory, speed, traces" in capsys.readouterr().err


@pytest.mark.long
def test_the_memory_part_runs_with_a_small_job(tmp_path: Path) -> None:
    assert main(["--small", "--state", str(tmp_path), "memory"]) == 0
    assert "| nano · mbs2 ac=none · 512 x 4 · bf16 |" in (tmp_path / "013-gpu.md").read_text()
    (row,) = (json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines())
    assert row["allocated_bytes"] == pytest.approx(row["dry_run_allocated_bytes"], rel=0.01)  # on CPU too
    assert json.loads((tmp_path / "state.json").read_text())["memory"]["ended"] == "done"


@pytest.mark.long  # the checks of `make gpu` import it, and their table names it
def test_a_step_of_the_gpu_checks_is_traced(forked: Callable[..., list[Any]], tmp_path: Path) -> None:
    (row,) = forked(1, partial(traces.measure, TINY[0], folder=tmp_path, device=torch.device("cpu")))
    assert 0 < row["busy"] <= 1
    assert row["kinds"]["matmul"] > 0
    with gzip.open(tmp_path / row["file"]) as file:
        assert any("aten::mm" in event.get("name", "") for event in json.load(file)["traceEvents"])


def test_every_part_of_the_gpu_checks_is_an_existing_module() -> None:
    for item in PARTS:
        words = item.command.split()
        assert words[0] == "-m"
        assert (module.ROOT / f"{words[1].replace('.', '/')}.py").exists()


def test_the_chip_is_found_by_the_name_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA L40S": "l40s",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "Something else": "h200",
    }
    for name, expected in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert module.chip(small=False) == expected


def test_reports_of_pytest_are_counted() -> None:
    xml = """<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="x"/>
    <testcase classname="tests.gpu.test_a" name="y"><failure>z</failure></testcase>
    <testcase classname="tests.gpu.test_b" name="x"><skipped/></testcase>
    <testcase classname="tests.gpu.test_b" name="y"><error/></testcase></testsuite></testsuites>"""
    table = suite.markdown(suite.count_outcomes(xml)).splitlines()
    assert table[2:] == [
        "| tests/gpu/test_a.py | 1 | 1 | 0 |",
        "| tests/gpu/test_b.py | 0 | 1 | 1 |",
        "| all | 1 | 2 | 1 |",
    ]


def test_kernel_times_are_added_up_by_kind() -> None:
    kernels = [
        traces.Kernel("nvjet_hsh_128x256", 0, 400_000),
        traces.Kernel("flash_fwd_kernel", 300_000, 600_000),
        traces.Kernel("Memcpy HtoD", 700_000, 800_000),
        traces.Kernel("vectorized_kernel", 900_000, 950_000),
        traces.Kernel("nvjet_hsh_128x256", 1_500_000, 1_600_000),
    ]
    row = traces.sum_kernels(TINY[0], kernels, seconds=2.0, file="x")
    assert row.seconds == 1.0
    assert row.busy == pytest.approx((0.6 + 0.1 + 0.05 + 0.1) / 2)
    assert row.kinds == pytest.approx({"matmul": 0.25, "attention": 0.15, "copy": 0.05, "other": 0.025})
    assert row.top[0] == "nvjet_hsh_128x256 25%"
    assert "| 1.000 | 42% | 25% | 15% | 5% | 2% |" in traces.markdown([row])
