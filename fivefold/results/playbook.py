"""A plan in steps, as records: make it fit, reach the batch size, make it fast; each step with numbers and reasons.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.display import Shown, flatten
from fivefold.record import Record
from fivefold.results.run_estimate import RunEstimate
from fivefold.step import Step


class Attempt(Record):
    """A layout that was considered; ``why``: the outcome in a few words."""

    layout: str
    why: str
    fits: bool
    chosen: bool = False
    peak_bytes: NonNegativeInt | None = None  # None: the layout is not valid
    step_seconds: NonNegativeFloat | None = None


class Stage(Record):
    """One step of the procedure: its question, the layouts tried, and the one chosen with the reason."""

    title: str
    question: str
    tried: tuple[Attempt, ...]
    reason: str


class Playbook(Shown):
    """The procedure for one run with its final layout and the run; ``commands``: the commands to run, by software."""

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_playbook"

    model: str
    machine: str
    ranks: PositiveInt
    tokens: NonNegativeFloat
    stages: tuple[Stage, ...]
    step: Step
    run: RunEstimate
    run_file: str  # as TOML, for ``train``
    commands: dict[str, tuple[str, ...]]
    configs: dict[str, str] = {}  # files of the job's software by name, if it is not Fivefold's and can run the plan

    def line(self) -> str:
        """Return the plan in a few words."""
        return f"for {self.model} on {self.ranks:,} × {self.machine}: {self.step.layout}"

    def table(self) -> list[dict[str, Any]]:
        """Return one row per stage."""
        return [flatten(stage.model_dump(mode="json")) for stage in self.stages]
