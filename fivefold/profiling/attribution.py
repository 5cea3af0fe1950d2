"""Attribute every second of a traced step to compute, bubble, exposed messages, optimizer, data or host.

    wait of a message = bubble, until the last rank has posted its part + exposed, from then on

The breakdown is that of the rank that waits least, as the mean of the traced steps, scaled to the seconds of the median
step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from fivefold.layout.schedule.action import PASSES
from fivefold.results.spans import ACTIONS, RankStep, RankTrace, Span, TracedMessage, iterate_enclosing
from fivefold.step import Time

WAYS = {"weight": "backward"}  # the planner's backward includes dgrad and wgrad
Key = tuple[object, ...]


class Item(NamedTuple):
    """The seconds of one kind of work within one kind of action ("": outside of all actions)."""

    action: str
    category: str  # compute, optimizer, data, host
    name: str  # as in ``Time.parts``
    seconds: float
    number: int


class StepSummary(NamedTuple):
    """A step of one rank as ``split`` needs it: its work added up, and every message."""

    begin: float
    seconds: float
    items: tuple[Item, ...]
    messages: tuple[TracedMessage, ...]
    places: tuple[str, ...]  # operation and action in which each message was waited for


class RankAttribution(NamedTuple):
    """The summarized steps of one rank."""

    rank: int
    stage: int
    steps: tuple[StepSummary, ...]


class MatchedMessage(NamedTuple):
    """A message of one rank matched with those of the other ranks, in seconds."""

    rank: int
    message: TracedMessage
    place: str
    idle: float  # the part of the wait until the last rank has posted
    exposed: float  # seconds to post it, and the rest of the wait
    transfer_seconds: float  # from the last post to the end of the message
    late: int  # the rank that posted last


class RankBreakdown(NamedTuple):
    """The mean seconds per step of one rank."""

    rank: int
    stage: int
    step: float
    items: tuple[Item, ...]
    exchanges: tuple[MatchedMessage, ...]  # of all steps
    steps: int

    def get_seconds(self, category: str) -> float:
        """Return the seconds of one category of ``items``."""
        return sum(item.seconds for item in self.items if item.category == category)

    @property
    def bubble(self) -> float:
        """Return the seconds of waits for another rank to post."""
        return sum(exchange.idle for exchange in self.exchanges) / self.steps

    def messages(self, seconds: str, *, by_collective: bool = False) -> dict[str, float]:
        """Return ``exposed`` or ``transfer_seconds`` by axis, or (``by_collective``) by axis and collective."""
        seconds_by_name: dict[str, float] = defaultdict(float)
        for exchange in self.exchanges:
            seconds_by_name[exchange.message.name if by_collective else exchange.message.axis] += (
                getattr(exchange, seconds) / self.steps
            )
        return dict(seconds_by_name)


def summarize_rank(trace: RankTrace) -> RankAttribution:
    """Add up the work of a rank, step by step."""
    return RankAttribution(trace.rank, trace.stage, tuple(_step(step) for step in trace.steps))


def _step(step: RankStep) -> StepSummary:
    """Sum the seconds of a step by action of the schedule and kind of work."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for span in step.spans:
        if span.kind in ("post", "wait"):
            continue
        action = next((outer.kind for outer in iterate_enclosing(step.spans, span) if outer.kind in ACTIONS), "")
        seconds_and_count = sums[action, *_classify_span(span, action)]
        seconds_and_count[0] += span.own
        seconds_and_count[1] += 1
    items = tuple(Item(*key, seconds, int(count)) for key, (seconds, count) in sums.items())
    places = tuple(_place(step.spans, message) for message in step.messages)
    return StepSummary(step.begin, step.seconds, items, step.messages, places)


def _classify_span(span: Span, action: str) -> tuple[str, str]:
    """Return the category of a span's own seconds, and their name among the parts of the step."""
    if span.kind == "op":
        return "compute", f"{span.name} {WAYS.get(span.way, span.way)}".strip()
    if span.kind in ("update", "data"):
        return {"update": "optimizer"}.get(span.kind, span.kind), {"update": "optimizer"}.get(span.kind, "data")
    return "host", f"host in {PASSES.get(action, action)}" if action else "host between actions"


def _place(spans: Sequence[Span], message: TracedMessage) -> str:
    outer_spans = list(iterate_enclosing(spans, spans[message.span]))[1:]
    inner = next((f"{outer.name} {outer.way}".strip() for outer in outer_spans if outer.kind in ("op", "call")), "")
    action = next((outer.name for outer in outer_spans if outer.kind in ACTIONS), "")
    return " in ".join(filter(None, (inner, action)))


def rank_times(summaries: Sequence[RankAttribution]) -> list[RankBreakdown]:
    """Return the seconds of every rank, with its messages matched with those of the other ranks."""
    count = min(len(rank_summary.steps) for rank_summary in summaries)
    exchanges_by_rank: dict[int, list[MatchedMessage]] = {rank_summary.rank: [] for rank_summary in summaries}
    for index in range(count):
        steps = {rank_summary.rank: rank_summary.steps[index] for rank_summary in summaries}
        for rank, exchange in _match_messages(steps):
            exchanges_by_rank[rank].append(exchange)
    return [
        RankBreakdown(
            rank_summary.rank,
            rank_summary.stage,
            sum(step.seconds for step in rank_summary.steps[:count]) / count,
            tuple(_average_steps(step.items for step in rank_summary.steps[:count])),
            tuple(exchanges_by_rank[rank_summary.rank]),
            count,
        )
        for rank_summary in summaries
    ]


def _average_steps(steps: Iterable[Sequence[Item]]) -> Iterator[Item]:
    """Yield each item with its seconds and number averaged over ``steps``."""
    sums: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    number = 0
    for items in steps:
        number += 1
        for item in items:
            seconds_and_count = sums[item[:3]]
            seconds_and_count[0] += item.seconds
            seconds_and_count[1] += item.number
    for key, (seconds, count) in sums.items():
        yield Item(*key, seconds / number, round(count / number))


def _match_messages(steps: Mapping[int, StepSummary]) -> Iterator[tuple[int, MatchedMessage]]:
    """Match the messages of one step over the ranks; ranks without a trace are assumed to have posted in time."""
    posted: dict[Key, list[tuple[float, int]]] = defaultdict(list)  # by message: when each rank has posted
    ended: dict[Key, list[float]] = defaultdict(list)
    for rank, step in steps.items():
        for message, keys in zip(step.messages, _list_keys(step.messages, rank), strict=True):
            for key, posts in keys:
                ended[key].append(step.begin + (message.waits if message.early else message.done))
                if posts:
                    posted[key].append((step.begin + message.posted, rank))
    for rank, step in steps.items():
        for message, where, keys in zip(step.messages, step.places, _list_keys(step.messages, rank), strict=True):
            own_post = step.begin + message.posted
            last, late_rank = max([moment for key, _ in keys for moment in posted[key]], default=(own_post, rank))
            end = min(moment for key, _ in keys for moment in ended[key])
            wait = message.done - message.waits
            idle = min(wait, max(0.0, last - step.begin - message.waits))
            exposed = message.posted - message.begun + wait - idle
            yield (
                rank,
                MatchedMessage(rank, message, where, idle, exposed, max(0.0, end - max(last, own_post)), late_rank),
            )


def _list_keys(messages: Sequence[TracedMessage], rank: int) -> list[tuple[tuple[Key, bool], ...]]:
    """Return for each message the keys that all its ranks agree on, and whether others wait for this rank's post."""
    numbers: dict[Key, int] = defaultdict(int)
    keys_of_messages = []
    for message in messages:
        pairs: list[tuple[Key, bool]] = [((message.group, rank, peer), True) for peer in message.to]
        pairs += [((message.group, peer, rank), False) for peer in message.source]
        keys: list[tuple[Key, bool]] = []
        for name, posts in pairs or [((message.group, message.ranks), True)]:
            keys.append(((*name, numbers[name]), posts))
            numbers[name] += 1
        keys_of_messages.append(tuple(keys))
    return keys_of_messages


def split(times: Sequence[RankBreakdown], *, step_seconds: float) -> Time:
    """Return the time breakdown of the rank that waits least, scaled to ``step_seconds``."""
    chosen = min(times, key=lambda rank_time: rank_time.bubble)
    scale = step_seconds / chosen.step if chosen.step else 1.0
    parts: dict[str, float] = defaultdict(float)
    for item in chosen.items:
        parts[item.name] += item.seconds
    exposed = chosen.messages("exposed")
    transfer = measure_overlap(times, chosen)
    parts |= chosen.messages("exposed", by_collective=True) | {"bubble": chosen.bubble}
    shares = {name: seconds * scale for name, seconds in parts.items() if seconds > 0}
    by_category = {name: chosen.get_seconds(name) * scale for name in ("compute", "optimizer", "data", "host")}
    bubble = chosen.bubble * scale
    exposed_by_axis = {axis: seconds * scale for axis, seconds in exposed.items()}
    sizes = (
        {f"{axis} communication": seconds for axis, seconds in exposed_by_axis.items()}
        | by_category
        | {"bubble": bubble}
    )
    return Time(
        step_seconds=step_seconds,
        compute_seconds=by_category["compute"],
        bubble_seconds=bubble,
        exposed_seconds=exposed_by_axis,
        overlapped_seconds={axis: seconds * scale for axis, seconds in transfer.items()},
        optimizer_seconds=by_category["optimizer"],
        data_seconds=by_category["data"],
        host_seconds=by_category["host"],
        parts=shares,
        longest_part=max(sizes, key=lambda name: sizes[name]),
    )


def measure_overlap(times: Sequence[RankBreakdown], one: RankBreakdown) -> dict[str, float]:
    """Return by axis the seconds in which messages of rank ``one`` travelled while it worked.

    The travel time of a message that had ended before all its ranks waited is at most the usual one for its size.
    """
    usual: dict[Key, list[float]] = defaultdict(list)
    for exchange in (exchange for rank in times for exchange in rank.exchanges if not exchange.message.early):
        usual[_get_size(exchange.message)].append(exchange.transfer_seconds)
    seconds_by_axis: dict[str, float] = defaultdict(float)
    for exchange in one.exchanges:
        usual_seconds = usual[_get_size(exchange.message)]
        transfer = (
            min(exchange.transfer_seconds, median(usual_seconds))
            if exchange.message.early and usual_seconds
            else exchange.transfer_seconds
        )
        seconds_by_axis[exchange.message.axis] += max(0.0, transfer - exchange.exposed) / one.steps
    return {axis: seconds for axis, seconds in seconds_by_axis.items() if seconds > 0}


def _get_size(message: TracedMessage) -> Key:
    return message.group, message.ranks, message.collective, message.bytes
