"""A full training run as records: its days with failures and checkpoints, the time these cost, money, energy and CO2.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.display import Shown, flatten
from fivefold.machine.datacenter import Site
from fivefold.record import Record
from fivefold.results.search_result import Goal
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

    def describe_costs(self) -> str:
        """Return which machine costs least, and at which price the next would cost the same; empty without prices."""
        runs = [(offer.run, offer.run.dollars, offer.machine_argument) for offer in self.offers if offer.run]
        priced = sorted(((dollars, name, run) for run, dollars, name in runs if dollars), key=itemgetter(0))
        if len(priced) < 2:
            return ""
        (least, name, cheapest), (next_dollars, next_name, following) = priced[:2]
        more = next_dollars / least
        overlaps = more * following.low_seconds / following.seconds < cheapest.high_seconds / cheapest.seconds
        within = ", which is within the uncertainty of their times" if overlaps else ""
        price = next_dollars / following.gpu_hours
        return (
            f"{name} costs least, ${least:,.0f}; {next_name} costs {more - 1:.1%} more{within}, and the same at "
            f"${price / more:,.2f} instead of ${price:,.2f} per GPU hour"
        )

    def line(self) -> str:
        """Return the machines and the best of them, as one line."""
        best = f": {self.offers[0].machine}" if self.offers else ""
        return f"of {self.model} on {len(self.offers)} machines by {self.by}{best}"

    def table(self) -> list[dict[str, Any]]:
        """Return one row per machine."""
        return [flatten(offer.model_dump(mode="json")) for offer in self.offers]
