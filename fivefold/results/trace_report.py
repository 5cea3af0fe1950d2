"""What the traces of a real run say of it, as data: made by ``profiling/traces``, printed and drawn by ``show``.

window = compute + exposed communication + copies alone + idle; all in seconds, of one rank and one step

Communication that compute runs beside is overlapped, the rest exposed. Copies alone: nothing runs beside them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.record import Record

Category = Literal["GEMM", "attention", "elementwise", "norm", "communication", "memcpy", "optimizer", "other"]
Does = Literal["compute", "communication", "memcpy", "host", "waiting"]


class Breakdown(Record):
    """Seconds of a rank's window. Several streams or threads at once count once.

    ``idle_host_seconds``: nothing had been launched; ``idle_waiting_seconds``: work was queued behind something. What
    of ``idle_seconds`` is neither has no launch in the trace. ``waiting_seconds``: exposed communication before the
    last rank had arrived, None where the traces of the others are missing.
    """

    rank: NonNegativeInt
    step: str  # "ProfilerStep#3", or "whole" for all that the trace holds
    start_seconds: float  # from the first event of all ranks
    window_seconds: NonNegativeFloat
    compute_seconds: NonNegativeFloat
    communication_seconds: NonNegativeFloat
    exposed_seconds: NonNegativeFloat
    memcpy_seconds: NonNegativeFloat
    memcpy_alone_seconds: NonNegativeFloat
    idle_seconds: NonNegativeFloat
    idle_host_seconds: NonNegativeFloat
    idle_waiting_seconds: NonNegativeFloat
    optimizer_seconds: NonNegativeFloat  # of the compute
    waiting_seconds: NonNegativeFloat | None = None

    @property
    def overlapped_seconds(self) -> float:
        """Communication that compute runs beside."""
        return self.communication_seconds - self.exposed_seconds

    @property
    def overlap(self) -> float | None:
        """Overlapped share of the communication; None without communication."""
        return self.overlapped_seconds / self.communication_seconds if self.communication_seconds else None


class KernelLine(Record):
    """A kernel (on CPU: an outermost operator), or all of a category; mean of a rank and step."""

    category: Category
    name: str = ""
    calls: NonNegativeFloat
    seconds: NonNegativeFloat
    longest_seconds: NonNegativeFloat


class MessageLine(Record):
    """A collective over one group, or groups of one description: mean of a rank and step.

    Bytes are those of the full tensor, bandwidths as in nccl-tests, from the last arrival on if that is known.
    """

    group: str
    axis: str = ""  # of the layout, where one is given
    ranks: PositiveInt | None = None  # of the group; None if the trace does not say
    collective: str
    messages: NonNegativeFloat
    bytes: NonNegativeFloat | None = None  # of all messages together
    seconds: NonNegativeFloat
    waiting_seconds: NonNegativeFloat | None = None  # of them, before the last rank had arrived
    algorithm_bandwidth: NonNegativeFloat | None = None  # bytes/s
    bus_bandwidth: NonNegativeFloat | None = None
    link: str = ""
    link_bandwidth: NonNegativeFloat | None = None


class PathPart(Record):
    """What one rank contributes to the critical path of a step; mean over steps."""

    rank: NonNegativeInt
    does: Does
    name: str = ""
    seconds: NonNegativeFloat


class Arrivals(Record):
    """Collectives in which a rank was the last to arrive, and how long the others' kernels waited for it in all."""

    rank: NonNegativeInt
    last: NonNegativeInt
    matched: NonNegativeInt
    others_waited_seconds: NonNegativeFloat


class TraceReport(Record):
    """All that is read from the traces of a job."""

    device: Literal["GPU", "CPU"]
    world: PositiveInt
    ranks: tuple[NonNegativeInt, ...]
    files: tuple[str, ...]
    steps: tuple[str, ...]
    whole: tuple[Breakdown, ...]  # by rank: first to last kernel
    breakdown: tuple[Breakdown, ...]  # by rank and step
    categories: tuple[KernelLine, ...]
    kernels: tuple[KernelLine, ...]
    messages: tuple[MessageLine, ...]
    path_seconds: NonNegativeFloat = 0.0
    path: tuple[PathPart, ...] = ()  # by rank
    path_names: tuple[PathPart, ...] = ()  # the largest
    arrivals: tuple[Arrivals, ...] = ()
    remarks: tuple[str, ...] = ()  # what was left out or assumed

    @property
    def step_seconds(self) -> float:
        """Mean over the steps of the longest window of any rank."""
        longest: dict[str, float] = {}
        for each in self.breakdown:
            longest[each.step] = max(longest.get(each.step, 0.0), each.window_seconds)
        return sum(longest.values()) / len(longest) if longest else 0.0
