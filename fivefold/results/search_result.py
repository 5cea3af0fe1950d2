"""Results of a search as records: the best layouts, the Pareto front of time over memory, why others were rejected.

Plain records, so that ``show`` can print them without importing the planner.
"""

from __future__ import annotations

from math import ceil
from operator import attrgetter
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.display import Shown, flatten
from fivefold.record import Record
from fivefold.results.comparison import SpeedRatio
from fivefold.stack.spec import Reduce
from fivefold.step import FITS_RISK, Step, judge
from fivefold.units import show_bytes, show_risk, show_risk_option, show_seconds

By = Literal["time", "cost", "memory"]  # per step
Aim = Literal[By, "robust"]  # robust: the regret if the run differs from the prediction
Goal = Literal["time", "cost", "energy"]  # of a full run
Objective = Literal[By, "energy", "robust"]  # all of them


MAX_MEANT_GAP = 0.5  # above it, a gap is due to how loose the bounds are and says nothing of the layout


class Ranked(Record):
    """A predicted step with its cost: all ranks for the duration of one step."""

    step: Step  # the predicted step
    gpu_hours: NonNegativeFloat  # GPU hours of one step
    dollars: NonNegativeFloat | None = None  # None: the machine has no price
    reduce: Reduce = "micro_batch"  # how often ZeRO-2 and -3 reduce gradients

    @property
    def precision(self) -> str:
        """Return the name of the precision of the step's job; empty if its record has none."""
        recipe = self.step.job.get("precision")
        return str(recipe["name"]) if isinstance(recipe, dict) else ""


class Point(Record):
    """A point of the Pareto front: no evaluated layout is both smaller and faster."""

    layout: str  # layout in canonical order
    precision: str  # name of the precision recipe
    reduce: Reduce = "micro_batch"  # how often ZeRO-2 and -3 reduce gradients
    world: PositiveInt  # ranks of the layout
    memory_bytes: NonNegativeInt  # peak memory of a rank
    step_seconds: NonNegativeFloat  # step time


class Reason(Record):
    """A cause of rejection, how many layouts it rejected, and the nearest of them."""

    cause: str  # short name of the cause
    layouts: PositiveInt  # number of layouts
    nearest: str  # the one that was closest to fitting or winning
    line: str  # the cause in words


class NearMiss(Record):
    """A layout that almost fits in memory, and the changes that would make it fit."""

    layout: str  # layout in canonical order
    needs_bytes: NonNegativeInt  # memory at the peak
    has_bytes: PositiveInt  # the device's memory
    risk: float | None = None  # probability of running out of memory
    cause: str  # where in a step its memory peaks
    fixes: tuple[str, ...]  # changes with which it would fit

    @property
    def shortage(self) -> str:
        """Return in words what it needs of the device's memory, and how likely it runs out of it."""
        need = f"needs {show_bytes(self.needs_bytes)} of {show_bytes(self.has_bytes)}"
        return need if self.risk is None else f"{need}, {show_risk(self.risk)} risk of running out"

    @property
    def remedy(self) -> str:
        """Return the nearest change with which it would fit, as the end of a sentence."""
        return f"it would fit with {self.fixes[0]}" if self.fixes else "use more GPUs"


class TightLayout(Record):
    """The best layout whose risk of running out of memory is above the limit but below one half.

    ``faster``: score of the best layout that fits over its own, minus 1; None where nothing fits. The score is the
    step time or the cost, as ``gain`` says.
    """

    layout: str  # layout in canonical order
    precision: str  # name of the precision recipe
    reduce: Reduce = "micro_batch"  # how often gradients are reduced
    risk: float  # probability of running out of memory
    memory_bytes: NonNegativeInt  # peak memory of a rank
    step_seconds: NonNegativeFloat  # step time
    faster: float | None = None  # relative gain over the best layout that fits
    gain: Literal["faster", "cheaper"] = "faster"  # what the gain is in
    fixes: tuple[str, ...] = ()  # single changes of the job with which it fits

    def line(self) -> str:
        """Return its gain as one line."""
        gain = "is accepted with a higher risk" if self.faster is None else f"would be {self.faster:.1%} {self.gain}"
        line = f"a tight layout {gain}: {self.layout} (risk {show_risk(self.risk)}; --risk {self.option})"
        return f"{line}; it would fit with {' or '.join(self.fixes)}" if self.fixes else line

    @property
    def option(self) -> str:
        """Return the risk limit at which it would be proposed."""
        return show_risk_option(self.risk)


class Finalist(Record):
    """One of the best layouts, trained for a few steps; ``why``: one line that says why it could not run."""

    layout: str  # layout in canonical order
    predicted_seconds: NonNegativeFloat  # predicted step time
    measured_seconds: NonNegativeFloat | None = None  # measured step time; None: it failed
    why: str = ""  # why it failed


class Alternative(Record):
    """Another layout, compared with the proposed one.

    ``slower``: its step time over the proposal's, minus 1; ``because``: the parts of the time that explain it, with
    their seconds; ``within_uncertainty``: published pairs of runs that differ like these do not let their
    times be told apart.
    """

    layout: str  # layout in canonical order
    precision: str  # name of the precision recipe
    reduce: Reduce = "micro_batch"  # how often ZeRO-2 and -3 reduce gradients
    memory_bytes: NonNegativeInt  # peak memory of a rank
    step_seconds: NonNegativeFloat  # step time
    slower: float  # step time relative to the proposal's, minus 1
    because: str = ""  # parts of the step that make the difference
    within_uncertainty: bool = False  # whether the difference of the times is smaller than what predictions can tell

    def describe_difference(self) -> str:
        """Return how much longer or shorter its step is, by which parts, and whether a prediction can tell."""
        comparative = "longer" if self.slower >= 0 else "shorter"
        because = f" ({self.because})" if self.because else ""
        uncertainty = ", within the uncertainty" if self.within_uncertainty else ""
        share = f"{abs(self.slower):.1%}"
        amount = "less than 0.1%" if share == "0.0%" else share
        return f"step time {amount} {comparative}{because}{uncertainty}"


class Why(Record):
    """A choice of the proposed layout, such as tp8, and the cost of its nearest alternatives."""

    choice: str  # keyword of the layout
    line: str  # what other values of it cost


class Proposal(Record):
    """The simplest layout whose score is ``within`` a share of the best, which a prediction cannot tell from it.

    ``simpler``: the fastest of the simpler layouts; ``faster``: the fastest of all, unless it is the proposal;
    ``unchanged``: the fastest of the evaluated layouts in the job's own precision, if the proposal is in another;
    ``remark``: the constraint of the question that rules out better layouts.
    """

    layout: str  # the proposed layout
    within: NonNegativeFloat  # relative difference up to which layouts count as equal
    similar_layouts: NonNegativeInt  # number of evaluated layouts within this share
    choice: Ranked  # the proposed layout with its step
    simpler: Alternative | None  # the best layout that is simpler
    faster: Alternative | None  # the fastest layout, if that is another
    unchanged: Alternative | None = None  # the fastest in the job's own precision, if the proposal has another
    why: tuple[Why, ...]  # one line for each choice of the layout
    remark: str = ""  # constraint that rules out better layouts

    @property
    def step_seconds(self) -> float:
        """Return the predicted step time of the proposed layout."""
        return self.choice.step.time.step_seconds

    def describe(self, superlative: str) -> str:
        """Return why it is proposed, in words; ``superlative``: what the best layout is, such as fastest."""
        number = self.similar_layouts
        close = "1 layout is" if number == 1 else f"{number} layouts are"
        return f"the simplest layout within {self.within:.1%} of the {superlative} ({close} that close)"

    def list_alternatives(self, superlative: str) -> list[tuple[str, Alternative]]:
        """Return the other layouts it is compared with, each with what it is: simpler, the best, in another precision.

        ``superlative``: what the best layout is, such as fastest.
        """
        own_precision = f"in {self.unchanged.precision}" if self.unchanged else ""
        labelled = (("simpler", self.simpler), (superlative, self.faster), (own_precision, self.unchanged))
        return [(label, other) for label, other in labelled if other is not None]


class ScenarioResult(Record):
    """A scenario, in which the run differs from the prediction: its best layout, and the regret of the chosen one."""

    name: str  # what is varied
    source: str  # source of the range; "" for the prediction itself
    best: str  # the best layout then
    best_seconds: NonNegativeFloat  # its step time
    regret: NonNegativeFloat | None  # relative time that the proposal loses then


class Regret(Record):
    """The loss of a layout against the best layout of a scenario: step time over that one's, minus 1.

    ``expected``: the mean over all scenarios; ``worst``: the maximum, reached in ``worst_scenario``. None: does not fit
    there.
    """

    layout: str  # layout in canonical order
    note: str  # such as "the fastest"
    step_seconds: NonNegativeFloat  # predicted step time
    memory_bytes: NonNegativeInt  # peak memory of a rank
    expected: NonNegativeFloat | None  # mean regret over the scenarios
    worst: NonNegativeFloat | None  # largest regret
    worst_scenario: str  # scenario with the largest regret


class Robustness(Record):
    """Layouts by their worst-case loss if the run differs from the prediction, smallest loss first."""

    scenarios: tuple[ScenarioResult, ...]  # what was varied, with the best layout of each
    rows: tuple[Regret, ...]  # layouts by their largest regret


class SearchResult(Shown):
    """The result of ``planner.search``.

    ``tried`` = ``evaluated`` + layouts excluded by bounds. ``gap``: the share of the best possible score by which that
    of the best layout may exceed it, where the search ended at its work limit; 0: no layout is better; None: that is
    unknown, or no layout fits. ``ranked``: no other layout is better than those of ``best``; False: only the first is
    proven, because a ranking would take long. ``undecided``: the search ended there without a layout, though one may
    fit. ``stopped``: interrupted by Ctrl-C, so that others may be better.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_search"
    charted_by: ClassVar[str] = "fivefold.rendering.point_charts:draw_front_file"

    by: Aim  # what is minimized
    proposal: Proposal | None = None  # the proposal of a search by time or cost, if it makes one
    robust: Robustness | None = None  # the answer of a search with `--by robust`
    remarks: tuple[str, ...] = ()  # what is valid but perhaps not intended, one line each
    own: Ranked | None = None  # the layout of the config that was read, whether it fits or not
    best: tuple[Ranked, ...]  # the best layouts, the first one first
    front: tuple[Point, ...]  # layouts that no other beats in both memory and time
    reasons: tuple[Reason, ...]  # why the other layouts lost
    risk: float = FITS_RISK  # probability of running out of memory up to which layouts were proposed
    tight: TightLayout | None = None  # above that risk, if it is better than all that were proposed
    misses: tuple[NearMiss, ...] = ()  # filled if no layout fits
    binding_constraint: str = ""  # filled if no layout fits: the constraint to relax, and a layout that then fits
    tried: NonNegativeInt  # layouts that were evaluated or excluded by bounds
    evaluated: NonNegativeInt  # layouts whose time was estimated
    gap: NonNegativeFloat | None = (
        0.0  # share by which the best layout may exceed the best possible; 0: it is the best; None: unknown
    )
    ranked: bool = True  # whether the order of ``best`` is proven; False: only its first layout is
    undecided: bool = False  # whether it ended at its limit of work without a layout, though one may fit
    seconds: NonNegativeFloat  # duration of the search
    finalists: tuple[Finalist, ...] = ()  # for ``search --measure``, fastest first
    stopped: bool = False  # whether Ctrl-C ended it

    @property
    def chosen(self) -> Ranked | None:
        """Return the proposal, or else the best layout; None if no layout fits."""
        return self.proposal.choice if self.proposal else self.best[0] if self.best else None

    @property
    def reasons_title(self) -> str:
        """Return the heading of the reasons."""
        return "Why the other layouts lost" if self.best else "Why no layout fits"

    def line(self) -> str:
        """Return the proposal, or the best layout, and the number of layouts tried."""
        best = self.chosen
        outcome = f"{best.step.layout}, {show_seconds(best.step.time.step_seconds)}" if best else self.describe_unfit()
        return f"of {self.tried:,} layouts: {outcome}{f', {self.gap_line()}' if self.gap_line() else ''}"

    def describe_work(self) -> str:
        """Return how many layouts were evaluated or excluded, in what time, and that none fits if that is so."""
        excluded = ", the others excluded by bounds" if self.tried > self.evaluated else ""
        unfit = "" if self.best else f"; {self.describe_unfit()}"
        return f"{self.tried:,} layouts in {show_seconds(self.seconds)}: {self.evaluated:,} evaluated{excluded}{unfit}"

    def describe_unfit(self, subject: str = "none") -> str:
        """Return in words that ``subject`` fits, or, at the work limit, that it was not found; empty if one fits."""
        if self.best:
            return ""
        return f"{subject} was found to fit within the work limit" if self.undecided else f"{subject} fits"

    def describe_tight(self) -> str:
        """Return what a higher risk of running out of memory allows: the best such layout, and the one of least risk.

        Empty if nothing is gained.
        """
        if self.tight is None:
            return ""
        least = min((miss for miss in self.misses if miss.risk is not None), key=attrgetter("risk"), default=None)
        if self.best or least is None or least.risk is None or least.risk >= self.tight.risk:
            return self.tight.line()
        return (
            f"no layout has a risk of at most {show_risk(self.risk)}: --risk {show_risk_option(least.risk)} accepts "
            f"{least.layout}, --risk {self.tight.option} also {self.tight.layout}, the fastest of these"
        )

    def describe_gain(self) -> str:
        """Return what the proposal, or the best layout, gains over the config's own; empty without one of the two."""
        best = self.chosen
        if self.own is None or best is None:
            return ""
        before, after = self.own.step, best.step
        risk = before.memory.risk
        state = "" if risk is None or risk <= self.risk else f", {show_risk(risk)} risk of running out"
        yours = (
            f"yours: {before.layout}, step time {show_seconds(before.time.step_seconds)}, "
            f"peak memory {show_bytes(before.memory.peak_bytes)}{state}"
        )
        if (before.layout, self.own.reduce, self.own.precision) == (after.layout, best.reduce, best.precision):
            return f"{yours}: it is the proposal"
        longer = after.time.step_seconds / before.time.step_seconds - 1
        saved = before.memory.peak_bytes - after.memory.peak_bytes
        time = f"{abs(longer):.1%} {'more' if longer > 0 else 'less'} time"
        return (
            f"{yours}; the proposal takes {time} and {show_bytes(abs(saved))} {'less' if saved >= 0 else 'more'} memory"
        )

    @property
    def superlative(self) -> str:
        """Return what the best layout is: the cheapest in a search by cost, otherwise the fastest."""
        return "cheapest" if self.by == "cost" else "fastest"

    @property
    def title(self) -> str:
        """Return what the best layouts are, as a heading."""
        return f"The {self.superlative} {'' if self.ranked else 'evaluated '}layouts"

    def gap_line(self) -> str:
        """Return how near the best is to the best possible, in words; empty if no layout is better, or none fits."""
        if not self.best or self.gap == 0:
            return ""
        if self.gap is None or self.gap > MAX_MEANT_GAP:
            return "not proven to be near the best possible within the work limit; --exact searches without one"
        return f"within {ceil(self.gap * 1000) / 10:.1f} % of the best possible; --exact searches without a work limit"

    def gap_remark(self) -> str:
        """Return ``gap_line`` as a sentence for answers that use the best layout; empty if that is."""
        if not self.best or self.gap == 0:
            return ""
        limit = f"the search ended at its work limit: its {self.superlative} layout is"
        if self.gap is None or self.gap > MAX_MEANT_GAP:
            return f"{limit} not proven to be near the best possible"
        return f"{limit} within {ceil(self.gap * 1000) / 10:.1f} % of the best possible"

    def table(self) -> list[dict[str, Any]]:
        """Return one row per layout of the ranking."""
        return [flatten(ranked.model_dump(mode="json")) for ranked in self.best]


class QuestionAnswer(Record):
    """The answer to one question as a number; ``layout``: the layout for which it holds."""

    question: str
    line: str
    value: float
    layout: str | None = None
    memory_bytes: NonNegativeInt | None = None
    step_seconds: NonNegativeFloat | None = None
    remarks: tuple[str, ...] = ()  # what is valid but perhaps not intended, one line each


class Change(Record):
    """One change of a job or layout, or two together, and the effect on memory and step time."""

    change: str
    layout: str
    fits: bool
    memory_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat
    faster: float  # speedup: old over new step time
    speed: SpeedRatio | None = None  # the speedup with its uncertainty; None on CPUs
    saved_bytes: int
    remarks: tuple[str, ...] = ()  # what is valid but perhaps not intended, one line each
    risk: float | None = None  # probability of running out of memory
    together: tuple[str, ...] = ()  # the two changes of a pair, neither of which helps alone

    @property
    def answer(self) -> str:
        """Tell whether it fits: yes, tight or no."""
        tight = self.risk is not None and judge(self.risk) == "tight"
        return "yes" if self.fits else "tight" if tight else "no"


class FineTune(Record):
    """A way to fine-tune a model on a machine: what fits, and how fast it is."""

    method: str  # full, or an adapter such as qlora:16
    layout: str  # with the largest micro-batch that fits
    longest_sequence: NonNegativeInt  # tokens with micro-batches of one sequence; 0: none fits
    micro_batch: NonNegativeInt  # most sequences at a time at the job's length; 0: none fits
    memory_bytes: NonNegativeInt  # at the peak, with that micro-batch, or with one sequence if none fits
    driver_bytes: NonNegativeInt | None = None  # the same as nvidia-smi shows it, with the CUDA context; None on CPUs
    tokens_per_second: NonNegativeFloat  # of all ranks
    remarks: tuple[str, ...] = ()  # what is valid but perhaps not intended, one line each
    risk: float | None = None  # probability of running out of memory, with that micro-batch


class Walk(Shown):
    """One change at a time from a layout.

    ``changes``: all single changes, best first; ``path``: the best change, then the best change of the result, and so
    on
    while it gains; each compared with the layout before it.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_single_changes"

    start: Change
    changes: tuple[Change, ...]
    path: tuple[Change, ...]

    def line(self) -> str:
        """Return the starting layout and the best change, as one line."""
        best = self.changes[0] if self.changes else None
        gain = f"; best: {best.change}, {best.faster - 1:+.1%}" if best else ""
        return f"from {self.start.layout}{gain}"

    def table(self) -> list[dict[str, Any]]:
        """Return one row per change."""
        return [flatten(change.model_dump(mode="json")) for change in self.changes]


class LengthPoint(Record):
    """A step with sequences of ``tokens`` tokens, and the job's global batch."""

    tokens: PositiveInt
    fits: bool
    peak_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat
    mfu: NonNegativeFloat


class LengthCurve(Record):
    """A layout with other recomputation and cp, over the sequence length; ``longest``: the longest that fits, or 0."""

    cp: PositiveInt
    ac: str
    layout: str
    longest: NonNegativeInt
    points: tuple[LengthPoint, ...]


class Lengths(Record):
    """The result of ``ask sequence``: the longest of any layout and of one, its curves, and how to reach ``target``.

    ``offloaded``: the longest with optimizer states and activations in host memory.
    """

    model: str
    machine: str
    longest: QuestionAnswer
    offloaded: QuestionAnswer | None = None  # None if it is no longer than ``longest``
    answer: QuestionAnswer
    curves: tuple[LengthCurve, ...]
    target: PositiveInt
    changes: tuple[str, ...]  # what must change to reach it, a line each
    remarks: tuple[str, ...] = ()  # what is valid but perhaps not intended, one line each


class Batch(Record):
    """A global batch size in the range of recent runs, with its micro-batches under a layout."""

    global_batch: PositiveInt
    layout: str
    tokens: PositiveInt
    micro_batches: PositiveInt  # per pipeline and step (gradient accumulation)
    steps: PositiveInt  # for the full token budget
    references: tuple[str, ...] = ()  # scaling laws, teams and measurements whose batch is nearest to this one
    step_seconds: NonNegativeFloat | None = None  # of the layout, if it is the fastest for this batch
    recommended: bool = False  # nearest to what the scaling laws, or a measured noise scale, advise
    remarks: tuple[str, ...] = ()  # what is valid but perhaps not intended, one line each
