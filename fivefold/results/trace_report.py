"""The analysis of a real run's traces, as data: ``profiling/traces`` builds it, ``show`` prints and draws it.

window = compute + exposed communication + memcpy alone + idle; all in seconds, for one rank and one step

Communication concurrent with compute is overlapped, the rest is exposed. Memcpy alone: nothing runs concurrently.
"""

from __future__ import annotations

from itertools import groupby
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.display import Shown
from fivefold.record import Record
from fivefold.results.advice import StepAdvice
from fivefold.results.step_comparison import QuantityComparison
from fivefold.step import Step

Category = Literal["GEMM", "attention", "elementwise", "norm", "communication", "memcpy", "optimizer", "other"]
Activity = Literal["compute", "communication", "memcpy", "host", "waiting"]


class Breakdown(Record):
    """Seconds of a rank's window. Several streams or threads at once count once.

    ``idle_host_seconds``: nothing had been launched; ``idle_waiting_seconds``: work was queued behind something. The
    rest of ``idle_seconds`` has no launch in the trace. Of ``idle_host_seconds`` the host spends
    ``idle_loading_seconds`` in a DataLoader, ``idle_allocation_seconds`` allocating device memory, and
    ``idle_blocked_seconds`` within a copy or a synchronization. ``waiting_seconds``: exposed communication before the
    last rank had arrived, None where the traces of the others are missing.
    """

    rank: NonNegativeInt
    step: str  # "ProfilerStep#3", or "all" for the full trace
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
    optimizer_seconds: NonNegativeFloat  # part of the compute
    waiting_seconds: NonNegativeFloat | None = None
    idle_loading_seconds: NonNegativeFloat = 0.0
    idle_allocation_seconds: NonNegativeFloat = 0.0
    idle_blocked_seconds: NonNegativeFloat = 0.0

    @property
    def overlapped_seconds(self) -> float:
        """Return the seconds of communication that run concurrently with compute."""
        return self.communication_seconds - self.exposed_seconds

    @property
    def overlap(self) -> float | None:
        """Return the overlapped share of the communication; None without communication."""
        return self.overlapped_seconds / self.communication_seconds if self.communication_seconds else None


class KernelLine(Record):
    """A kernel (on CPU: an outermost operator), or a full category; mean over ranks and steps.

    ``largest``: the kernel that takes most of a category; "" for a kernel.
    """

    category: Category
    name: str = ""
    largest: str = ""
    calls: NonNegativeFloat
    seconds: NonNegativeFloat
    longest_seconds: NonNegativeFloat


class MessageLine(Record):
    """A collective over one group, or over groups of one description; mean over ranks and steps.

    Bytes are those of the full tensor, bandwidths as in nccl-tests, from the last arrival on if that is known.
    """

    group: str
    axis: str = ""  # axis of the layout, where one is given
    ranks: PositiveInt | None = None  # size of the group; None if the trace does not state it
    collective: str
    calls: NonNegativeFloat
    bytes: NonNegativeFloat | None = None  # of all calls together
    seconds: NonNegativeFloat
    waiting_seconds: NonNegativeFloat | None = None  # part of them, before the last rank had arrived
    algorithm_bandwidth: NonNegativeFloat | None = None  # bytes/s
    bus_bandwidth: NonNegativeFloat | None = None
    link: str = ""
    link_bandwidth: NonNegativeFloat | None = None


class PathPart(Record):
    """The contribution of one rank to the critical path of a step; mean over steps."""

    rank: NonNegativeInt
    activity: Activity
    name: str = ""
    seconds: NonNegativeFloat


class Arrivals(Record):
    """Collectives in which a rank was the last to arrive, and the total time that the others' kernels waited for it."""

    rank: NonNegativeInt
    last: NonNegativeInt
    matched: NonNegativeInt
    others_waited_seconds: NonNegativeFloat


class TraceReport(Record):
    """All results that are read from the traces of a job."""

    device: Literal["GPU", "CPU"]
    world: PositiveInt
    ranks: tuple[NonNegativeInt, ...]
    files: tuple[str, ...]
    steps: tuple[str, ...]
    total: tuple[Breakdown, ...]  # by rank: from first to last kernel
    breakdown: tuple[Breakdown, ...]  # by rank and step
    categories: tuple[KernelLine, ...]
    kernels: tuple[KernelLine, ...]
    messages: tuple[MessageLine, ...]
    path_seconds: NonNegativeFloat = 0.0
    path: tuple[PathPart, ...] = ()  # by rank
    path_names: tuple[PathPart, ...] = ()  # the largest
    arrivals: tuple[Arrivals, ...] = ()
    remarks: tuple[str, ...] = ()  # what was left out or assumed

    def average_steps(self) -> list[Breakdown]:
        """Return one breakdown per rank: the mean of its steps."""
        means = []
        for _, breakdowns in groupby(self.breakdown, key=lambda step: step.rank):
            steps = list(breakdowns)
            names = [name for name in Breakdown.model_fields if name.endswith("_seconds")]
            seconds_by_name = {name: [getattr(step, name) for step in steps] for name in names}
            mean = {
                name: None if None in step_seconds else sum(step_seconds) / len(step_seconds)
                for name, step_seconds in seconds_by_name.items()
            }
            means.append(steps[0].replace(**mean))
        return means

    @property
    def step_seconds(self) -> float:
        """Return the mean over the steps of the longest window of any rank, in seconds."""
        longest: dict[str, float] = {}
        for window in self.breakdown:
            longest[window.step] = max(longest.get(window.step, 0.0), window.window_seconds)
        return sum(longest.values()) / len(longest) if longest else 0.0


class Traced(TraceReport, Shown):
    """A report of traces; ``against``: each quantity of ``predicted`` compared with the traces.

    ``advice``: the largest loss that can be avoided; None if no step takes any time.
    """

    drawn_by: ClassVar[str] = "fivefold.rendering.html:render_traced"

    against: tuple[QuantityComparison, ...] = ()
    predicted: Step | None = None
    advice: StepAdvice | None = None

    def line(self) -> str:
        """Return the number of ranks and steps, as one line."""
        return f"of {len(self.ranks)} of {self.world} ranks, {len(self.steps)} steps, {self.device}"

    def table(self) -> list[dict[str, object]]:
        """Return one row per rank and step."""
        return [breakdown.model_dump(mode="json") for breakdown in self.breakdown]
