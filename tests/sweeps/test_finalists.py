"""The best layouts of a search, trained for a few steps."""

import os
import subprocess
import sys

import pytest

from fivefold.calibration import profile
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import toml
from fivefold.machine.catalog import resolve as machine_of
from fivefold.model.catalog import resolve
from fivefold.planner.predict import predict
from fivefold.sweeps import finalists
from fivefold.sweeps.finalists import measure_best, select_different
from fivefold.sweeps.trial import Trial
from tests.calibration.test_profile import machine

NANO, JOB = resolve("nano"), Job(sequence=32, global_batch=8, precision="fp32")


def test_nearly_equal_layouts_are_measured_once():
    layouts = [Layout.parse(text) for text in ("dp2 zero1 mbs2", "dp2 zero2 mbs2", "dp2 zero3 mbs2", "tp2 mbs2")]
    assert select_different(layouts, count=3) == [layouts[0], layouts[2], layouts[3]]
    assert select_different(layouts, count=1) == layouts[:1]


def test_layouts_that_differ_in_any_other_keyword_are_measured():
    texts = ("dp2 cp2 zero3 mbs2", "dp2 cp2 zero3 mbs2 offload=optimizer", "dp2 cp2 zero3 mbs2 cp=ulysses")
    layouts = [Layout.parse(text) for text in texts]
    assert select_different(layouts, count=3) == layouts


@pytest.mark.slow
def test_the_fastest_measured_comes_first_and_what_failed_last(monkeypatch):
    """Trials are imitated: they reverse the predicted order, and one runs out of memory."""
    here, took = machine().replace(ranks=2, ranks_per_node=2), {}

    def record_trial(*, model, machine, layout, job, steps):
        if not took:
            took[layout] = 0.0
            return Trial(ended="memory", why="CUDA out of memory")
        step = predict(model=model, machine=machine, layout=layout, job=job)
        seconds = took.setdefault(layout, 1.0 / len(took))
        return Trial(ended="measured", measured=step.replace(time=step.time.replace(step_seconds=seconds)))

    monkeypatch.setattr(finalists, "try_layout", record_trial)
    monkeypatch.setattr(finalists, "profile_layout", lambda *, machine, **_: machine)
    result, _ = measure_best(model=NANO, machine=here, job=JOB, count=3)
    assert [item.layout for item in result[:2]] == [str(layout) for layout in reversed(list(took)[1:])]
    assert (result[2].measured_seconds, result[2].why) == (None, "CUDA out of memory")


def test_only_this_computer_can_measure():
    with pytest.raises(UserError, match="h100 is not calibrated"):
        measure_best(model=NANO, machine=machine_of("h100:8", local=None), job=JOB, count=2)


def test_a_search_measures_for_real(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "SECONDS", 0.01)  # also in the command, which is forked from here
    monkeypatch.setattr(finalists, "TRIALS_PER_LAYOUT", 1)
    path = tmp_path / "cache" / "fivefold" / "local.toml"  # not ./fivefold, which Python would take for the package
    path.parent.mkdir(parents=True)
    toml.write(machine().replace(ranks=1, ranks_per_node=2), path)
    words = ["search", "nano", "local:1", "--seq", "32", "--gbs", "4", "--precision", "fp32", "--measure", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Measured" in done.stdout
    assert toml.read(path).calibration.units  # and its units are known from now on
