"""The tapes of several ranks played together: what each computes, and messages that begin when all sides have come.

    compute   kernel kernel START ······ kernel WAIT kernel          host   launches ahead of it
    stream              (others, queue) ░░ message ░░                one per communicator, in the order of issue

The k-th collective of a communicator meets the k-th of its other ranks, the k-th send to a rank its k-th receive.
Members that are not among the tapes are twins of one that is, in lockstep. Without ``streams``, as on gloo, messages
of one communicator do not queue, and take the time of whoever waits for them.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fivefold.check.dryrun.record.tape import KERNEL, START, WAIT, Message, Tape


class Costs(NamedTuple):
    """Seconds of a tape's lists, by place in them."""

    kernels: Sequence[float]
    launches: Sequence[float]  # of the host, before a kernel can begin
    messages: Sequence[float]
    drag: Sequence[float]  # share of a message's hidden seconds that the compute beside it loses
    reads: Sequence[bool]  # whether the host waits too, because it reads what has come
    launch: float = 0.0  # of the host, per message
    blocking: bool = False  # the host waits for every kernel

    @classmethod
    def none(cls, tape: Tape) -> Costs:
        """Everything takes no time: only the order is left."""
        kernels, messages = [0.0] * len(tape.kernels), [0.0] * len(tape.messages)
        return cls(kernels, kernels, messages, messages, [False] * len(messages))


class Side:
    """One rank's part in a message; or in several that are issued as one (``batch_isend_irecv``)."""

    __slots__ = ("after", "at", "before", "end", "meetings", "missing", "open", "posted", "rank", "start", "waiter")

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at  # place among the tapes, and of the (first) event in its tape
        self.meetings: list[Meeting] = []
        self.before: Side | None = None  # on the same stream
        self.after: Side | None = None
        self.missing = 1  # to begin: to be issued, and the one before to end
        self.open = 0  # meetings that have not ended
        self.posted = -1.0
        self.start = self.end = 0.0
        self.waiter = False


class Meeting:
    """One message with all its sides among the tapes, in order of their first coming."""

    __slots__ = ("end", "key", "missing", "number", "parts", "seconds", "sides", "start")

    def __init__(self, key: Hashable, number: int, missing: int) -> None:
        self.key, self.number, self.missing = key, number, missing  # of its communicator, from 0
        self.sides: list[Side] = []
        self.parts: list[tuple[int, int, Message]] = []  # rank's place, event, message
        self.seconds = self.start = self.end = 0.0


class Parked(NamedTuple):
    """A rank that cannot go on."""

    side: Side
    at: int  # the event, a WAIT


class Streams:
    """Plays ``tapes``, at most one per rank of the world. ``begins`` and ``ends`` are of every event, in seconds.

    A START begins and ends with its message, a WAIT ends with it. ``parked``: who waits for ever, by place among them.
    """

    def __init__(self, tapes: Sequence[Tape], *, streams: bool, costs: Sequence[Costs] | None = None) -> None:
        self.tapes, self.streams = tapes, streams
        self.costs = [Costs.none(tape) for tape in tapes] if costs is None else costs
        self.places = {tape.rank: place for place, tape in enumerate(tapes)}
        if len(self.places) < len(tapes):
            raise ValueError(f"ranks {[tape.rank for tape in tapes]}: each must be given once")
        self.meetings: dict[Hashable, Meeting] = {}
        self.issued = [self._issued(place) for place in range(len(tapes))]
        self.begins = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.ends = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.clocks = [0.0] * len(tapes)
        self.parked: dict[int, Parked] = {}
        self._awake: deque[int] = deque()

    # Who meets whom

    def _issued(self, place: int) -> list[Side]:
        """The side of every START of a tape, in order; one that follows in a batch shares it."""
        tape = self.tapes[place]
        events = np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4)
        numbers: Counter[Hashable] = Counter()
        streams: dict[Hashable, Side] = {}
        sides: list[Side] = []
        keys = [_key(message, rank=tape.rank) for message in tape.messages]
        seconds = self.costs[place].messages
        at = np.flatnonzero(events[:, 0] == START)
        chosen = events[at, 2].tolist()
        joins = [self.streams and tape.messages[index].joins for index in chosen] + [False]
        for i, (event, index) in enumerate(zip(at.tolist(), chosen, strict=True)):
            message, key = tape.messages[index], keys[index]
            number = numbers[key, message.receives]
            numbers[key, message.receives] += 1
            if not joins[i] or not sides:
                side = Side(place, event)
                self._queue(side, message, streams, rank=tape.rank, batched=joins[i + 1])
            sides.append(side)
            meeting = self.meetings.get((key, number))
            if meeting is None:
                meeting = self.meetings[key, number] = Meeting(key, number, self._expected(message))
            meeting.seconds = max(meeting.seconds, seconds[index])
            meeting.sides.append(side)
            meeting.parts.append((place, event, message))
            side.meetings.append(meeting)
            side.open += 1
        return sides

    def _expected(self, message: Message) -> int:
        """Sides that a message has among the tapes."""
        if message.collective == "p2p":
            return 1 + (message.peer in self.places)
        return sum(member in self.places for member in message.members)

    def _queue(self, side: Side, message: Message, streams: dict[Hashable, Side], *, rank: int, batched: bool) -> None:
        """Behind the last of its stream. NCCL gives every pair that sends outside of a batch a communicator of its own
        (pytorch/pytorch:torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, pointToPoint).
        """
        if not self.streams:
            return
        stream: Hashable = message.group
        if message.collective == "p2p" and not batched:
            stream = message.group, min(rank, message.peer), max(rank, message.peer)
        before = streams.get(stream)
        if before is not None:
            side.before, before.after = before, side
            side.missing = 2
        streams[stream] = side

    # Time

    def run(self) -> bool:
        """Play; whether all came to their ends."""
        walks = [self._walk(place) for place in range(len(self.tapes))]
        self._awake.extend(range(len(walks)))
        while self._awake:
            place = self._awake.popleft()
            self.parked.pop(place, None)
            parked = next(walks[place], None)
            if parked is not None:
                parked.side.waiter = True
                self.parked[place] = parked
        for meeting in self.meetings.values():
            for place, at, _ in meeting.parts:
                self.begins[place][at], self.ends[place][at] = meeting.start, meeting.end
        return not self.parked

    def _walk(self, place: int) -> Iterator[Parked]:
        """One rank, up to where it must wait for another."""
        costs, begins, ends = self.costs[place], self.begins[place], self.ends[place]
        kernels, launches, messages, drag, reads, launch, blocking = costs
        tape, streams = self.tapes[place], self.streams
        issued, handles = iter(self.issued[place]), dict[int, tuple[Side, int]]()
        clock = host = 0.0
        last: Side | None = None
        for at, (kind, first, second, _) in enumerate(tape):
            begins[at] = clock
            if kind == KERNEL:
                host += launches[first]
                if host > clock:
                    begins[at] = clock = host
                clock += kernels[first]
                if blocking:
                    host = clock
            elif kind == START:
                host += launch
                side = next(issued)
                handles[first] = side, second
                if last is not None and side is not last:
                    self._arrive(last)
                side.posted, last = max(clock, host), side
            elif kind == WAIT and first in handles:
                if last is not None:
                    self._arrive(last)
                    last = None
                side, index = handles.pop(first)
                if side.open:
                    yield Parked(side, at)
                came = side.end if streams else max(clock, side.end) + messages[index]
                ends[at] = max(clock, came)
                hidden = max(0.0, messages[index] - max(0.0, came - clock))
                clock = ends[at] + drag[index] * hidden
                if reads[index]:
                    host = max(host, clock)
                continue
            ends[at] = clock
        if last is not None:
            self._arrive(last)
        self.clocks[place] = clock

    def _arrive(self, side: Side) -> None:
        """A side is issued, or its stream has become free: begin what can begin, and end it."""
        came = [side]
        while came:
            side = came.pop()
            side.missing -= 1
            if side.missing:
                continue
            start = side.start = max(side.posted, side.before.end if side.before is not None else 0.0)
            for meeting in side.meetings:
                meeting.missing -= 1
                meeting.start = max(meeting.start, start)
                if not meeting.missing:
                    meeting.end = meeting.start + (meeting.seconds if self.streams else 0.0)
                    came.extend(self._ended(meeting))

    def _ended(self, meeting: Meeting) -> Iterator[Side]:
        """Wake who waits for it; what stood behind it on a stream."""
        for side in meeting.sides:
            side.open -= 1
            side.end = max(side.end, meeting.end)
            if not side.open:
                if side.waiter:
                    side.waiter = False
                    self._awake.append(side.rank)
                if side.after is not None:
                    yield side.after


def _key(message: Message, *, rank: int) -> Hashable:
    """What is counted together: a communicator's collectives, or what one rank sends another over it."""
    if message.collective != "p2p":
        return message.group
    sender, receiver = (message.peer, rank) if message.receives else (rank, message.peer)
    return message.group, sender, receiver
