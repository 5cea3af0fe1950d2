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


class Endpoint:
    """One rank's part in a message; or in several that are issued as one (``batch_isend_irecv``)."""

    __slots__ = ("after", "at", "before", "end", "exchanges", "missing", "open", "posted", "rank", "start", "waiter")

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at  # place among the tapes, and of the (first) event in its tape
        self.exchanges: list[Exchange] = []
        self.before: Endpoint | None = None  # on the same stream
        self.after: Endpoint | None = None
        self.missing = 1  # to begin: to be issued, and the one before to end
        self.open = 0  # meetings that have not ended
        self.posted = -1.0
        self.start = self.end = 0.0
        self.waiter = False


class Exchange:
    """One message with all its sides among the tapes, in order of their first coming."""

    __slots__ = ("end", "endpoints", "key", "missing", "number", "parts", "seconds", "start")

    def __init__(self, key: Hashable, number: int, missing: int) -> None:
        self.key, self.number, self.missing = key, number, missing  # of its communicator, from 0
        self.endpoints: list[Endpoint] = []
        self.parts: list[tuple[int, int, Message]] = []  # rank's place, event, message
        self.seconds = self.start = self.end = 0.0


class BlockedRank(NamedTuple):
    """A rank that cannot go on."""

    endpoint: Endpoint
    at: int  # the event, a WAIT


class Streams:
    """Plays ``tapes``, at most one per rank of the world. ``begins`` and ``ends`` are of every event, in seconds.

    A START begins and ends with its message, a WAIT ends with it. ``blocked``: who waits for ever, by place among them.
    """

    def __init__(self, tapes: Sequence[Tape], *, streams: bool, costs: Sequence[Costs] | None = None) -> None:
        self.tapes, self.streams = tapes, streams
        self.costs = [Costs.none(tape) for tape in tapes] if costs is None else costs
        self.places = {tape.rank: place for place, tape in enumerate(tapes)}
        if len(self.places) < len(tapes):
            raise ValueError(f"ranks {[tape.rank for tape in tapes]}: each must be given once")
        self.exchanges: dict[Hashable, Exchange] = {}
        self.issued = [self._issued(place) for place in range(len(tapes))]
        self.begins = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.ends = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.clocks = [0.0] * len(tapes)
        self.blocked: dict[int, BlockedRank] = {}
        self._awake: deque[int] = deque()

    # Who meets whom

    def _issued(self, place: int) -> list[Endpoint]:
        """The side of every START of a tape, in order; one that follows in a batch shares it."""
        tape = self.tapes[place]
        events = np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4)
        numbers: Counter[Hashable] = Counter()
        streams: dict[Hashable, Endpoint] = {}
        endpoints: list[Endpoint] = []
        keys = [_key(message, rank=tape.rank) for message in tape.messages]
        seconds = self.costs[place].messages
        at = np.flatnonzero(events[:, 0] == START)
        chosen = events[at, 2].tolist()
        joins = [self.streams and tape.messages[index].joins for index in chosen] + [False]
        for i, (event, index) in enumerate(zip(at.tolist(), chosen, strict=True)):
            message, key = tape.messages[index], keys[index]
            number = numbers[key, message.receives]
            numbers[key, message.receives] += 1
            if not joins[i] or not endpoints:
                endpoint = Endpoint(place, event)
                self._queue(endpoint, message, streams, rank=tape.rank, batched=joins[i + 1])
            endpoints.append(endpoint)
            exchange = self.exchanges.get((key, number))
            if exchange is None:
                exchange = self.exchanges[key, number] = Exchange(key, number, self._expected(message))
            exchange.seconds = max(exchange.seconds, seconds[index])
            exchange.endpoints.append(endpoint)
            exchange.parts.append((place, event, message))
            endpoint.exchanges.append(exchange)
            endpoint.open += 1
        return endpoints

    def _expected(self, message: Message) -> int:
        """Sides that a message has among the tapes."""
        if message.collective == "p2p":
            return 1 + (message.peer in self.places)
        return sum(member in self.places for member in message.members)

    def _queue(
        self, endpoint: Endpoint, message: Message, streams: dict[Hashable, Endpoint], *, rank: int, batched: bool
    ) -> None:
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
            endpoint.before, before.after = before, endpoint
            endpoint.missing = 2
        streams[stream] = endpoint

    # Time

    def run(self) -> bool:
        """Play; whether all came to their ends."""
        walks = [self._walk(place) for place in range(len(self.tapes))]
        self._awake.extend(range(len(walks)))
        while self._awake:
            place = self._awake.popleft()
            self.blocked.pop(place, None)
            blocked = next(walks[place], None)
            if blocked is not None:
                blocked.endpoint.waiter = True
                self.blocked[place] = blocked
        for exchange in self.exchanges.values():
            for place, at, _ in exchange.parts:
                self.begins[place][at], self.ends[place][at] = exchange.start, exchange.end
        return not self.blocked

    def _walk(self, place: int) -> Iterator[BlockedRank]:
        """One rank, up to where it must wait for another."""
        costs, begins, ends = self.costs[place], self.begins[place], self.ends[place]
        kernels, launches, messages, drag, reads, launch, blocking = costs
        tape, streams = self.tapes[place], self.streams
        issued, handles = iter(self.issued[place]), dict[int, tuple[Endpoint, int]]()
        clock = host = 0.0
        last: Endpoint | None = None
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
                endpoint = next(issued)
                handles[first] = endpoint, second
                if last is not None and endpoint is not last:
                    self._arrive(last)
                endpoint.posted, last = max(clock, host), endpoint
            elif kind == WAIT and first in handles:
                if last is not None:
                    self._arrive(last)
                    last = None
                endpoint, index = handles.pop(first)
                if endpoint.open:
                    yield BlockedRank(endpoint, at)
                came = endpoint.end if streams else max(clock, endpoint.end) + messages[index]
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

    def _arrive(self, endpoint: Endpoint) -> None:
        """A side is issued, or its stream has become free: begin what can begin, and end it."""
        came = [endpoint]
        while came:
            endpoint = came.pop()
            endpoint.missing -= 1
            if endpoint.missing:
                continue
            start = endpoint.start = max(endpoint.posted, endpoint.before.end if endpoint.before is not None else 0.0)
            for exchange in endpoint.exchanges:
                exchange.missing -= 1
                exchange.start = max(exchange.start, start)
                if not exchange.missing:
                    exchange.end = exchange.start + (exchange.seconds if self.streams else 0.0)
                    came.extend(self._ended(exchange))

    def _ended(self, exchange: Exchange) -> Iterator[Endpoint]:
        """Wake who waits for it; what stood behind it on a stream."""
        for endpoint in exchange.endpoints:
            endpoint.open -= 1
            endpoint.end = max(endpoint.end, exchange.end)
            if not endpoint.open:
                if endpoint.waiter:
                    endpoint.waiter = False
                    self._awake.append(endpoint.rank)
                if endpoint.after is not None:
                    yield endpoint.after


def _key(message: Message, *, rank: int) -> Hashable:
    """What is counted together: a communicator's collectives, or what one rank sends another over it."""
    if message.collective != "p2p":
        return message.group
    sender, receiver = (message.peer, rank) if message.receives else (rank, message.peer)
    return message.group, sender, receiver
