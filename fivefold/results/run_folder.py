"""The folder of a run as a record: its steps (predicted, dry run, measured) and its log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fivefold.display import Rows, Shown
from fivefold.errors import UserError
from fivefold.results import trace_file
from fivefold.results.spans import Span
from fivefold.results.step_comparison import QuantityComparison, compare, read_pair
from fivefold.step import Step
from fivefold.text_files import read_file, read_lines

PREDICTED = "predicted.json"  # `train` writes it at the start
MAX_TIMELINE_RANKS = 8  # largest number of measured ranks in a timeline


class RunFolder(Shown):
    """The results that ``train`` has written; ``dry_run`` (a dry run) is None unless the run was traced."""

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_run"

    folder: Path
    predicted: Step
    measured: Step
    dry_run: Step | None = None

    def line(self) -> str:
        """Return the folder and the measured time next to the predicted one, as one line."""
        error = self.predicted.time.step_seconds / self.measured.time.step_seconds - 1
        return f"{self.folder}: {self.measured.line()}, predicted {error:+.1%}"

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the predicted step, the dry-run step if there is one, and the measured step."""
        return (self.predicted, *((self.dry_run,) if self.dry_run else ()), self.measured)

    @property
    def log(self) -> list[dict[str, Any]]:
        """Read the lines of the run's log: step, loss, held-out loss, events."""
        return read_lines(self.folder / "log.jsonl")

    @property
    def comparison(self) -> Rows[QuantityComparison]:
        """Compare predicted and measured, quantity by quantity."""
        return Rows(compare(self.predicted, self.measured))

    def table(self) -> list[dict[str, Any]]:
        """Return the lines of the run's log."""
        return self.log


def read(folder: Path) -> RunFolder:
    """Read the run in ``folder``; raises ``UserError`` if it holds no measured run."""
    path = find_step_file(folder)
    predicted, measured = read_pair(path)
    dry_run = read_file(path).get("dry_run")
    dry_run_step = Step.read(dry_run, origin=f"{path}: dry_run") if dry_run else None
    return RunFolder(folder=folder, predicted=predicted, measured=measured, dry_run=dry_run_step)


def find_step_file(folder: Path) -> Path:
    """Return the path of the run's step.json; raises ``UserError`` if there is none."""
    path = folder / "step.json"
    if not os.path.lexists(folder) and len(os.fsencode(folder.name)) < 256:  # reading the file refuses longer names
        raise UserError(f"{folder}: no such run folder; `fivefold train` and `watch` write one")
    if folder.is_dir() and not path.exists():
        raise UserError(f"{folder} has no step.json; a run of 5 or more steps writes it at its end")
    return path


def read_prediction(folder: Path) -> Step | None:
    """Return the prediction made when the run began; None if its folder has none."""
    path = folder / PREDICTED
    predicted = read_file(path).get("predicted") if path.exists() else None
    return Step.read(predicted, origin=f"{path}: predicted") if predicted else None


def list_lanes(folder: Path) -> dict[str, Sequence[Sequence[Span]]]:
    """Return spans of the predicted, the dry-run and the last traced step, by rank; empty if the run was not traced."""
    planned = trace_file.read_planned(folder)
    if not planned:
        return {}
    measured = [trace.steps[-1].row() for trace in trace_file.read(folder)[:MAX_TIMELINE_RANKS]]
    return {kind: rows for kind, rows in (planned | {"measured": measured}).items() if rows}
