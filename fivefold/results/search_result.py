"""Results of a search as records: the best layouts, the Pareto front of time over memory, why others were rejected.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from math import ceil
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.display import Shown, flat
from fivefold.record import Record
from fivefold.results.objectives import Aim
from fivefold.stack.spec import Reduce
from fivefold.step import FITS_RISK, Step, judge
from fivefold.units import show_risk, show_seconds


class Ranked(Record):
    """A predicted step with its cost: all ranks for the duration of one step."""

    step: Step
    gpu_hours: NonNegativeFloat
    dollars: NonNegativeFloat | None = None  # None: the machine has no price
    reduce: Reduce = "micro_batch"  # how often ZeRO-2 and -3 reduce gradients


class Point(Record):
    """A point of the Pareto front: no evaluated layout is both smaller and faster."""

    layout: str
    precision: str
    reduce: Reduce = "micro_batch"  # how often ZeRO-2 and -3 reduce gradients
    world: PositiveInt
    memory_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat


class Reason(Record):
    """A cause of rejection, how many layouts it rejected, and the nearest of them."""

    cause: str
    layouts: PositiveInt
    nearest: str
    line: str


class NearMiss(Record):
    """A layout that almost fits in memory, and changes that would make it fit."""

    layout: str
    needs_bytes: NonNegativeInt  # at the peak
    has_bytes: PositiveInt  # the device's memory
    risk: float | None = None  # probability of running out of memory
    cause: str
    mends: tuple[str, ...]


class TightLayout(Record):
    """The best layout that runs out of memory with a probability above the limit, but less likely than not.

    ``faster``: score of the best that fits over its own, less 1; None where nothing fits.
    """

    layout: str
    precision: str
    reduce: Reduce = "micro_batch"
    risk: float
    memory_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat
    faster: float | None = None

    def line(self) -> str:
        """What it would gain."""
        gain = "would fit" if self.faster is None else f"would be {self.faster:.1%} faster"
        return f"a tight layout {gain}: {self.layout} (risk {show_risk(self.risk)}; --risk {self.option})"

    @property
    def option(self) -> str:
        """The limit of risk with which it is proposed."""
        return f"{ceil(self.risk * 100) / 100:g}"


class Finalist(Record):
    """One of the best layouts, trained for a few steps; ``why``: in one line, why it could not be."""

    layout: str
    predicted_seconds: NonNegativeFloat
    measured_seconds: NonNegativeFloat | None = None
    why: str = ""


class Alternative(Record):
    """Another layout beside the proposed one; ``slower``: its step time over the proposal's, less 1; ``because``: the
    part of its time that makes most of that, with the seconds.
    """

    layout: str
    reduce: Reduce = "micro_batch"  # how often ZeRO-2 and -3 reduce gradients
    memory_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat
    slower: float
    because: str = ""


class Why(Record):
    """A choice of the proposed layout, such as tp8, and what its nearest alternatives would cost."""

    choice: str
    line: str


class Proposal(Record):
    """The simplest layout whose score is ``within`` a share of the best, which a prediction cannot tell from it.

    ``simpler``: the fastest of the simpler layouts; ``faster``: the fastest of all, unless it is the proposal;
    ``remark``: what of the question stands in the way of better ones.
    """

    layout: str
    within: NonNegativeFloat
    alike: NonNegativeInt  # evaluated layouts that are within it
    choice: Ranked
    simpler: Alternative | None
    faster: Alternative | None
    why: tuple[Why, ...]
    remark: str = ""


class Told(Record):
    """A scenario, how the run differs from what is predicted: its best layout, and what the chosen one loses to it."""

    name: str
    source: str  # of the range; "" as predicted
    best: str
    best_seconds: NonNegativeFloat
    regret: NonNegativeFloat | None


class Regret(Record):
    """What a layout loses to the best layout of a scenario: step time over that one's, less 1.

    ``expected``: the mean over all scenarios; ``worst``: the most of them, in ``worst_in``. None: does not fit there.
    """

    layout: str
    note: str  # such as "the fastest"
    step_seconds: NonNegativeFloat  # as predicted
    memory_bytes: NonNegativeInt
    expected: NonNegativeFloat | None
    worst: NonNegativeFloat | None
    worst_in: str


class Robustness(Record):
    """Layouts by what they lose at worst if the run is otherwise than predicted, the least first."""

    scenarios: tuple[Told, ...]
    rows: tuple[Regret, ...]


class SearchResult(Shown):
    """What ``plan.search`` returns. ``tried`` = ``evaluated`` + layouts excluded by bounds. ``stopped``: by Ctrl-C, so
    that others may be better.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:search"

    by: Aim
    proposal: Proposal | None = None  # of a search by time or cost that was asked for one
    robust: Robustness | None = None  # of a search by robust
    best: tuple[Ranked, ...]
    front: tuple[Point, ...]
    reasons: tuple[Reason, ...]
    risk: float = FITS_RISK  # probability of running out of memory up to which layouts were proposed
    tight: TightLayout | None = None  # beyond it, if it beats all that were
    misses: tuple[NearMiss, ...] = ()  # filled if no layout fits
    tightest: str = ""  # if none does, of constraints the one that has to give way, and what then fits
    tried: NonNegativeInt
    evaluated: NonNegativeInt
    seconds: NonNegativeFloat
    finalists: tuple[Finalist, ...] = ()  # of ``search --measure``, the fastest first
    stopped: bool = False

    def line(self) -> str:
        """What it proposes, or the best, of how many."""
        best = self.proposal.choice if self.proposal else self.best[0] if self.best else None
        found = f"{best.step.layout}, {show_seconds(best.step.time.step_seconds)}" if best else "none fits"
        return f"of {self.tried:,} layouts: {found}"

    def table(self) -> list[dict[str, Any]]:
        """A row for each of the best."""
        return [flat(each.model_dump(mode="json")) for each in self.best]


class Answer(Record):
    """The answer to one question as a number; ``layout``: the layout for which it holds."""

    question: str
    line: str
    value: float
    layout: str | None = None
    memory_bytes: NonNegativeInt | None = None
    step_seconds: NonNegativeFloat | None = None
    remarks: tuple[str, ...] = ()  # what is legal, but perhaps not intended, one line each


class Change(Record):
    """One change of a job or layout, and its effect on memory and time of a step."""

    change: str
    layout: str
    fits: bool
    memory_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat
    faster: float  # speedup: old over new step time
    saved_bytes: int
    remarks: tuple[str, ...] = ()  # what is legal, but perhaps not intended, one line each
    risk: float | None = None  # probability of running out of memory

    @property
    def answer(self) -> str:
        """Whether it fits: yes, tight or no."""
        tight = self.risk is not None and judge(self.risk) == "tight"
        return "yes" if self.fits else "tight" if tight else "no"


class Walk(Shown):
    """One change at a time from a layout. ``changes``: all of it, the best first; ``path``: the best one, then the best
    change of what that made, and so on while it gains; each beside the layout before it.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:walk"

    start: Change
    changes: tuple[Change, ...]
    path: tuple[Change, ...]

    def line(self) -> str:
        """In a few words."""
        best = self.changes[0] if self.changes else None
        gain = f"; best: {best.change}, {best.faster - 1:+.1%}" if best else ""
        return f"from {self.start.layout}{gain}"

    def table(self) -> list[dict[str, Any]]:
        """A row for each change."""
        return [flat(each.model_dump(mode="json")) for each in self.changes]


class LengthPoint(Record):
    """A step with sequences of ``tokens``, of about as many tokens in all."""

    tokens: PositiveInt
    fits: bool
    peak_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat
    mfu: NonNegativeFloat


class LengthCurve(Record):
    """A layout with other recomputation and cp, over the length of sequences; ``longest``: that fits, 0 if none."""

    cp: PositiveInt
    ac: str
    layout: str
    longest: NonNegativeInt
    points: tuple[LengthPoint, ...]


class Lengths(Record):
    """What ``ask sequence`` finds: the longest of the layout as it is, curves, and how to get to ``target`` tokens."""

    model: str
    machine: str
    answer: Answer
    curves: tuple[LengthCurve, ...]
    target: PositiveInt
    changes: tuple[str, ...]  # what must change for it, a line each
    remarks: tuple[str, ...] = ()  # what is legal, but perhaps not intended, one line each


class Batch(Record):
    """A global batch size in the range of recent runs, with its micro-batches under a layout."""

    global_batch: PositiveInt
    tokens: PositiveInt
    micro_batches: PositiveInt  # per pipeline and step (gradient accumulation)
    steps: PositiveInt  # for the whole token budget
    who: tuple[str, ...] = ()  # laws, teams and measurements whose batch is nearest to this one
    remarks: tuple[str, ...] = ()  # what is legal, but perhaps not intended, one line each
