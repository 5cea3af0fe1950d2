"""Lists the runs below the folder, and reads their logs. Everything is read again on every request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fivefold.errors import UserError
from fivefold.record import Record
from fivefold.results import run_folder
from fivefold.results.run_folder import RunFolder
from fivefold.results.step_comparison import compare_unfinished
from fivefold.step import Step
from fivefold.text_files import read_lines
from fivefold.web.folder import ServedFolder

MAX_DEPTH, MAX_RUNS = 4, 200  # depth of folders searched, and number of runs listed
LIVE_SECONDS = 30.0  # a run counts as training if its last log line is younger than this
LOG = "log.jsonl"


class RunSummary(Record):
    """A run as one line of the list."""

    folder: str
    state: Literal["running", "finished", "stopped"]
    step: int
    loss: float | None = None
    heldout_loss: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    layout: str = ""
    model: str = ""
    predicted_seconds: float | None = None
    measured_seconds: float | None = None


def find(folder: ServedFolder) -> list[RunSummary]:
    """Return the runs, most recently written first."""
    logs = sorted(_find_logs(folder.root, MAX_DEPTH), key=lambda path: -path.stat().st_mtime)
    return [summarize_run(folder, path.parent) for path in logs[:MAX_RUNS]]


def _find_logs(root: Path, depth: int) -> Iterator[Path]:
    """Yield the logs in a folder and below it; links and hidden folders are skipped."""
    try:
        inside = sorted(root.iterdir())
    except OSError:
        return
    for path in inside:
        if path.is_symlink():
            continue
        if path.name == LOG and path.is_file():
            yield path
        elif depth and path.is_dir() and not path.name.startswith((".", "__")):
            yield from _find_logs(path, depth - 1)


def read_log(folder: ServedFolder, name: str) -> list[dict[str, Any]]:
    """Return the lines of a run's log; raises ``UserError`` if ``name`` is no run."""
    path = folder.path(f"{name}/{LOG}")
    if not path.is_file():
        raise UserError(f"{name!r} holds no {LOG}; name the folder of a run")
    try:
        log_lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}/{LOG} cannot be read: {error}") from None
    return [line for line in log_lines if isinstance(line, dict) and isinstance(line.get("step"), int)]


def read_steps(folder: ServedFolder, name: str) -> RunFolder | None:
    """Return predicted and measured of a finished run; None while it trains, also if it has been resumed."""
    measured = folder.path(f"{name}/step.json")
    prediction = folder.path(f"{name}/{run_folder.PREDICTED}")
    if not measured.is_file():
        return None
    was_resumed = prediction.is_file() and prediction.stat().st_mtime > measured.stat().st_mtime
    return None if was_resumed and is_live(folder, name) else run_folder.read(folder.path(name))


def read_prediction(folder: ServedFolder, name: str) -> Step | None:
    """Return the prediction made for a run, available from its first step on; None if there is none."""
    try:
        return run_folder.read_prediction(folder.path(f"{name}/{run_folder.PREDICTED}").parent)
    except UserError:
        return None


def summarize_run(folder: ServedFolder, path: Path) -> RunSummary:
    """Return a run's line."""
    name = folder.name(path)
    try:
        lines, finished = read_log(folder, name), read_steps(folder, name)
    except UserError:  # damaged or too large logs are listed too
        return RunSummary(folder=name, state="stopped", step=0)
    training = [line for line in lines if "loss" in line]
    last = training[-1] if training else {}
    heldout = [line for line in lines if "heldout_loss" in line]
    facts: dict[str, Any] = {}
    if finished is not None:
        facts = {
            "layout": finished.measured.layout,
            "model": finished.measured.model,
            "predicted_seconds": finished.predicted.time.step_seconds,
            "measured_seconds": finished.measured.time.step_seconds,
        }
    elif (step := read_prediction(folder, name)) is not None:
        step_seconds = [row.measured for row in compare_unfinished(step, training) if row.quantity == "step time"]
        facts = {
            "layout": step.layout,
            "model": step.model,
            "predicted_seconds": step.time.step_seconds,
            "measured_seconds": step_seconds[0] if step_seconds else None,
        }
    return RunSummary(
        folder=name,
        state="finished" if finished else "running" if is_live(folder, name) else "stopped",
        step=max((line["step"] for line in lines), default=0),
        loss=_number(last.get("loss")),
        heldout_loss=_number(heldout[-1].get("heldout_loss")) if heldout else None,
        tokens=last.get("tokens") if isinstance(last.get("tokens"), int) else None,
        tokens_per_second=compute_speed(training[-20:]),
        **facts,
    )


def is_live(folder: ServedFolder, name: str) -> bool:
    """Tell whether the run has logged something recently."""
    return time.time() - folder.path(f"{name}/{LOG}").stat().st_mtime < LIVE_SECONDS


def compute_speed(training: list[dict[str, Any]]) -> float | None:
    """Return tokens per second over some logged steps, by their own seconds."""
    timed_lines = [line for line in training if _number(line.get("seconds")) and isinstance(line.get("tokens"), int)]
    if len(timed_lines) < 2:
        return None
    seconds = sum(line["seconds"] for line in timed_lines[1:])
    return float((timed_lines[-1]["tokens"] - timed_lines[0]["tokens"]) / seconds) if seconds > 0 else None


def _number(value: object) -> float | None:
    """Return a finite number as a float; None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None
