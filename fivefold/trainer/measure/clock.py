"""Clocks of a traced step: the host's, or a CUDA stream's; and how far a rank's clock is from that of rank 0.

offset = (answer − (sent + came) / 2) of the quickest of some round trips; off by at most half of that trip
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

TRIPS = 16  # round trips per rank


class Clock(Protocol):
    """Marks moments, and later says when they were."""

    def begin(self) -> None:
        """A traced step begins."""

    def mark(self) -> Any:
        """Mark this moment: on the host's clock, or of the device's current stream."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When each mark was, in seconds of this host's ``perf_counter``."""


class HostClock:
    """``perf_counter``: for CPUs, on which an operation has ended when its call returns."""

    mark = staticmethod(time.perf_counter_ns)

    def begin(self) -> None:
        """Nothing to do."""

    def seconds(self, marks: Sequence[int]) -> list[float]:
        """Nanoseconds as seconds."""
        return [mark * 1e-9 for mark in marks]


class StreamClock:
    """CUDA events on the current stream, on which kernels run in order; a wait for a message of another stream shows as
    the time for which this one stalls. ``torch.cuda.Event``: ``record``, ``synchronize``, ``elapsed_time`` in ms.
    """

    def begin(self) -> None:
        """Let one event and the host's clock agree."""
        torch.cuda.synchronize()
        self._base = self.mark()
        self._base.synchronize()
        self._at = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Wait for the device, and read the events."""
        torch.cuda.synchronize()
        return [self._at + 1e-3 * self._base.elapsed_time(mark) for mark in marks]


class Offset(NamedTuple):
    """Seconds to add to this rank's clock to get that of rank 0, and by how much that may be wrong."""

    seconds: float
    error: float


def host_group() -> dist.ProcessGroup | None:
    """A process group of the world whose messages stay on the host: NCCL would make a communicator for each pair. None:
    the default group is one. Every rank of the initialised world calls it.
    """
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def offset(
    *, rank: int, world: int, group: dist.ProcessGroup | None = None, now: Any = time.perf_counter
) -> Offset:  # fmt: skip
    """This rank's ``Offset``, by ping-pong with rank 0 over ``group``; every rank of the world calls it."""
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
        came = now()
        trips.append((came - sent, moment.item() - (sent + came) / 2))
    trip, found = min(trips)
    return Offset(found, trip / 2)
