"""How far predictions lie from what was measured, and whether they rank rivals as the measurements do.

error   predicted / measured − 1
tau     Kendall's: pairs in the measured order less pairs against it, over all pairs; mean over groups of rivals
regret  measured time of the layout that we would pick, over the best measured, − 1; mean over groups of rivals
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Literal, NamedTuple, TypeVar

from pydantic import PositiveFloat

from fivefold.check.published.case import Case, Message
from fivefold.layout.mesh import Group
from fivefold.plan.price.errors import regime
from fivefold.plan.price.network import Network
from fivefold.record import Record
from fivefold.show.published import Summary
from fivefold.step import Step
from fivefold.units import show_bytes

Quantity = Literal["time", "peak", "states", "activations", "message"]
QUANTITIES: tuple[Quantity, ...] = ("time", "peak", "states", "activations", "message")
FEWEST_RIVALS = 3


class Score(Record):
    """One quantity of one case: seconds for ``time``, else bytes."""

    source: str
    row: str
    regime: str
    chip: str
    shape: str
    kind: str
    layout: str
    rivals: str = ""
    quantity: Quantity
    predicted: PositiveFloat
    measured: PositiveFloat
    held_out: bool = False  # of the half of a source that no fit may see

    @property
    def error(self) -> float:
        """Relative to the measured, signed."""
        return self.predicted / self.measured - 1


class Ranking(NamedTuple):
    """How rivals were ordered."""

    tau: float
    regret: float


def score(case: Case, step: Step) -> Iterator[Score]:
    """The quantities that the case measured, beside those of the predicted ``step``."""
    pairs: list[tuple[Quantity, float, float | None]] = [
        ("time", step.time.step_seconds, case.step_seconds),
        (case.quantity, _memory(case, step), case.memory_bytes),
    ]
    words = regime(model=case.model, machine=case.machine, layout=case.layout)
    for quantity, predicted, measured in pairs:
        if measured is not None:
            yield Score(
                source=case.source,
                row=case.row,
                regime=case.regime,
                layout=str(case.layout),
                rivals=case.rivals,
                quantity=quantity,
                predicted=predicted,
                measured=measured,
                held_out=case.held_out,
                **words._asdict(),
            )


def score_message(message: Message) -> Score:
    """The seconds of a collective that all ranks of a machine take part in."""
    machine = message.machine
    seconds = Network(machine).seconds(message.collective, message.payload, Group(machine.ranks, 1))
    return Score(
        source=message.source,
        row=message.row,
        regime=f"nccl {machine.chip.name}",
        layout=f"{message.collective} {show_bytes(message.payload)} x{machine.ranks}",
        quantity="message",
        predicted=seconds,
        measured=message.seconds,
        held_out=message.held_out,
        chip=machine.chip.name,
        shape="flat",
        kind="message",
    )


def _memory(case: Case, step: Step) -> float:
    first = step.memory.stages[0]
    if case.quantity == "states":
        return first.states_bytes
    if case.quantity == "activations":
        return first.activations_bytes
    if case.memory == "allocated":
        return step.memory.peak_bytes
    counted = step.memory.driver_bytes if case.memory == "driver" else step.memory.reserved_bytes
    return counted if counted is not None else step.memory.peak_bytes


def summarise(scores: Iterable[Score]) -> tuple[Summary, ...]:
    """One summary per source, quantity and half (``Case.held_out``), in the order in which they come."""
    return tuple(
        _summary(half)
        for group in grouped(scores, by=lambda score: (score.source, score.quantity))
        for half in grouped(sorted(group, key=lambda score: score.held_out), by=lambda score: score.held_out)
    )


def _summary(scores: Sequence[Score]) -> Summary:
    errors = [score.error for score in scores]
    sizes = [abs(error) for error in errors]
    first = scores[0]
    rankings = rank(scores) if first.quantity == "time" else []
    return Summary(
        source=first.source,
        quantity=f"{first.quantity}, held out" if first.held_out else first.quantity,
        cases=len(scores),
        bias=fmean(errors),
        median=median(sizes),
        mean=fmean(sizes),
        worst=max(errors, key=abs),
        groups=len(rankings),
        tau=fmean(ranking.tau for ranking in rankings) if rankings else None,
        regret=fmean(ranking.regret for ranking in rankings) if rankings else None,
    )


def rank(scores: Iterable[Score]) -> list[Ranking]:
    """How each group of three rivals or more is ordered, by time."""
    timed = [score for score in scores if score.rivals and score.quantity == "time"]
    groups = [group for group in grouped(timed, by=lambda score: score.rivals) if len(group) >= FEWEST_RIVALS]
    return [
        Ranking(
            kendall([score.predicted for score in group], [score.measured for score in group]),
            min(group, key=lambda score: score.predicted).measured / min(score.measured for score in group) - 1,
        )
        for group in groups
    ]


def kendall(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-a over the pairs that the measurement tells apart; 1 where it tells none apart."""
    signs = [
        _sign(predicted[i] - predicted[j]) * _sign(measured[i] - measured[j])
        for i, j in combinations(range(len(measured)), 2)
        if measured[i] != measured[j]
    ]
    return fmean(signs) if signs else 1.0


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


T = TypeVar("T")


def grouped(items: Iterable[T], *, by: Callable[[T], object]) -> list[list[T]]:
    """Items that agree in ``by``, together, in the order in which they first come."""
    groups: defaultdict[object, list[T]] = defaultdict(list)
    for item in items:
        groups[by(item)].append(item)
    return list(groups.values())
