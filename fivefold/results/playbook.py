"""A plan told step by step, as a record: make it fit, reach the batch, make it fast; each with numbers and reasons.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.display import Shown, flat
from fivefold.record import Record
from fivefold.results.whole_run import WholeRun
from fivefold.step import Step


class Tried(Record):
    """A layout that was considered; ``why``: what came of it, in a few words."""

    layout: str
    why: str
    fits: bool
    chosen: bool = False
    peak_bytes: NonNegativeInt | None = None  # None: it is not legal
    step_seconds: NonNegativeFloat | None = None


class Stage(Record):
    """One step of the procedure: what it asks, what was tried, what was taken and why."""

    title: str
    question: str
    tried: tuple[Tried, ...]
    reason: str


class Playbook(Shown):
    """The procedure for one run, its last layout, and the run; ``typed``: what to type, by software."""

    drawn_by: ClassVar[str] = "fivefold.rendering.html:playbook"

    model: str
    machine: str
    ranks: PositiveInt
    tokens: NonNegativeFloat
    stages: tuple[Stage, ...]
    step: Step
    run: WholeRun
    run_file: str  # as TOML, for ``train``
    typed: dict[str, tuple[str, ...]]

    def line(self) -> str:
        """In a few words."""
        return f"for {self.model} on {self.ranks:,} × {self.machine}: {self.step.layout}"

    def table(self) -> list[dict[str, Any]]:
        """A row for each stage."""
        return [flat(each.model_dump(mode="json")) for each in self.stages]
