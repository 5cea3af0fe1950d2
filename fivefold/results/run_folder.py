"""The folder of a run as a record: its steps (predicted, rehearsed, measured) and its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from fivefold.display import Rows, Shown
from fivefold.record import Mistake, read_file, read_lines
from fivefold.results import trace_file
from fivefold.results.spans import Span
from fivefold.results.step_comparison import Row, compare, read_pair
from fivefold.step import Step

PREDICTED = "predicted.json"  # what `train` writes as it begins
SHOWN = 8  # most measured ranks in a picture of lanes


class RunFolder(Shown):
    """What ``train`` has written; ``rehearsed`` is None unless the run was traced."""

    drawn_by: ClassVar[str] = "fivefold.rendering.html:run"

    folder: Path
    predicted: Step
    measured: Step
    rehearsed: Step | None = None

    def line(self) -> str:
        """The folder, and the measured time beside the predicted one."""
        error = self.predicted.time.step_seconds / self.measured.time.step_seconds - 1
        return f"{self.folder}: {self.measured.line()}, predicted {error:+.1%}"

    @property
    def steps(self) -> tuple[Step, ...]:
        """Predicted, rehearsed if it was, measured."""
        return (self.predicted, *((self.rehearsed,) if self.rehearsed else ()), self.measured)

    @property
    def log(self) -> list[dict[str, Any]]:
        """The lines of its log: step, loss, held-out loss, events."""
        return read_lines(self.folder / "log.jsonl")

    @property
    def compared(self) -> Rows[Row]:
        """Predicted beside measured, quantity by quantity."""
        return Rows(compare(self.predicted, self.measured))

    def table(self) -> list[dict[str, Any]]:
        """The lines of its log."""
        return self.log


def read(folder: Path) -> RunFolder:
    """The run in ``folder``; a ``Mistake`` if it holds none that was measured."""
    path = folder / "step.json"
    if not path.exists():
        raise Mistake(f"{folder}: holds no step.json; a run of 5 or more steps writes it at its end")
    predicted, measured = read_pair(path)
    rehearsed = read_file(path).get("rehearsed")
    found = Step.read(rehearsed, origin=f"{path}: rehearsed") if rehearsed else None
    return RunFolder(folder=folder, predicted=predicted, measured=measured, rehearsed=found)


def promised(folder: Path) -> Step | None:
    """What was predicted of the run when it began; None if its folder does not say."""
    path = folder / PREDICTED
    found = read_file(path).get("predicted") if path.exists() else None
    return Step.read(found, origin=f"{path}: predicted") if found else None


def lanes(folder: Path) -> dict[str, Sequence[Sequence[Span]]]:
    """Spans of the predicted, the rehearsed and the last traced step, by rank; none if the run was not traced."""
    planned = trace_file.read_planned(folder)
    if not planned:
        return {}
    measured = [trace.steps[-1].row() for trace in trace_file.read(folder)[:SHOWN]]
    return {kind: rows for kind, rows in (planned | {"measured": measured}).items() if rows}
