"""CPU seconds go to the test that used them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cpu_times import ENDING, ROWS, STARTING, CpuRecorder, sum_folders

SPUN = 0.05


def spin() -> None:
    end = time.process_time() + SPUN
    while time.process_time() < end:
        pass


def spin_in_a_child() -> None:
    if (child := os.fork()) == 0:
        spin()
        os._exit(0)
    os.waitpid(child, 0)


def report(recorder: CpuRecorder, name: str) -> Any:
    hook = recorder.pytest_runtest_makereport()
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(SimpleNamespace(nodeid=name))
    return ended.value.value


def test_a_test_has_the_seconds_of_itself_and_of_its_children(tmp_path: Path) -> None:
    worker, main = CpuRecorder(tmp_path / "none"), CpuRecorder(tmp_path / "build" / "times.txt")
    worker.pytest_collection_finish()
    for name, work in (("itself", spin), ("child", spin_in_a_child), ("nothing", lambda: None)):
        work()
        main.pytest_runtest_logreport(report(worker, name))
    server = worker.pytest_fixture_post_finalizer(SimpleNamespace(scope="session", argname="server"))  # type: ignore[arg-type]
    next(server)
    spin_in_a_child()
    with pytest.raises(StopIteration):
        server.send(None)
    main.pytest_runtest_logreport(report(worker, "last"))
    output: dict[str, dict[str, float]] = {}
    worker.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(workeroutput=output)))  # type: ignore[arg-type]
    main.pytest_testnodedown(SimpleNamespace(workeroutput=output))
    main.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))  # type: ignore[arg-type]
    rows = [line.split("\t") for line in (tmp_path / "build" / "times.txt").read_text().splitlines()]
    seconds = {name: float(cpu) for cpu, name in rows}
    assert seconds[STARTING] >= output[ROWS][STARTING] - 0.01
    assert (
        min(seconds["itself"], seconds["child"], seconds[f"{ENDING} server"]) >= SPUN - 0.011
    )  # a clock of the kernel ticks each 10 ms
    assert max(seconds["nothing"], seconds["last"]) < SPUN
    assert not (tmp_path / "none").exists()


def test_seconds_of_a_folder_are_those_of_its_tests() -> None:
    seconds = {"tests/a/b/test_c.py::d": 1.0, "tests/a/test_e.py::f": 2.0, "tests/test_g.py::h": 4.0, STARTING: 8.0}
    assert sum_folders(seconds) == {STARTING: 8.0, "tests": 4.0, "tests/a": 3.0}
