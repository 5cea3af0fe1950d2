"""``pytest --workers``: every test runs once, a file's fixtures are made once, and a process that ends is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = """
import pytest, warnings

@pytest.fixture(scope="module")
def made():
    with open("made.txt", "a") as file:
        file.write("made ")
    yield
    with open("made.txt", "a") as file:
        file.write("ended ")

@pytest.mark.parametrize("number", range(5))
def test_shares(number, made):
    pass

def test_fails():
    print("what it printed")
    assert 1 == 2

def test_warns():
    warnings.warn("a warning")
"""
SECOND = """
import os, signal, sys
STREAM = sys.stderr

def test_writes(tmp_path):
    (tmp_path / "x").touch()
    assert STREAM.fileno(), "a module may hold a stream of when it was imported"

def test_dies():
    os.kill(os.getpid(), DEADLY)

def test_follows():
    pass
"""


def run_pytest(folder: Path, *options: str, deadly: str = "0") -> subprocess.CompletedProcess[str]:
    """Run the two files in two processes."""
    (folder / "test_first.py").write_text(FIRST)
    (folder / "test_second.py").write_text(SECOND.replace("DEADLY", deadly))
    command = [sys.executable, "-m", "pytest", "-p", "tests.workers", "--workers", "2", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)


def test_every_test_is_run_and_reported_once(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "1 failed, 9 passed, 1 warning" in done.stdout
    assert done.stdout.count("what it printed") == 2, "in the code and as captured"
    assert (tmp_path / "made.txt").read_text() == "made ended "


def test_a_process_that_ends_is_a_failure_of_its_test(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, deadly="signal.SIGKILL")
    assert done.returncode == 2, done.stderr
    assert "test_second.py::test_dies ended" in done.stdout
    assert "2 failed, 7 passed" in done.stdout
    assert "Interrupted: 2 tests were not finished" in done.stdout


def test_the_first_failure_ends_the_run_and_its_fixtures(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "-x", "--deselect", "test_second.py::test_dies", "-k", "shares or fails")
    assert done.returncode == 1
    assert "1 failed, 5 passed" in done.stdout
    assert not done.stderr
    assert (tmp_path / "made.txt").read_text() == "made ended "


def test_nothing_is_forked_to_collect(tmp_path: Path) -> None:
    assert "10 tests collected" in run_pytest(tmp_path, "--collect-only").stdout
