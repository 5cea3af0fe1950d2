"""Score predictions: their error against measurements, and whether they rank alternatives as measured.

error   predicted / measured − 1
tau     Kendall's: concordant minus discordant pairs, divided by the pairs that the measurement can order
        (``RESOLUTION``); mean over groups of alternatives
regret  measured time of the predicted best layout / best measured time − 1; mean over groups of alternatives
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from statistics import fmean, median
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from pydantic import PositiveFloat

from benchmarks.published.case import Case, Counter, Message
from benchmarks.published.table import Summary
from fivefold.layout.mesh import RankGroup
from fivefold.planner.time.errors import Quantity as LearnedQuantity
from fivefold.planner.time.errors import RunClass, run_class
from fivefold.planner.time.network import Network
from fivefold.record import Record
from fivefold.units import show_bytes

# composed: of a step that was never run, but put together of kernels timed alone (``Case.composed``)
Quantity = Literal["time", "composed", "peak", "reserved", "states", "activations", "adapters", "message"]
STEPS = ("time", "composed")
PEAKS = ("peak", "reserved")
FEWEST_RIVALS = 3
# How far apart repeats of one run lie: the median over the eleven sources that have any, each by its own median.
RESOLUTION = 0.01


class Score(Record):
    """One quantity of one case: seconds for ``time``, else bytes."""

    source: str
    row: str
    model: str = ""
    chip: str = ""
    ranks: int = 0
    generation: str = ""  # this and the next five: of RunClass
    nodes: str = ""
    kind: str = ""
    precision: str = ""
    software: str = ""
    recomputed: str = ""
    layout: str
    rivals: str = ""
    quantity: Quantity
    counter: Counter | None = None  # what counted the bytes of a peak
    predicted: PositiveFloat
    measured: PositiveFloat
    left_out: PositiveFloat | None = None  # predicted by constants that were set without this source
    held_out: bool = False  # of the half of a source that no fit may see

    @property
    def predicted_without_source(self) -> float:
        """Return the prediction by constants fitted without the source.

        If no constant was fitted to it, that is the prediction itself.
        """
        return self.left_out or self.predicted

    @property
    def run_class(self) -> RunClass:
        """Return the class of the run."""
        return RunClass(*(getattr(self, field) for field in RunClass._fields))

    @property
    def learned_quantity(self) -> LearnedQuantity | None:
        """Return the quantity of whose interval the score tells; None of those that no interval is printed of."""
        if not self.software:
            return None
        return "time" if self.quantity == "time" else self.counter

    @property
    def error(self) -> float:
        """Return the signed error relative to the measurement."""
        return self.predicted / self.measured - 1


class PredictedFigures(NamedTuple):
    """The figures of a prediction that are scored; states and activations are those of the first pipeline rank."""

    step_seconds: float
    peak_bytes: int
    states_bytes: int
    activations_bytes: int
    reserved_bytes: int | None  # the allocator's and the driver's; None on a CPU
    driver_bytes: int | None


class Coverage(NamedTuple):
    """Share of a source's runs inside the intervals of half and of nine tenths of all, learned without it."""

    source: str
    quantity: LearnedQuantity
    runs: int
    half: float
    most: float


class Ranking(NamedTuple):
    """The predicted and the measured order of a group of alternatives."""

    tau: float
    regret: float


def score(
    case: Case, figures: PredictedFigures, left_out: Mapping[str, float] = MappingProxyType({})
) -> Iterator[Score]:
    """Yield the quantities that the case measured, with the predicted ``figures`` and those ``left_out``."""
    pairs: list[tuple[Quantity, float, float | None, float | None]] = [
        ("composed" if case.composed else "time", figures.step_seconds, case.step_seconds, left_out.get("time")),
        (case.quantity, _memory(case, figures), case.memory_bytes, left_out.get(case.quantity)),
    ]
    of = run_class(model=case.model, machine=case.machine, layout=case.layout, job=case.job)
    for quantity, predicted, measured, without in pairs:
        if measured is not None:
            yield Score(
                source=case.source,
                row=case.row,
                model=case.model.name,
                chip=case.machine.chip.name,
                ranks=case.layout.world,
                layout=str(case.layout),
                rivals=case.rivals,
                quantity=quantity,
                counter=case.memory if quantity in PEAKS else None,
                predicted=predicted,
                measured=measured,
                held_out=case.held_out,
                left_out=without,
                **of._asdict(),
            )


def score_message(message: Message) -> Score:
    """Return the seconds of a collective that all ranks of a machine take part in."""
    machine = message.machine
    seconds = Network(machine).seconds(message.collective, message.payload, RankGroup(machine.ranks, 1))
    return Score(
        source=message.source,
        row=message.row,
        layout=f"{message.collective} {show_bytes(message.payload)} x{machine.ranks}",
        quantity="message",
        predicted=seconds,
        measured=message.seconds,
        held_out=message.held_out,
        chip=machine.chip.name,
        ranks=machine.ranks,
    )


def _memory(case: Case, figures: PredictedFigures) -> float:
    """Return the predicted bytes of the quantity that a case measured."""
    if case.quantity == "states":
        return figures.states_bytes
    if case.quantity == "activations":
        return figures.activations_bytes
    if case.memory == "allocated":
        return figures.peak_bytes
    counted = figures.driver_bytes if case.memory == "driver" else figures.reserved_bytes
    return counted if counted is not None else figures.peak_bytes


def summarise(scores: Iterable[Score], covered: Iterable[Coverage] = (), *, by: str = "source") -> tuple[Summary, ...]:
    """Return one summary per source (or other field of a score), quantity and half (``Case.held_out``).

    ``covered``: coverage of each source by intervals learned on all other sources.
    """
    known: dict[tuple[str, LearnedQuantity | None], Coverage] = {(cell.source, cell.quantity): cell for cell in covered}
    grouped = [score for score in scores if getattr(score, by)]
    groups = group_by(grouped, by=lambda score: (getattr(score, by), score.quantity))
    if by != "source":
        groups.sort(key=lambda group: (group[0].quantity, getattr(group[0], by)))
    return tuple(
        _summary(half, name=str(getattr(half[0], by)), covered=known.get((half[0].source, half[0].learned_quantity)))
        for group in groups
        for half in group_by(sorted(group, key=lambda score: score.held_out), by=lambda score: score.held_out)
    )


def _summary(scores: Sequence[Score], *, name: str, covered: Coverage | None) -> Summary:
    """Return bias, median and worst error of scores, and how well they rank layouts."""
    errors = [score.error for score in scores]
    sizes = [abs(error) for error in errors]
    first = scores[0]
    left_out = [abs(score.left_out / score.measured - 1) for score in scores if score.left_out]
    rankings = rank(scores) if first.quantity in STEPS else []
    return Summary(
        source=name,
        quantity=f"{first.quantity}, held out" if first.held_out else first.quantity,
        cases=len(scores),
        bias=fmean(errors),
        median=median(sizes),
        mean=fmean(sizes),
        worst=max(errors, key=abs),
        left_out=fmean(left_out) if left_out else None,
        half=covered.half if covered else None,
        most=covered.most if covered else None,
        groups=len(rankings),
        tau=fmean(ranking.tau for ranking in rankings) if rankings else None,
        regret=fmean(ranking.regret for ranking in rankings) if rankings else None,
    )


def rank(scores: Iterable[Score]) -> list[Ranking]:
    """Rank each group of three or more alternatives by time."""
    timed = [score for score in scores if score.rivals and score.quantity in STEPS]
    groups = [group for group in group_by(timed, by=lambda score: score.rivals) if len(group) >= FEWEST_RIVALS]
    return [
        Ranking(
            kendall(
                [score.predicted for score in group],
                [score.measured for score in group],
                min_difference=0.0 if group[0].quantity == "composed" else RESOLUTION,  # a sum has no noise
            ),
            min(group, key=lambda score: score.predicted).measured / min(score.measured for score in group) - 1,
        )
        for group in groups
    ]


def kendall(predicted: Sequence[float], measured: Sequence[float], *, min_difference: float = 0.0) -> float:
    """Return Kendall's tau-a over the pairs whose measured values differ by more than ``min_difference``.

    1 without such pairs.
    """
    signs = [
        _sign(predicted[i] - predicted[j]) * _sign(measured[i] - measured[j])
        for i, j in combinations(range(len(measured)), 2)
        if abs(measured[i] - measured[j]) > min_difference * min(measured[i], measured[j])
    ]
    return fmean(signs) if signs else 1.0


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


T = TypeVar("T")


def group_by(items: Iterable[T], *, by: Callable[[T], object]) -> list[list[T]]:
    """Return items that agree in ``by``, together, in the order in which they first come."""
    groups: defaultdict[object, list[T]] = defaultdict(list)
    for item in items:
        groups[by(item)].append(item)
    return list(groups.values())
