"""A computer that is not calibrated yet is measured when a command asks for it."""

import pytest
from typer.testing import CliRunner

from fivefold.cli import app, first_calibration
from fivefold.cli.errors import LAUNCHER
from fivefold.cli.first_calibration import calibrate_if_needed
from fivefold.errors import UserError
from fivefold.machine import toml
from fivefold.machine.catalog import UncalibratedError
from fivefold.requests.machines import find_local_machine_file, load_machine
from tests.calibration.test_profile import machine


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The number of measurements so far, each of which writes the machine file of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(LAUNCHER, raising=False)
    times = []

    def write_machine():
        times.append(1)
        find_local_machine_file().parent.mkdir(parents=True, exist_ok=True)
        toml.write(machine(), find_local_machine_file())

    monkeypatch.setattr(first_calibration, "measure", write_machine)
    return times


def test_this_computer_is_measured_once(measured):
    for _ in range(2):
        assert calibrate_if_needed(lambda: load_machine("local:2"), allowed=True).ranks == 2
    assert len(measured) == 1


def test_a_machine_is_calibrated_only_if_it_is_local_and_not_calibrated(measured, monkeypatch):
    with pytest.raises(UncalibratedError, match=r"not calibrated yet .*; run `fivefold calibrate`"):
        calibrate_if_needed(lambda: load_machine("local"), allowed=False)
    with pytest.raises(UserError, match="unknown machine"):
        calibrate_if_needed(lambda: load_machine("here"), allowed=True)
    assert calibrate_if_needed(lambda: load_machine("h100:8"), allowed=True).ranks == 8
    monkeypatch.setenv(LAUNCHER, "1")  # a rank that `fivefold train` has started
    with pytest.raises(UncalibratedError):
        calibrate_if_needed(lambda: load_machine("local"), allowed=True)
    assert measured == []


def test_a_model_that_exceeds_the_memory_is_rejected_before_the_measurement(measured, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('model = "llama3-405b"\n')
    result = CliRunner().invoke(app, ["train", str(run)])
    assert isinstance(result.exception, UserError)
    assert "weights and optimizer states of llama3-405b already take 5.17 TiB, but this host has" in str(
        result.exception
    )
    assert measured == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('corpus = "nowhere"', "nowhere: no such file or folder"),
        ('tokenizer = "nowhere.json"', "unknown tokenizer '.*nowhere.json'"),
    ],
)
def test_a_missing_file_is_named_before_the_measurement(measured, tmp_path, data, message):
    run = tmp_path / "run.toml"
    run.write_text(f'model = "tiny"\n[data]\n{data}\n')
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["train", str(run)], catch_exceptions=False)
    assert measured == []


def test_the_first_calibration_uses_the_quick_measurement(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(LAUNCHER, raising=False)
    asked = []

    def calibrate(**options):
        asked.append(options["quick"])
        return machine()

    monkeypatch.setattr("fivefold.calibration.calibrate", calibrate)
    calibrate_if_needed(lambda: load_machine("local"), allowed=True)
    assert asked == [True]
    assert capsys.readouterr().err.splitlines() == [
        "this computer is not calibrated yet: measuring it for about 30 s; `fivefold calibrate` measures more",
        f"wrote {find_local_machine_file()}",
    ]
