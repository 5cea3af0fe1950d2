"""The result of ``fivefold.trace``: the report of the traces, and the predicted step to compare with."""

from __future__ import annotations

from typing import ClassVar

from fivefold.display import Shown
from fivefold.results.advice import StepAdvice
from fivefold.results.step_comparison import QuantityComparison
from fivefold.results.trace_report import TraceReport
from fivefold.step import Step


class Traced(TraceReport, Shown):
    """A report of traces; ``against``: each quantity of ``predicted`` compared with the traces.

    ``advice``: the largest loss that can be avoided; None if no step takes any time.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_traced"

    against: tuple[QuantityComparison, ...] = ()
    predicted: Step | None = None
    advice: StepAdvice | None = None

    def line(self) -> str:
        """Return the number of ranks and steps, as one line."""
        return f"of {len(self.ranks)} of {self.world} ranks, {len(self.steps)} steps, {self.device}"

    def table(self) -> list[dict[str, object]]:
        """Return one row per rank and step."""
        return [breakdown.model_dump(mode="json") for breakdown in self.breakdown]
