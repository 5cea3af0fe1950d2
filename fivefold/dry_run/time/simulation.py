"""Simulates the time of a dry run: plays priced tapes on streams, and breaks down each rank's seconds by cause.

    step = compute + update + exposed messages by axis + bubble          on every rank

Bubble: seconds in which a rank waits until other ranks issue a message, or (pipeline) until its rows arrive, and
the seconds from the end of its tape to the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.dry_run.match import find_deadlocks
from fivefold.dry_run.record.tape import KERNEL, SCOPE, START, WAIT, Tape
from fivefold.dry_run.time.prices import Pricer
from fivefold.dry_run.time.streams import Streams
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.machine.spec import Machine
from fivefold.step import Time

Seconds = NDArray[np.float64]


class RankTime(NamedTuple):
    """The seconds of one rank by cause; they add up to the step."""

    rank: int
    compute: float  # includes waits for the host's kernel launches
    bubble: float
    exposed: dict[str, float]  # messages not overlapped with compute, by axis
    update: float

    @property
    def seconds(self) -> float:
        """Return the seconds of the full step."""
        return self.compute + self.bubble + sum(self.exposed.values()) + self.update


class TimedSpan(NamedTuple):
    """A kernel, message, wait or scope, in seconds; ``list_index``: its index in the tape's list."""

    kind: int  # as in tape.py
    list_index: int  # of a wait: in the list of messages
    start: float
    end: float


class SimulatedTapes:
    """The tapes with a time for every event; ``ranks``: the time breakdown of each rank, in the order of ``tapes``."""

    def __init__(self, streams: Streams) -> None:
        self.tapes = tuple(streams.tapes)
        self.step_seconds = max(streams.clocks)
        self._streams = streams
        self.ranks = tuple(self._break_down_rank(tape_index) for tape_index in range(len(self.tapes)))

    def time(self) -> Time:
        """Return the step's time; its breakdown is that of the rank with the smallest bubble."""
        busiest = min(self.ranks, key=lambda rank: rank.bubble)
        seconds_by_part = {f"{axis} communication": seconds for axis, seconds in busiest.exposed.items()}
        seconds_by_part |= {"pipeline bubble": busiest.bubble, "optimizer": busiest.update, "compute": busiest.compute}
        return Time(
            step_seconds=self.step_seconds,
            compute_seconds=busiest.compute,
            bubble_seconds=busiest.bubble,
            exposed_seconds=busiest.exposed,
            optimizer_seconds=busiest.update,
            longest_part=max(seconds_by_part, key=lambda name: seconds_by_part[name]),
        )

    def seconds_at(self, rank: int) -> Seconds:
        """Return the second at which each event of a rank has ended; for a START, when it was issued to the device."""
        tape_index = self._streams.tape_of_rank[rank]
        is_start = np.frombuffer(self.tapes[tape_index].events, dtype=np.int64)[::4] == START
        return np.maximum.accumulate(np.where(is_start, 0.0, self._streams.ends[tape_index]))

    def spans(self, rank: int) -> Iterator[TimedSpan]:
        """Yield the spans of a rank's device, in order of issue; a scope lasts until the next one begins."""
        tape_index = self._streams.tape_of_rank[rank]
        begins = self._streams.begins[tape_index]
        ends = self._streams.ends[tape_index]
        messages: dict[int, int] = {}
        scope: tuple[int, float] | None = None
        for event, (kind, first, second, _) in enumerate(self.tapes[tape_index]):
            if kind == KERNEL:
                yield TimedSpan(kind, first, begins[event], ends[event])
            elif kind == START:
                messages[first] = second
                yield TimedSpan(kind, second, begins[event], ends[event])
            elif kind == WAIT and first in messages:
                if ends[event] > begins[event]:
                    yield TimedSpan(kind, messages.pop(first), begins[event], ends[event])
            elif kind == SCOPE:
                if scope is not None:
                    yield TimedSpan(SCOPE, scope[0], scope[1], begins[event])
                scope = first, begins[event]
        if scope is not None:
            yield TimedSpan(SCOPE, scope[0], scope[1], self._streams.clocks[tape_index])

    def _break_down_rank(self, tape_index: int) -> RankTime:
        """Break down a rank's seconds: add up bubble, exposed messages and update; the rest is compute."""
        tape, streams = self.tapes[tape_index], self._streams
        begins, ends = streams.begins[tape_index], streams.ends[tape_index]
        rows = np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4)
        starts = dict(zip(rows[rows[:, 0] == START, 1].tolist(), streams.issued_endpoints[tape_index], strict=True))
        messages = dict(rows[rows[:, 0] == START, 1:3].tolist())
        updates = [event for event in np.flatnonzero(rows[:, 0] == SCOPE).tolist() if _is_update(tape, event)]
        update_begin = updates[0] if updates else len(tape)
        wait_seconds = {"": 0.0}
        update_waits = 0.0
        for event in np.flatnonzero(rows[:, 0] == WAIT).tolist():
            handle = tape.events[4 * event + 1]
            seconds = ends[event] - begins[event]
            if handle not in starts or seconds <= 0:
                continue
            message = tape.messages[messages[handle]]
            posted = max(endpoint.posted for exchange in starts[handle].exchanges for endpoint in exchange.endpoints)
            idle = min(seconds, max(0.0, posted - begins[event]))
            if streams.streams and (message.axis, message.collective) == ("pp", "p2p"):
                idle = seconds
            wait_seconds[""] += idle
            if seconds > idle:
                wait_seconds[message.axis] = wait_seconds.get(message.axis, 0.0) + seconds - idle
            if event >= update_begin:
                update_waits += seconds
        end = streams.clocks[tape_index]
        update = end - begins[update_begin] - update_waits if updates else 0.0
        bubble = wait_seconds.pop("")
        compute = end - update - bubble - sum(wait_seconds.values())
        return RankTime(tape.rank, compute, bubble + self.step_seconds - end, wait_seconds, update)


def _is_update(tape: Tape, event: int) -> bool:
    return tape.scopes[tape.events[4 * event + 1]].phase == "update"


def simulate(tapes: Sequence[Tape], *, machine: Machine, job: Job, world: int) -> SimulatedTapes:
    """Simulate a step of some ranks of ``world``, usually one per pipeline rank; raise ``UserError`` on a deadlock."""
    pricer = Pricer(machine=machine, job=job, world=world)
    streams = Streams(tapes, streams=machine.can_overlap, costs=[pricer.price_tape(tape) for tape in tapes])
    findings = find_deadlocks(streams)
    if findings:
        raise UserError(findings[0])
    return SimulatedTapes(streams)
