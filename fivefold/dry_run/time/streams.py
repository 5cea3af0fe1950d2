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
    kernel_launches: Sequence[float]  # host seconds before each kernel can begin
    messages: Sequence[float]
    compute_slowdown: Sequence[float]  # share of a message's overlapped seconds by which it slows concurrent compute
    host_waits: Sequence[bool]  # whether the host waits for the message too, because it reads the values
    message_launch_seconds: float = 0.0  # host seconds per message
    is_blocking: bool = False  # the host waits for every kernel to end

    @classmethod
    def zero(cls, tape: Tape) -> Costs:
        """Return zero costs, for checking the order of messages only."""
        kernels = [0.0] * len(tape.kernels)
        messages = [0.0] * len(tape.messages)
        return cls(kernels, kernels, messages, messages, [False] * len(messages))


class Endpoint:
    """The part of one rank in a message, or in several that are issued as one (``batch_isend_irecv``)."""

    __slots__ = (
        "end",
        "event",
        "exchanges",
        "is_awaited",
        "n_open_messages",
        "n_pending",
        "next",
        "posted",
        "previous",
        "rank",
        "start",
    )

    def __init__(self, rank: int, event: int) -> None:
        self.rank, self.event = rank, event  # index of the tape, and of the (first) START event in it
        self.exchanges: list[MatchedEndpoints] = []
        self.previous: Endpoint | None = None  # the previous endpoint on the same stream
        self.next: Endpoint | None = None  # the next one
        self.n_pending = 1  # conditions missing to begin: its issue, and the end of ``previous`` if there is one
        self.n_open_messages = 0  # exchanges that have not ended
        self.posted = -1.0  # second of issue; -1: not issued yet
        self.start = self.end = 0.0
        self.is_awaited = False  # the rank is blocked in the WAIT for it


class MatchedEndpoints:
    """A message, with the endpoints of all its members that have a tape."""

    __slots__ = ("end", "endpoints", "key", "messages", "n_pending", "number", "seconds", "start")

    def __init__(self, key: Hashable, number: int, n_pending: int) -> None:
        self.key, self.number = key, number  # number: from 0, per key
        self.n_pending = n_pending  # endpoints not yet ready
        self.endpoints: list[Endpoint] = []
        self.messages: list[tuple[int, int, TapeMessage]] = []  # index of the tape, index of the event, message
        self.seconds = self.start = self.end = 0.0


class BlockedRank(NamedTuple):
    """A rank that waits for a message that has not ended."""

    endpoint: Endpoint
    event: int  # index of the WAIT event


class Streams:
    """A simulation of ``tapes``, at most one per rank. ``begins`` and ``ends``: seconds of every event of each tape.

    A START begins and ends with its message; a WAIT ends with it. ``clocks``: the end of each tape. After ``run``,
    ``blocked`` holds the deadlocked ranks, by index of the tape.
    """

    def __init__(self, tapes: Sequence[Tape], *, streams: bool, costs: Sequence[Costs] | None = None) -> None:
        self.tapes, self.streams = tapes, streams
        self.costs = [Costs.zero(tape) for tape in tapes] if costs is None else costs
        self.tape_of_rank = {tape.rank: tape_index for tape_index, tape in enumerate(tapes)}
        if len(self.tape_of_rank) < len(tapes):
            raise ValueError(f"ranks {[tape.rank for tape in tapes]}: each must be given once")
        self.exchanges: dict[Hashable, MatchedEndpoints] = {}
        self.issued_endpoints = [self._match_endpoints(tape_index) for tape_index in range(len(tapes))]
        self.begins = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.ends = [array("d", bytes(8 * len(tape))) for tape in tapes]
        self.clocks = [0.0] * len(tapes)
        self.blocked: dict[int, BlockedRank] = {}
        self._runnable: deque[int] = deque()

    # Matching of messages

    def _match_endpoints(self, tape_index: int) -> list[Endpoint]:
        """Return the endpoint of every START of a tape, in order; the messages of one batch share an endpoint."""
        tape = self.tapes[tape_index]
        events = np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4)
        counts: Counter[Hashable] = Counter()
        streams: dict[Hashable, Endpoint] = {}
        endpoints: list[Endpoint] = []
        keys = [_build_matching_key(message, rank=tape.rank) for message in tape.messages]
        n_expected = [self._count_expected_endpoints(message) for message in tape.messages]
        seconds = self.costs[tape_index].messages
        starts = np.flatnonzero(events[:, 0] == START)
        message_indices = events[starts, 2].tolist()
        joins = [self.streams and tape.messages[index].joins for index in message_indices] + [False]
        for i, (event, index) in enumerate(zip(starts.tolist(), message_indices, strict=True)):
            message, key = tape.messages[index], keys[index]
            number = counts[key, message.receives]
            counts[key, message.receives] += 1
            if not joins[i] or not endpoints:
                endpoint = Endpoint(tape_index, event)
                self._append_to_stream(endpoint, message, streams, rank=tape.rank, batched=joins[i + 1])
            endpoints.append(endpoint)
            exchange = self.exchanges.get((key, number))
            if exchange is None:
                exchange = self.exchanges[key, number] = MatchedEndpoints(key, number, n_expected[index])
            exchange.seconds = max(exchange.seconds, seconds[index])
            exchange.endpoints.append(endpoint)
            exchange.messages.append((tape_index, event, message))
            endpoint.exchanges.append(exchange)
            endpoint.n_open_messages += 1
        return endpoints

    def _count_expected_endpoints(self, message: TapeMessage) -> int:
        """Count the members of a message that have a tape."""
        if message.collective == "p2p":
            return 1 + (message.peer in self.tape_of_rank)
        return sum(member in self.tape_of_rank for member in message.members)

    def _append_to_stream(
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
        previous = streams.get(stream)
        if previous is not None:
            endpoint.previous, previous.next = previous, endpoint
            endpoint.n_pending = 2
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
            for index, event, _ in exchange.messages:
                self.begins[index][event], self.ends[index][event] = exchange.start, exchange.end
        return not self.blocked

    def _run_rank(self, tape_index: int) -> Iterator[BlockedRank]:
        """Simulate one rank; yields whenever it must wait for a message that has not ended."""
        costs = self.costs[tape_index]
        begins = self.begins[tape_index]
        ends = self.ends[tape_index]
        kernels, kernel_launches, messages, compute_slowdown, host_waits, message_launch_seconds, is_blocking = costs
        tape, streams = self.tapes[tape_index], self.streams
        issued_endpoints = iter(self.issued_endpoints[tape_index])
        handles = dict[int, tuple[Endpoint, int]]()
        clock = host = 0.0
        last: Endpoint | None = None
        for event, (kind, first, second, _) in enumerate(tape):
            begins[event] = clock
            if kind == KERNEL:
                host += kernel_launches[first]
                if host > clock:
                    begins[event] = clock = host
                clock += kernels[first]
                if is_blocking:
                    host = clock
            elif kind == START:
                host += message_launch_seconds
                endpoint = next(issued_endpoints)
                handles[first] = endpoint, second
                if last is not None and endpoint is not last:
                    self._begin_if_possible(last)
                endpoint.posted, last = max(clock, host), endpoint
            elif kind == WAIT and first in handles:
                if last is not None:
                    self._begin_if_possible(last)
                    last = None
                endpoint, index = handles.pop(first)
                if endpoint.n_open_messages:
                    yield BlockedRank(endpoint, event)
                arrival = endpoint.end if streams else max(clock, endpoint.end) + messages[index]
                ends[event] = max(clock, arrival)
                overlapped = max(0.0, messages[index] - max(0.0, arrival - clock))
                clock = ends[event] + compute_slowdown[index] * overlapped
                if host_waits[index]:
                    host = max(host, clock)
                continue
            ends[event] = clock
        if last is not None:
            self._begin_if_possible(last)
        self.clocks[tape_index] = clock

    def _begin_if_possible(self, endpoint: Endpoint) -> None:
        """Handle an endpoint that was issued or whose stream became free: begin it, and end exchanges, if possible."""
        pending = [endpoint]
        while pending:
            endpoint = pending.pop()
            endpoint.n_pending -= 1
            if endpoint.n_pending:
                continue
            start = endpoint.start = max(
                endpoint.posted, endpoint.previous.end if endpoint.previous is not None else 0.0
            )
            for exchange in endpoint.exchanges:
                exchange.n_pending -= 1
                exchange.start = max(exchange.start, start)
                if not exchange.n_pending:
                    exchange.end = exchange.start + (exchange.seconds if self.streams else 0.0)
                    pending.extend(self._end_exchange(exchange))

    def _end_exchange(self, exchange: MatchedEndpoints) -> Iterator[Endpoint]:
        """End an exchange: make its waiters runnable, and yield the endpoints queued behind it."""
        for endpoint in exchange.endpoints:
            endpoint.n_open_messages -= 1
            endpoint.end = max(endpoint.end, exchange.end)
            if not endpoint.n_open_messages:
                if endpoint.is_awaited:
                    endpoint.is_awaited = False
                    self._runnable.append(endpoint.rank)
                if endpoint.next is not None:
                    yield endpoint.next


def _build_matching_key(message: TapeMessage, *, rank: int) -> Hashable:
    """Return the key within which messages match in order: the communicator, for p2p with sender and receiver."""
    if message.collective != "p2p":
        return message.group
    sender, receiver = (message.peer, rank) if message.receives else (rank, message.peer)
    return message.group, sender, receiver
