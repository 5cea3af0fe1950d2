"""What ``ff.trace`` answers: the report of the traces, and the predicted step that was laid beside it."""

from __future__ import annotations

from typing import ClassVar

from fivefold.display import Shown
from fivefold.results.step_comparison import Row
from fivefold.results.trace_report import TraceReport
from fivefold.step import Step


class Traced(TraceReport, Shown):
    """A report of traces; ``against``: each quantity of ``predicted`` beside what was traced."""

    drawn_by: ClassVar[str] = "fivefold.rendering.html:traced"

    against: tuple[Row, ...] = ()
    predicted: Step | None = None

    def line(self) -> str:
        """Ranks and steps."""
        return f"of {len(self.ranks)} of {self.world} ranks, {len(self.steps)} steps, {self.device}"

    def table(self) -> list[dict[str, object]]:
        """A row for each rank and step."""
        return [each.model_dump(mode="json") for each in self.breakdown]
