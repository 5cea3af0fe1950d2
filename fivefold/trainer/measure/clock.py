"""Clocks of a traced step: of the host or of a CUDA stream; and the offset of a rank's clock from that of rank 0.

offset = (answer − (sent + received) / 2) of the fastest of some round trips; its error is at most half of that trip
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

TRIPS = 16  # round trips per rank


class Clock(Protocol):
    """A clock that marks moments, and later returns their times."""

    def begin(self) -> None:
        """Prepare for a traced step."""

    def mark(self) -> Any:
        """Mark this moment, on the host's clock or on the device's current stream."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the time of each mark, in seconds of this host's ``perf_counter``."""


class HostClock:
    """A clock for CPUs, by ``perf_counter``: there an operation has ended when its call returns."""

    mark = staticmethod(time.perf_counter_ns)

    def begin(self) -> None:
        """Do nothing."""

    def seconds(self, marks: Sequence[int]) -> list[float]:
        """Convert nanoseconds to seconds."""
        return [mark * 1e-9 for mark in marks]


class ProcessorClock(HostClock):
    """A clock for CPUs by the processor time of the thread, which stands while the thread waits for a core."""

    mark = staticmethod(time.thread_time_ns)


class StreamClock:
    """A clock of CUDA events on the current stream, on which kernels run in order.

    A wait for a message of another stream shows as the time for which this one stalls. ``torch.cuda.Event``:
    ``record``, ``synchronize``, ``elapsed_time`` in ms.
    """

    def begin(self) -> None:
        """Record one event at a known time of the host's clock."""
        torch.cuda.synchronize()
        self._base = self.mark()
        self._base.synchronize()
        self._at = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Wait for the device, and read the times of the events."""
        torch.cuda.synchronize()
        return [self._at + 1e-3 * self._base.elapsed_time(mark) for mark in marks]


class Offset(NamedTuple):
    """The seconds to add to this rank's clock to get that of rank 0, and their error."""

    seconds: float
    error: float


def create_host_group() -> dist.ProcessGroup | None:
    """Create a process group of the world whose messages stay on the host: NCCL would create a communicator per pair.

    None: the default group is one already. Every rank of the initialised world calls it.
    """
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def measure_offset(
    *, rank: int, world: int, group: dist.ProcessGroup | None = None, now: Any = time.perf_counter
) -> Offset:
    """Measure this rank's ``Offset``, by ping-pong with rank 0 over ``group``; every rank of the world calls it."""
    if world == 1:
        return Offset(0.0, 0.0)
    moment = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        for peer in range(1, world):
            for _ in range(TRIPS):
                dist.recv(moment, peer, group=group)
                moment[0] = now()
                dist.send(moment, peer, group=group)
        return Offset(0.0, 0.0)
    trips = []
    for _ in range(TRIPS):
        sent = now()
        dist.send(moment, 0, group=group)
        dist.recv(moment, 0, group=group)
        received = now()
        trips.append((received - sent, moment.item() - (sent + received) / 2))
    trip, seconds = min(trips)
    return Offset(seconds, trip / 2)
