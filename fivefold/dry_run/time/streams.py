"""Discrete-event simulation of several ranks' tapes: compute streams, host launches, one stream per communicator.

    compute   kernel kernel START ······ kernel WAIT kernel          host   launches kernels ahead
    stream              (others, queue) ░░ message ░░                one per communicator, in order of issue

A message begins when all its members have issued it: the k-th collective of a communicator matches the k-th of its
other ranks, the k-th send the k-th receive. Members without a tape act as one that has a tape. Without
``streams`` (gloo) messages of a communicator do not queue, and their time is spent by the rank that waits for them.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fivefold.dry_run.record.tape import KERNEL, START, WAIT, Tape, TapeMessage


class Costs(NamedTuple):
    """The seconds of a tape's kernels and messages, by their index in its lists."""

    kernels: Sequence[float]
    launches: Sequence[float]  # host seconds before each kernel can begin
    messages: Sequence[float]
    drag: Sequence[float]  # share of a message's overlapped seconds by which it slows concurrent compute
    reads: Sequence[bool]  # whether the host waits for the message too, because it reads the values
    launch: float = 0.0  # host seconds per message
    blocking: bool = False  # the host waits for every kernel to end

    @classmethod
    def zero(cls, tape: Tape) -> Costs:
        """Return zero costs, for checking the order of messages only."""
        kernels, messages = [0.0] * len(tape.kernels), [0.0] * len(tape.messages)
        return cls(kernels, kernels, messages, messages, [False] * len(messages))


class Endpoint:
    """The part of one rank in a message, or in several that are issued as one (``batch_isend_irecv``)."""

    __slots__ = (
        "after",
        "at",
        "before",
        "end",
        "exchanges",
        "is_awaited",
        "missing",
        "open",
        "posted",
        "rank",
        "start",
    )

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at  # index of the tape, and of the (first) START event in it
        self.exchanges: list[MatchedEndpoints] = []
        self.before: Endpoint | None = None  # the previous endpoint on the same stream
        self.after: Endpoint | None = None  # the next one
        self.missing = 1  # conditions missing to begin: its issue, and the end of ``before`` if there is one
        self.open = 0  # exchanges that have not ended
        self.posted = -1.0  # second of issue; -1: not issued yet
        self.start = self.end = 0.0
        self.is_awaited = False  # the rank is blocked in the WAIT for it


class MatchedEndpoints:
    """A message, with the endpoints of all its members that have a tape."""

    __slots__ = ("end", "endpoints", "key", "missing", "number", "parts", "seconds", "start")

    def __init__(self, key: Hashable, number: int, missing: int) -> None:
        self.key, self.number, self.missing = key, number, missing  # number: from 0, per key; endpoints not yet ready
        self.endpoints: list[Endpoint] = []
        self.parts: list[tuple[int, int, TapeMessage]] = []  # index of the tape, index of the event, message
        self.seconds = self.start = self.end = 0.0


class BlockedRank(NamedTuple):
    """A rank that waits for a message that has not ended."""

    endpoint: Endpoint
    at: int  # index of the WAIT event


class Streams:
    """A simulation of ``tapes``, at most one per rank. ``begins`` and ``ends``: seconds of every event of each tape.

    A START begins and ends with its message; a WAIT ends with it. ``clocks``: the end of each tape. After ``run``,
    ``blocked`` holds the deadlocked ranks, by index of the tape.
    """

    def __init__(self, tapes: Sequence[Tape], *, streams: bool, costs: Sequence[Costs] | None = None) -> None:
        self.tapes, self.streams = tapes, streams
        self.costs = [Costs.zero(tape) for tape in tapes] if costs is None else costs
        self.places = {tape.rank: place for place, tape in enumerate(tapes)}
        if len(self.places) < len(tapes):
            raise ValueError(f"ranks {[tape.rank for tape in tapes]}: each must be given once")
        self.exchanges: dict[Hashable, MatchedEndpoints] = {}
        self.issued = [self._endpoints_of(place) for place in range(len(tapes))]
        self.begins = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.ends = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.clocks = [0.0] * len(tapes)
        self.blocked: dict[int, BlockedRank] = {}
        self._runnable: deque[int] = deque()

    # Matching of messages

    def _endpoints_of(self, place: int) -> list[Endpoint]:
        """Return the endpoint of every START of a tape, in order; the messages of one batch share an endpoint."""
        tape = self.tapes[place]
        events = np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4)
        numbers: Counter[Hashable] = Counter()
        streams: dict[Hashable, Endpoint] = {}
        endpoints: list[Endpoint] = []
        keys = [_order_key(message, rank=tape.rank) for message in tape.messages]
        seconds = self.costs[place].messages
        starts = np.flatnonzero(events[:, 0] == START)
        message_indices = events[starts, 2].tolist()
        joins = [self.streams and tape.messages[index].joins for index in message_indices] + [False]
        for i, (event, index) in enumerate(zip(starts.tolist(), message_indices, strict=True)):
            message, key = tape.messages[index], keys[index]
            number = numbers[key, message.receives]
            numbers[key, message.receives] += 1
            if not joins[i] or not endpoints:
                endpoint = Endpoint(place, event)
                self._enqueue(endpoint, message, streams, rank=tape.rank, batched=joins[i + 1])
            endpoints.append(endpoint)
            exchange = self.exchanges.get((key, number))
            if exchange is None:
                exchange = self.exchanges[key, number] = MatchedEndpoints(key, number, self._parts_expected(message))
            exchange.seconds = max(exchange.seconds, seconds[index])
            exchange.endpoints.append(endpoint)
            exchange.parts.append((place, event, message))
            endpoint.exchanges.append(exchange)
            endpoint.open += 1
        return endpoints

    def _parts_expected(self, message: TapeMessage) -> int:
        """Count the members of a message that have a tape."""
        if message.collective == "p2p":
            return 1 + (message.peer in self.places)
        return sum(member in self.places for member in message.members)

    def _enqueue(
        self, endpoint: Endpoint, message: TapeMessage, streams: dict[Hashable, Endpoint], *, rank: int, batched: bool
    ) -> None:
        """Put an endpoint at the end of its stream.

        Outside of a batch, NCCL has a communicator per pair of ranks
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
        """Simulate all tapes; return whether every rank reached its end (else see ``blocked``)."""
        simulations = [self._run_rank(index) for index in range(len(self.tapes))]
        self._runnable.extend(range(len(simulations)))
        while self._runnable:
            index = self._runnable.popleft()
            self.blocked.pop(index, None)
            blocked = next(simulations[index], None)
            if blocked is not None:
                blocked.endpoint.is_awaited = True
                self.blocked[index] = blocked
        for exchange in self.exchanges.values():
            for index, at, _ in exchange.parts:
                self.begins[index][at], self.ends[index][at] = exchange.start, exchange.end
        return not self.blocked

    def _run_rank(self, place: int) -> Iterator[BlockedRank]:
        """Simulate one rank; yields whenever it must wait for a message that has not ended."""
        costs, begins, ends = self.costs[place], self.begins[place], self.ends[place]
        kernels, launches, messages, drag, reads, launch, blocking = costs
        tape, streams = self.tapes[place], self.streams
        issued, handles = iter(self.issued[place]), dict[int, tuple[Endpoint, int]]()
        clock = host = 0.0
        last: Endpoint | None = None
        for event, (kind, first, second, _) in enumerate(tape):
            begins[event] = clock
            if kind == KERNEL:
                host += launches[first]
                if host > clock:
                    begins[event] = clock = host
                clock += kernels[first]
                if blocking:
                    host = clock
            elif kind == START:
                host += launch
                endpoint = next(issued)
                handles[first] = endpoint, second
                if last is not None and endpoint is not last:
                    self._try_begin(last)
                endpoint.posted, last = max(clock, host), endpoint
            elif kind == WAIT and first in handles:
                if last is not None:
                    self._try_begin(last)
                    last = None
                endpoint, index = handles.pop(first)
                if endpoint.open:
                    yield BlockedRank(endpoint, event)
                arrival = endpoint.end if streams else max(clock, endpoint.end) + messages[index]
                ends[event] = max(clock, arrival)
                overlapped = max(0.0, messages[index] - max(0.0, arrival - clock))
                clock = ends[event] + drag[index] * overlapped
                if reads[index]:
                    host = max(host, clock)
                continue
            ends[event] = clock
        if last is not None:
            self._try_begin(last)
        self.clocks[place] = clock

    def _try_begin(self, endpoint: Endpoint) -> None:
        """Handle an endpoint that was issued or whose stream became free: begin it, and end exchanges, if possible."""
        pending = [endpoint]
        while pending:
            endpoint = pending.pop()
            endpoint.missing -= 1
            if endpoint.missing:
                continue
            start = endpoint.start = max(endpoint.posted, endpoint.before.end if endpoint.before is not None else 0.0)
            for exchange in endpoint.exchanges:
                exchange.missing -= 1
                exchange.start = max(exchange.start, start)
                if not exchange.missing:
                    exchange.end = exchange.start + (exchange.seconds if self.streams else 0.0)
                    pending.extend(self._end_exchange(exchange))

    def _end_exchange(self, exchange: MatchedEndpoints) -> Iterator[Endpoint]:
        """End an exchange: make its waiters runnable, and yield the endpoints queued behind it."""
        for endpoint in exchange.endpoints:
            endpoint.open -= 1
            endpoint.end = max(endpoint.end, exchange.end)
            if not endpoint.open:
                if endpoint.is_awaited:
                    endpoint.is_awaited = False
                    self._runnable.append(endpoint.rank)
                if endpoint.after is not None:
                    yield endpoint.after


def _order_key(message: TapeMessage, *, rank: int) -> Hashable:
    """Return the key within which messages match in order: the communicator, for p2p with sender and receiver."""
    if message.collective != "p2p":
        return message.group
    sender, receiver = (message.peer, rank) if message.receives else (rank, message.peer)
    return message.group, sender, receiver
