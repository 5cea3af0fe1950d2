"""The cores that other programs use while a calibration runs, and the warning that follows from them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fivefold.calibration import other_programs
from fivefold.calibration.other_programs import ProcessorTime, count_cores_of_others
from fivefold.job import Job
from fivefold.layout.remarks import list_remarks
from fivefold.layout.spec import Layout
from tests.calibration.test_profile import NANO, machine

CORE = "cpu{core} {user} 0 {system} 900 5 0 0 0 0 0\n"


def test_the_time_of_this_process_and_of_other_cores_is_not_that_of_others(monkeypatch, tmp_path: Path):
    """Two cores of three are ours; they were busy for 6 s, in which our children computed 2 s."""
    monkeypatch.setattr(other_programs, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2})
    ticks, moments = os.sysconf("SC_CLK_TCK"), []
    for seconds, own in ((100, 5), (103, 7)):
        lines = (CORE.format(core=core, user=seconds * ticks, system=core) for core in (0, 1, 2))
        (tmp_path / "stat").write_text("cpu  1 2 3\n" + "".join(lines) + "intr 5\n")
        monkeypatch.setattr(os, "times", lambda own=own: os.times_result((1, 0, own, 0, 0)))
        moments.append(ProcessorTime.read()._replace(clock=seconds))
    assert count_cores_of_others(*moments) == pytest.approx((6 - 2) / 3)
    monkeypatch.setattr(other_programs, "STAT", tmp_path / "no file")
    assert ProcessorTime.read() is None
    assert count_cores_of_others(moments[0], None) is None


@pytest.mark.skipif(not other_programs.STAT.exists(), reason="this system does not count processor time by core")
def test_a_program_that_computes_meanwhile_is_counted():
    """It is not waited for, as one that belongs to someone else."""
    begin = ProcessorTime.read()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as program:
        time.sleep(0.5)
        end = ProcessorTime.read()
        program.kill()
    assert count_cores_of_others(begin, end) > 0.3


@pytest.mark.parametrize(
    ("others", "spread", "cause"),
    [
        (1.04, 0.1, "other programs kept 1.0 of its 2 cores busy"),
        (0.1, 0.8, ""),
        (None, 0.8, "a tenth of the points differ by 80% or more"),
        (None, None, ""),
    ],
)
def test_a_busy_computer_is_named_in_its_predictions(others, spread, cause):
    """A calibration that other programs disturbed is worth a line wherever it is used."""
    known = machine()
    calibration = known.calibration.replace(cores=2, cores_of_others=others, spread=spread)
    remarks = list_remarks(NANO, known.replace(calibration=calibration), Job(), Layout.parse("dp1 mbs1"))
    expected = f"this computer was busy when it was calibrated: {cause}; repeat `fivefold calibrate` when it is idle"
    assert [line for line in remarks if "calibrate" in line] == [expected] * bool(cause)
