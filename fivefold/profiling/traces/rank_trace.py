"""One rank's trace, classified: compute, communication and copies, when each was launched, and where the steps are.

GPU      kernels and copies on streams; the window of a step ends with the last kernel launched in it
CPU      outermost operators (ATen and custom ones) on threads, gloo's messages; the window of a step is its annotation
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import UserError
from fivefold.profiling.traces.intervals import Intervals, Nanoseconds, merge_intervals
from fivefold.profiling.traces.recording import ANNOTATION, COPY, KERNEL, LAUNCH, OPERATOR, RecordedMessage, TraceEvents
from fivefold.results.trace_report import Category

KERNEL_NAMES: tuple[tuple[Category, str], ...] = (
    ("communication", r"nccl|rccl|gloo:|deep_ep|ep::(intra|inter)node::|nvshmem|multimem|(one|two)_shot_all_reduce"
                      r"|cross_device_reduce"),
    ("memcpy", r"^memcpy|^memset|^aten::(copy_|_to_copy|to|contiguous|clone|zero_|zeros|zeros_like|fill_)$"),
    ("optimizer", r"adam|multi_?tensor|_foreach|lamb_|sgd_|muon|optimizer"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("GEMM", r"(?<!fb)gemm|gemv|cutlass|nvjet|xmma|wgmma|cublas|splitk|matmul|_mm\b|::b?mm|addmm|baddbmm|linear"
             r"|convolution|conv[123]d|^triton_(mm|bmm|tem)|cijk_"),
    ("norm", r"norm"),
    ("elementwise", r"elementwise|pointwise|^triton_poi|cpp_fused|::(add|sub|mul|div|pow|neg|exp|log|sqrt|rsqrt|sigmoid"
                    r"|silu|gelu|relu|tanh|where|square|rope|threshold|masked_fill|clamp|lerp|addcmul|addcdiv)(_|_backward)?$"),
)  # fmt: skip
PATTERNS = tuple((category, re.compile(pattern, re.IGNORECASE)) for category, pattern in KERNEL_NAMES)
COLLECTIVE = next(pattern for category, pattern in PATTERNS if category == "communication")
WRAPPERS = {"autograd", "torch", "c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "profiler"}
COMPUTE, COMMUNICATION, MEMCPY = range(3)
UNKNOWN = np.iinfo(np.int64).max  # launch time of a kernel whose launch is not in the trace


class StepWindow(NamedTuple):
    """The time of a step on one rank, in the rank's nanoseconds.

    ``number`` is that of its ProfilerStep, or -1 for the full trace.
    """

    name: str
    number: int
    start: int
    end: int


@dataclass
class RankEvents:
    """The rows that run on a rank, ordered by start.

    ``activity`` is COMPUTE, COMMUNICATION or MEMCPY; ``launch`` is when the row was launched. ``step``: number of the
    ProfilerStep in which it was launched, -1 for none. ``message``: index of the row's message, or -1.
    """

    rank: int
    recording: TraceEvents
    name: npt.NDArray[np.int64]
    lane: npt.NDArray[np.int64]
    activity: npt.NDArray[np.int8]
    start: Nanoseconds
    end: Nanoseconds
    launch: Nanoseconds
    step: npt.NDArray[np.int64]
    message: npt.NDArray[np.int64]
    in_optimizer: npt.NDArray[np.bool_]
    windows: tuple[StepWindow, ...]
    shift: int = 0  # ns to add to get the clock of all ranks

    @property
    def names(self) -> list[str]:
        """Return the names by number."""
        return self.recording.names

    @property
    def messages(self) -> list[RecordedMessage]:
        """Return the messages with the fields that the trace records of them."""
        return self.recording.messages

    def get_intervals(self, activity: int) -> Intervals:
        """Return when any row of a kind runs."""
        rows = self.activity == activity
        return merge_intervals(self.start[rows], self.end[rows])

    def rows_in(self, window: StepWindow) -> slice:
        """Return the rows that begin in a window."""
        first, last = np.searchsorted(self.start, (window.start, window.end))
        return slice(int(first), int(last))

    def categories(self) -> list[Category]:
        """Return the category by name number; rows within the optimizer are marked in ``in_optimizer``."""
        return [classify_kernel(name) for name in self.names]

    def full_window(self) -> StepWindow:
        """Return the window from the start of the first row to the end of the last one."""
        return StepWindow("all", -1, int(self.start.min()), int(self.end.max()))


def rank_trace(recording: TraceEvents, *, rank: int) -> RankEvents:
    """Classify the rows of a recording."""
    rows = _select_gpu_rows(recording) if recording.has_gpu_kernels else _select_cpu_rows(recording)
    if not len(rows):
        raise UserError(f"{recording.path} has no operator that computes; record complete steps with torch.profiler")
    rows = rows[np.argsort(recording.start[rows], kind="stable")]
    activity = _classify_rows(recording, rows)
    launch = _find_launches(recording, rows) if recording.has_gpu_kernels else recording.start[rows]
    by_event = np.full(len(recording.kind), -1, np.int64)
    by_event[[message.event for message in recording.messages]] = np.arange(len(recording.messages))
    steps = _find_annotations(recording, "ProfilerStep")
    step = _find_windows(launch, steps)
    windows = (
        _build_gpu_windows(recording, steps, step, rows)
        if recording.has_gpu_kernels
        else _build_cpu_windows(recording, steps)
    )
    numbers = np.array([window.number for window in steps] + [-1], np.int64)
    return RankEvents(
        rank=rank,
        recording=recording,
        name=recording.name[rows],
        lane=recording.lane[rows],
        activity=activity,
        start=recording.start[rows],
        end=recording.end[rows],
        launch=launch,
        step=numbers[step],
        message=by_event[rows],
        windows=windows,
        in_optimizer=_find_windows(launch, _find_annotations(recording, "Optimizer.step#")) >= 0,
    )


def _select_gpu_rows(recording: TraceEvents) -> npt.NDArray[np.int64]:
    return np.flatnonzero((recording.kind == KERNEL) | (recording.kind == COPY))


def _select_cpu_rows(recording: TraceEvents) -> npt.NDArray[np.int64]:
    """Return the outermost operators of every thread, and gloo's messages."""
    computes = np.array([_is_compute_op(name) for name in recording.names])
    rows = np.flatnonzero((recording.kind == OPERATOR) & computes[recording.name])
    order = rows[np.lexsort((-recording.end[rows], recording.start[rows], recording.lane[rows]))]
    outer = np.ones(len(order), np.bool_)
    for lane in np.unique(recording.lane[order]):  # few threads
        positions = np.flatnonzero(recording.lane[order] == lane)
        reach = np.maximum.accumulate(recording.end[order[positions]])
        outer[positions[1:]] = recording.start[order[positions[1:]]] >= reach[:-1]
    gloo = np.array([name.startswith("gloo:") for name in recording.names])
    return np.concatenate((order[outer], np.flatnonzero((recording.kind == ANNOTATION) & gloo[recording.name])))


def _is_compute_op(name: str) -> bool:
    """Return whether an operator computes, as opposed to wrapping others, or starting or awaiting a message."""
    space, colons, _ = name.partition("::")
    if colons:
        return space not in WRAPPERS
    return name.startswith(("cpp_fused", "graph_", "triton_")) or "CompiledFxGraph" in name


def _classify_rows(recording: TraceEvents, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    kind = recording.kind[rows]
    is_communication = np.array([is_communication_kernel(name) for name in recording.names])[recording.name[rows]]
    activity = np.where(kind == COPY, MEMCPY, np.where(is_communication, COMMUNICATION, COMPUTE)).astype(np.int8)
    message_rows = [message.event for message in recording.messages]  # includes kernels that are not recognized by name
    activity[np.isin(rows, message_rows)] = COMMUNICATION
    return activity


def _find_launches(recording: TraceEvents, rows: npt.NDArray[np.int64]) -> Nanoseconds:
    """Return when each row had been launched, at the latest when it begins; UNKNOWN if its launch is not in the trace.

    A row is launched when the runtime's call returns: during a long one, such as the copy of pageable memory or the
    launch of a large graph, the host is at work and nothing is queued.
    """
    calls = np.flatnonzero((recording.kind == LAUNCH) & (recording.correlation != 0))
    calls = calls[np.argsort(recording.correlation[calls], kind="stable")]
    ids = recording.correlation[calls]
    row_ids = recording.correlation[rows]
    positions = np.searchsorted(ids, row_ids)
    is_known = (row_ids != 0) & (positions < len(ids))
    is_known[is_known] = ids[positions[is_known]] == row_ids[is_known]
    launch = np.full(len(rows), UNKNOWN)
    known_calls = calls[positions[is_known]]
    begins = np.minimum(recording.end[known_calls], recording.start[rows[is_known]])
    launch[is_known] = np.maximum(recording.start[known_calls], begins)
    return launch


def _find_annotations(recording: TraceEvents, begins: str) -> list[StepWindow]:
    """Return the annotations whose name begins with ``begins``, by start; of those that overlap only the first."""
    rows = np.flatnonzero(recording.kind == ANNOTATION)
    rows = rows[np.argsort(recording.start[rows], kind="stable")]
    windows: list[StepWindow] = []
    for row in rows.tolist():
        name = recording.names[recording.name[row]]
        start = int(recording.start[row])
        end = int(recording.end[row])
        if name.startswith(begins) and (not windows or start >= windows[-1].end):
            number = re.search(r"#\s*(\d+)", name)
            windows.append(StepWindow(name, int(number[1]) if number else len(windows), start, end))
    return windows


def _find_windows(times: Nanoseconds, windows: list[StepWindow]) -> npt.NDArray[np.int64]:
    """Return the index of the window that holds each time, -1 for none."""
    if not windows:
        return np.full(len(times), -1, np.int64)
    starts, ends = (np.array([getattr(window, side) for window in windows], np.int64) for side in ("start", "end"))
    indices = np.searchsorted(starts, times, side="right") - 1
    return np.where((indices >= 0) & (times < ends[np.maximum(indices, 0)]), indices, -1)


def _build_gpu_windows(
    recording: TraceEvents, steps: list[StepWindow], step: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[StepWindow, ...]:
    """Return consecutive windows, each up to the end of the last kernel that its step launched, without empty ones.

    The first begins with its annotation, or when what was launched before has ended.
    """
    windows: list[StepWindow] = []
    start = steps[0].start if steps else 0
    if steps:
        launched_before = rows[(step == -1) & (recording.start[rows] < steps[0].start)]
        start = max(start, int(recording.end[launched_before].max(initial=start)))
    for index, window in enumerate(steps):
        end = int(recording.end[rows[step == index]].max(initial=start))
        if end > start:
            windows.append(StepWindow(window.name, window.number, start, end))
        start = end
    return tuple(windows)


def _build_cpu_windows(recording: TraceEvents, steps: list[StepWindow]) -> tuple[StepWindow, ...]:
    """Return the annotations, each extended to the beginning of the next."""
    ends = [window.start for window in steps[1:]] + [window.end for window in steps[-1:]]
    return tuple(window._replace(end=end) for window, end in zip(steps, ends, strict=True))


def classify_kernel(name: str) -> Category:
    """Return the category of a kernel's or operator's name, by the first row that matches; ``other`` if none does.

    Whatever is launched within ``Optimizer.step`` counts as the optimizer, regardless of its name.
    """
    return next((name_category for name_category, pattern in PATTERNS if pattern.search(name)), "other")


def is_communication_kernel(name: str) -> bool:
    """Return whether a GPU kernel of this name moves data between ranks."""
    return COLLECTIVE.search(name) is not None
