"""A rehearsed step in time: tapes and prices played on streams, and where the seconds of each rank go.

    step = compute + update + messages that nothing hides, by axis + bubble          of every rank

Bubble: waiting for other ranks to begin a message or, in a pipeline, for its rows to come; and after its own end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fivefold.check.dryrun.match import deadlocks
from fivefold.check.dryrun.record.tape import KERNEL, SCOPE, START, WAIT, Tape
from fivefold.check.dryrun.time.prices import Pricer
from fivefold.check.dryrun.time.streams import Streams
from fivefold.job import Job
from fivefold.machine.spec import Machine
from fivefold.record import Mistake
from fivefold.step import Time

Seconds = NDArray[np.float64]


class RankTime(NamedTuple):
    """Where a rank's seconds go; together they are the step."""

    rank: int
    compute: float  # with the host's launches where the device waits for them
    bubble: float
    exposed: dict[str, float]  # by axis
    update: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.compute + self.bubble + sum(self.exposed.values()) + self.update


class TimedSpan(NamedTuple):
    """A kernel, a message, a wait or a scope; ``place`` in the tape's list of its kind."""

    kind: int  # as in tape.py
    place: int
    start: float
    end: float


class Played:
    """Tapes with a time on every event."""

    def __init__(self, streams: Streams) -> None:
        self.tapes = tuple(streams.tapes)
        self.step_seconds = max(streams.clocks)
        self._streams = streams
        self.ranks = tuple(self._split(place) for place in range(len(self.tapes)))

    def time(self) -> Time:
        """Of the busiest rank."""
        busiest = min(self.ranks, key=lambda rank: rank.bubble)
        parts = {f"{axis} messages": seconds for axis, seconds in busiest.exposed.items()}
        parts |= {"pipeline bubble": busiest.bubble, "optimizer": busiest.update, "compute": busiest.compute}
        return Time(
            step_seconds=self.step_seconds, compute_seconds=busiest.compute, bubble_seconds=busiest.bubble,
            exposed_seconds=busiest.exposed, optimizer_seconds=busiest.update,
            bound_by=max(parts, key=lambda name: parts[name]),
        )  # fmt: skip

    def seconds_at(self, rank: int) -> Seconds:
        """When each event of a rank has happened; of a START when it was issued to the device."""
        place = self._streams.places[rank]
        issued = np.frombuffer(self.tapes[place].events, dtype=np.int64)[::4] == START
        return np.maximum.accumulate(np.where(issued, 0.0, self._streams.ends[place]))

    def spans(self, rank: int) -> Iterator[TimedSpan]:
        """What a rank's device does, in order of issue; scopes last until the next one."""
        place = self._streams.places[rank]
        begins, ends = self._streams.begins[place], self._streams.ends[place]
        messages: dict[int, int] = {}
        scope: tuple[int, float] | None = None
        for at, (kind, first, second, _) in enumerate(self.tapes[place]):
            if kind == KERNEL:
                yield TimedSpan(kind, first, begins[at], ends[at])
            elif kind == START:
                messages[first] = second
                yield TimedSpan(kind, second, begins[at], ends[at])
            elif kind == WAIT and first in messages:
                if ends[at] > begins[at]:
                    yield TimedSpan(kind, messages.pop(first), begins[at], ends[at])
            elif kind == SCOPE:
                if scope is not None:
                    yield TimedSpan(SCOPE, scope[0], scope[1], begins[at])
                scope = first, begins[at]
        if scope is not None:
            yield TimedSpan(SCOPE, scope[0], scope[1], self._streams.clocks[place])

    def _split(self, place: int) -> RankTime:
        """Add up the waits of a rank, the rest is its own."""
        tape, streams = self.tapes[place], self._streams
        begins, ends = streams.begins[place], streams.ends[place]
        rows = np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4)
        starts = dict(zip(rows[rows[:, 0] == START, 1].tolist(), streams.issued[place], strict=True))
        messages = dict(rows[rows[:, 0] == START, 1:3].tolist())
        updates = [at for at in np.flatnonzero(rows[:, 0] == SCOPE).tolist() if _updates(tape, at)]
        begin = updates[0] if updates else len(tape)
        waited = {"": 0.0}
        late = 0.0
        for at in np.flatnonzero(rows[:, 0] == WAIT).tolist():
            handle = tape.events[4 * at + 1]
            seconds = ends[at] - begins[at]
            if handle not in starts or seconds <= 0:
                continue
            message = tape.messages[messages[handle]]
            posted = max(side.posted for meeting in starts[handle].meetings for side in meeting.sides)
            idle = min(seconds, max(0.0, posted - begins[at]))
            if streams.streams and (message.axis, message.collective) == ("pp", "p2p"):
                idle = seconds
            waited[""] += idle
            if seconds > idle:
                waited[message.axis] = waited.get(message.axis, 0.0) + seconds - idle
            if at >= begin:
                late += seconds
        end = streams.clocks[place]
        update = end - begins[begin] - late if updates else 0.0
        bubble = waited.pop("")
        compute = end - update - bubble - sum(waited.values())
        return RankTime(tape.rank, compute, bubble + self.step_seconds - end, waited, update)


def _updates(tape: Tape, at: int) -> bool:
    return tape.scopes[tape.events[4 * at + 1]].phase == "update"


def play(tapes: Sequence[Tape], *, machine: Machine, job: Job, world: int) -> Played:
    """One step of some ranks of ``world``, usually one of each pipeline rank; a ``Mistake`` where they deadlock."""
    pricer = Pricer(machine=machine, job=job, world=world)
    streams = Streams(tapes, streams=machine.backend == "nccl", costs=[pricer.costs(tape) for tape in tapes])
    found = deadlocks(streams)
    if found:
        raise Mistake(found[0])
    return Played(streams)
