"""A full training run as records: its days with failures and checkpoints, the time these cost, money, energy and CO2.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.display import Shown, flatten
from fivefold.machine.datacenter import Site
from fivefold.record import Record
from fivefold.results.objectives import Goal
from fivefold.step import Interval, Verdict, judge


class Goodput(Record):
    """The share of a run's time spent training, if a checkpoint is saved every ``interval_seconds``."""

    interval_seconds: NonNegativeFloat
    share: NonNegativeFloat


class RunEstimate(Record):
    """Training on ``tokens`` tokens. ``training_seconds`` + ``lost`` = ``seconds``, which money, energy and CO2 cover.

    ``low_seconds`` and ``high_seconds``: with the published range of failures and of restarts, and the step's interval.
    """

    model: str
    machine: str
    layout: str
    ranks: PositiveInt
    tokens: NonNegativeFloat
    steps: PositiveInt
    step_seconds: NonNegativeFloat
    step_interval: Interval | None = None  # range to expect for ``step_seconds``
    peak_bytes: NonNegativeInt
    capacity_bytes: NonNegativeInt
    risk: float | None = None  # probability that a step runs out of memory
    training_seconds: NonNegativeFloat
    lost: dict[str, NonNegativeFloat]  # seconds: evaluation, checkpoints, restarts, repeated
    seconds: NonNegativeFloat
    low_seconds: NonNegativeFloat
    high_seconds: NonNegativeFloat
    failures: NonNegativeFloat
    between_failures_seconds: NonNegativeFloat | None  # None: no failures
    checkpoint_bytes: NonNegativeInt
    blocked_seconds: NonNegativeFloat  # time that training waits for each checkpoint
    written_seconds: NonNegativeFloat  # time until a checkpoint is complete
    interval_seconds: NonNegativeFloat
    young_seconds: NonNegativeFloat  # the interval by Young's formula
    goodput: NonNegativeFloat  # training_seconds / seconds
    curve: tuple[Goodput, ...]
    gpu_hours: NonNegativeFloat
    dollars: NonNegativeFloat | None = None  # None: the machine has no price
    chip_kwh: NonNegativeFloat | None = None  # at the chips' power limit; None: the machine states none
    kwh: NonNegativeFloat | None = None  # including nodes and building
    co2_kg: NonNegativeFloat | None = None
    site: Site
    remarks: tuple[str, ...] = ()  # what is valid but perhaps not intended, one line each

    @property
    def verdict(self) -> Verdict:
        """Tell whether the layout fits in memory."""
        return "fits" if self.risk is None else judge(self.risk)


class Offer(Record):
    """A machine with a number of ranks, the layout proposed for it, and the run; or the reason why there is none."""

    machine: str
    ranks: PositiveInt
    layout: str = ""
    mfu: NonNegativeFloat = 0.0
    run: RunEstimate | None = None
    error: str = ""
    remark: str = ""  # if a better layout may exist

    @property
    def machine_argument(self) -> str:
        """Return the machine as a command takes it: ``h100:64 nic=1Gbit``."""
        chip, space, words = self.machine.partition(" ")
        return f"{chip}:{self.ranks}{space}{words}"


class Offers(Shown):
    """One run on several machines, the best by ``by`` first; ``stopped``: interrupted before all were searched."""

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_offers"

    model: str
    by: Goal
    tokens: NonNegativeFloat
    deadline_seconds: NonNegativeFloat | None = None
    offers: tuple[Offer, ...]
    stopped: bool = False

    def line(self) -> str:
        """Return the machines and the best of them, as one line."""
        best = f": {self.offers[0].machine}" if self.offers else ""
        return f"of {self.model} on {len(self.offers)} machines by {self.by}{best}"

    def table(self) -> list[dict[str, Any]]:
        """Return one row per machine."""
        return [flatten(offer.model_dump(mode="json")) for offer in self.offers]
