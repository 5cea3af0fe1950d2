"""Where the time of a traced step went: every second of a rank belongs to compute, bubble, exposed messages, optimizer,
data or host.

    wait of a message = bubble, until the last rank has posted its part + exposed, from then on

The split is that of the rank that waits least, the mean of the traced steps, in the seconds of the median step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from fivefold.results.spans import ACTIONS, Message, RankStep, RankTrace, Span
from fivefold.step import Time

WAYS = {"weight": "backward"}  # the planner's backward is dx and dW
Key = tuple[object, ...]


class Item(NamedTuple):
    """Seconds of one kind of work within one kind of action ("": outside all)."""

    action: str
    category: str  # compute, optimizer, data, host
    name: str  # as in ``Time.parts``
    seconds: float
    number: int


class StepSummary(NamedTuple):
    """What ``split`` needs of one step of a rank: its work added up, and every message."""

    begin: float
    seconds: float
    items: tuple[Item, ...]
    messages: tuple[Message, ...]
    places: tuple[str, ...]  # operation and action in which each message was waited for


class RankSummary(NamedTuple):
    """The steps of one rank."""

    rank: int
    stage: int
    steps: tuple[StepSummary, ...]


class Exchange(NamedTuple):
    """A message of one rank beside those of the others, in seconds."""

    rank: int
    message: Message
    place: str
    idle: float  # of the wait, until the last rank has posted
    exposed: float  # posting it, and the rest of the wait
    travel: float  # from the last post to its end
    late: int  # rank that posted last


class RankTime(NamedTuple):
    """Mean seconds per step of one rank."""

    rank: int
    stage: int
    step: float
    items: tuple[Item, ...]
    exchanges: tuple[Exchange, ...]  # of all steps
    steps: int

    def of(self, category: str) -> float:
        """Seconds of one category of ``items``."""
        return sum(item.seconds for item in self.items if item.category == category)

    @property
    def bubble(self) -> float:
        """Seconds of waits for another rank to post."""
        return sum(each.idle for each in self.exchanges) / self.steps

    def messages(self, seconds: str, *, whole: bool = False) -> dict[str, float]:
        """``exposed`` or ``travel`` seconds by axis, or (``whole``) by axis and collective."""
        found: dict[str, float] = defaultdict(float)
        for each in self.exchanges:
            found[each.message.name if whole else each.message.axis] += getattr(each, seconds) / self.steps
        return dict(found)


def summary(trace: RankTrace) -> RankSummary:
    """Add up what a rank did."""
    return RankSummary(trace.rank, trace.stage, tuple(_step(step) for step in trace.steps))


def _step(step: RankStep) -> StepSummary:
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for span in step.spans:
        if span.kind in ("post", "wait"):
            continue
        action = next((each.kind for each in enclosing(step.spans, span) if each.kind in ACTIONS), "")
        found = sums[action, *_category(span, action)]
        found[0] += span.own
        found[1] += 1
    items = tuple(Item(*key, seconds, int(count)) for key, (seconds, count) in sums.items())
    places = tuple(_place(step.spans, message) for message in step.messages)
    return StepSummary(step.begin, step.seconds, items, step.messages, places)


def enclosing(spans: Sequence[Span], span: Span) -> Iterator[Span]:
    """``span`` and those around it, inside out."""
    while True:
        yield span
        if span.within < 0:
            return
        span = spans[span.within]


def _category(span: Span, action: str) -> tuple[str, str]:
    """Category of a span's own seconds, and their name among the parts."""
    if span.kind == "op":
        return "compute", f"{span.name} {WAYS.get(span.way, span.way)}".strip()
    if span.kind in ("update", "data"):
        return {"update": "optimizer"}.get(span.kind, span.kind), {"update": "optimizer"}.get(span.kind, "data")
    return "host", f"host in {action}" if action else "host between actions"


def _place(spans: Sequence[Span], message: Message) -> str:
    around = list(enclosing(spans, spans[message.span]))[1:]
    inner = next((f"{each.name} {each.way}".strip() for each in around if each.kind in ("op", "call")), "")
    action = next((each.name for each in around if each.kind in ACTIONS), "")
    return " in ".join(filter(None, (inner, action)))


def rank_times(summaries: Sequence[RankSummary]) -> list[RankTime]:
    """Every rank's seconds, its messages beside those of the other ranks."""
    count = min(len(each.steps) for each in summaries)
    found: dict[int, list[Exchange]] = {each.rank: [] for each in summaries}
    for index in range(count):
        steps = {each.rank: each.steps[index] for each in summaries}
        for rank, exchange in _exchanges(steps):
            found[rank].append(exchange)
    return [
        RankTime(
            each.rank, each.stage, sum(step.seconds for step in each.steps[:count]) / count,
            tuple(_mean(step.items for step in each.steps[:count])), tuple(found[each.rank]), count,
        )
        for each in summaries
    ]  # fmt: skip


def _mean(steps: Iterable[Sequence[Item]]) -> Iterator[Item]:
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    number = 0
    for items in steps:
        number += 1
        for item in items:
            found = sums[item[:3]]
            found[0] += item.seconds
            found[1] += item.number
    for key, (seconds, count) in sums.items():
        yield Item(*key, seconds / number, round(count / number))


def _exchanges(steps: Mapping[int, StepSummary]) -> Iterator[tuple[int, Exchange]]:
    """Match the messages of one step over the ranks; ranks that are not here are taken to have posted in time."""
    posted: dict[Key, list[tuple[float, int]]] = defaultdict(list)  # by message: when each rank has posted
    ended: dict[Key, list[float]] = defaultdict(list)
    for rank, step in steps.items():
        for message, keys in zip(step.messages, _keys(step.messages, rank), strict=True):
            for key, posts in keys:
                ended[key].append(step.begin + (message.waits if message.early else message.done))
                if posts:
                    posted[key].append((step.begin + message.posted, rank))
    for rank, step in steps.items():
        for message, place, keys in zip(step.messages, step.places, _keys(step.messages, rank), strict=True):
            own = step.begin + message.posted
            last, late = max([moment for key, _ in keys for moment in posted[key]], default=(own, rank))
            end = min(moment for key, _ in keys for moment in ended[key])
            wait = message.done - message.waits
            idle = min(wait, max(0.0, last - step.begin - message.waits))
            exposed = message.posted - message.begun + wait - idle
            yield rank, Exchange(rank, message, place, idle, exposed, max(0.0, end - max(last, own)), late)


def _keys(messages: Sequence[Message], rank: int) -> list[tuple[tuple[Key, bool], ...]]:
    """The names of each message that all its ranks agree on, and whether this rank's post is what others wait for."""
    numbers: dict[Key, int] = defaultdict(int)
    found = []
    for message in messages:
        pairs: list[tuple[Key, bool]] = [((message.group, rank, peer), True) for peer in message.to]
        pairs += [((message.group, peer, rank), False) for peer in message.source]
        keys: list[tuple[Key, bool]] = []
        for name, posts in pairs or [((message.group, message.ranks), True)]:
            keys.append(((*name, numbers[name]), posts))
            numbers[name] += 1
        found.append(tuple(keys))
    return found


def split(times: Sequence[RankTime], *, step_seconds: float) -> Time:
    """The time of the rank that waits least."""
    one = min(times, key=lambda each: each.bubble)
    scale = step_seconds / one.step if one.step else 1.0
    parts: dict[str, float] = defaultdict(float)
    for item in one.items:
        parts[item.name] += item.seconds
    exposed, travel = one.messages("exposed"), hidden(times, one)
    parts |= one.messages("exposed", whole=True) | {"bubble": one.bubble}
    shares = {name: seconds * scale for name, seconds in parts.items() if seconds > 0}
    whole = {name: one.of(name) * scale for name in ("compute", "optimizer", "data", "host")}
    bubble, shown = one.bubble * scale, {axis: seconds * scale for axis, seconds in exposed.items()}
    sizes = {f"{axis} messages": seconds for axis, seconds in shown.items()} | whole | {"bubble": bubble}
    return Time(
        step_seconds=step_seconds, compute_seconds=whole["compute"], bubble_seconds=bubble, exposed_seconds=shown,
        hidden_seconds={axis: seconds * scale for axis, seconds in travel.items()},
        optimizer_seconds=whole["optimizer"], data_seconds=whole["data"], host_seconds=whole["host"], parts=shares,
        bound_by=max(sizes, key=lambda name: sizes[name]),
    )  # fmt: skip


def hidden(times: Sequence[RankTime], one: RankTime) -> dict[str, float]:
    """Seconds by axis that messages of rank ``one`` travelled beside its work. One that had ended before all its ranks
    waited travelled at most as long as is usual for its size.
    """
    usual: dict[Key, list[float]] = defaultdict(list)
    for each in (each for rank in times for each in rank.exchanges if not each.message.early):
        usual[_size(each.message)].append(each.travel)
    found: dict[str, float] = defaultdict(float)
    for each in one.exchanges:
        known = usual[_size(each.message)]
        travel = min(each.travel, median(known)) if each.message.early and known else each.travel
        found[each.message.axis] += max(0.0, travel - each.exposed) / one.steps
    return {axis: seconds for axis, seconds in found.items() if seconds > 0}


def _size(message: Message) -> Key:
    return message.group, message.ranks, message.collective, message.bytes
