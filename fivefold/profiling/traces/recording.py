"""One rank's trace as columns of numbers: kernels, launches, operators, annotations and the messages they describe.

Times are integer nanoseconds from ``origin``. Names and lanes (streams, threads) are numbered. All else is skipped.
Source: pytorch/kineto, libkineto/src/output_json.cpp (the keys), and torch.profiler's own export of CPU events.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fivefold.errors import UserError
from fivefold.profiling.traces.json_stream import JsonStream

KERNEL, COPY, LAUNCH, OPERATOR, ANNOTATION = range(5)
KINDS = {
    "kernel": KERNEL, "Kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": COPY, "Memcpy": COPY, "Memset": COPY,
    "cpu_op": OPERATOR, "Operator": OPERATOR, "user_annotation": ANNOTATION,
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "Runtime"), LAUNCH),
}  # fmt: skip
MAX_TIME_NS = 1 << 61  # largest time in ns (73 years), or id
DATA_LOADING = "enumerate(DataLoader)#"  # begin of the annotation of torch.utils.data.DataLoader's __next__
KEPT_ANNOTATIONS = ("ProfilerStep", "Optimizer.step#", DATA_LOADING, "gloo:")  # annotations that are kept
ELEMENT_BYTES = {
    "double": 8, "long": 8, "long int": 8, "int64": 8, "float64": 8, "float": 4, "int": 4, "float32": 4, "int32": 4,
    "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "float16": 2, "short": 2, "short int": 2,
    "char": 1, "signed char": 1, "byte": 1, "unsigned char": 1, "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "complexfloat": 8,
}  # fmt: skip
SAME = {
    "_allgather_base": "all_gather", "allgather_into_tensor_coalesced": "all_gather", "allgather": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather", "all_gather_into_tensor": "all_gather", "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce", "_reduce_scatter_base": "reduce_scatter", "_broadcast_oop": "broadcast",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_allv": "all_to_all", "alltoall": "all_to_all", "alltoall_base": "all_to_all", "all_to_all_single":
    "all_to_all", "_reduce_oop": "reduce", "recvanysource": "recv", "send_": "send", "recv_": "recv",
}  # fmt: skip


ALL_REDUCES = ("c10d::allreduce_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_tensor_coalesced_")


class RecordedMessage(NamedTuple):
    """The message that an event describes; ``event`` is the row of the event. Bytes are those of one rank."""

    event: int
    collective: str
    bytes_in: int | None
    bytes_out: int | None
    group: str  # name of the process group; "" if not stated
    about: str  # description of the process group
    ranks: int | None  # size of the group
    members: tuple[int, ...]  # global ranks; empty if not stated
    source: int = -1
    target: int = -1
    sequence: int = -1


@dataclass
class TraceEvents:
    """The events of a file in columns; ``kind`` is one of KERNEL … ANNOTATION."""

    path: Path
    metadata: dict[str, Any]
    origin: int  # ns on the clock of ``baseTimeNanoseconds``
    kind: npt.NDArray[np.int8]
    name: npt.NDArray[np.int64]
    lane: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    correlation: npt.NDArray[np.int64]  # 0 if it has none
    names: list[str]
    lanes: list[tuple[Any, Any]]  # process or device, thread or stream
    messages: list[RecordedMessage]
    remarks: list[str] = field(default_factory=list)

    @cached_property
    def has_gpu_kernels(self) -> bool:
        """Return whether kernels of a GPU were recorded."""
        return bool((self.kind == KERNEL).any())


class _Columns:
    """The columns into which the events of a file are collected."""

    def __init__(self) -> None:
        self.kind = array("b")
        self.name, self.lane, self.start, self.duration, self.correlation = (array("q") for _ in range(5))
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[Any, Any], int] = {}
        self.messages: list[RecordedMessage] = []
        self.first: int | None = None  # µs
        self.unread = 0

    def add(self, event: dict[str, Any]) -> None:
        """Add one event of the Trace Event Format if it is of a kind that is kept; ignore any other.

        Raises KeyError, TypeError or ValueError if it is malformed.
        """
        kind = KINDS.get(event.get("cat", ""), -1) if event.get("ph") == "X" else -1
        if kind < 0:
            return
        name = event["name"]
        if not isinstance(name, str):
            raise TypeError
        if kind in (OPERATOR, ANNOTATION):  # before 1.11 PyTorch wrote annotations as operators
            if name.startswith(KEPT_ANNOTATIONS):
                kind = ANNOTATION
            elif kind == ANNOTATION:
                return
        timestamp, duration_us = event["ts"], event["dur"]
        first = (
            math.floor(timestamp) if self.first is None else self.first
        )  # raises for NaN and infinity, as does round
        start = round((timestamp - first) * 1000)
        duration = round(duration_us * 1000)
        args = event.get("args") or {}
        correlation = int(args.get("correlation") or 0)
        if not 0 <= duration < MAX_TIME_NS or max(abs(start), abs(first * 1000), abs(correlation)) >= MAX_TIME_NS:
            raise ValueError
        lane = (event.get("pid"), args.get("stream", event.get("tid")) if kind <= COPY else event.get("tid"))
        row, self.first = len(self.kind), first
        message = _parse_message(row, kind, name, args)
        self.lane.append(self.lanes.setdefault(lane, len(self.lanes)))
        self.kind.append(kind)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.start.append(start)
        self.duration.append(duration)
        self.correlation.append(correlation)
        if message is not None:
            self.messages.append(message)


def read_trace(path: Path, *, report: Callable[[int], object] = lambda _: None) -> TraceEvents:
    """Read a trace file; raises ``UserError`` if it is no trace, or holds neither a kernel nor an operator.

    ``report`` is called with the bytes read so far.
    """
    columns = _Columns()
    skipped: Counter[str] = Counter()
    with JsonStream(path, report=report) as stream:
        for event in stream.events():
            try:
                columns.add(event)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                skipped["unread"] += 1
    kind = np.frombuffer(columns.kind, np.int8)
    if not np.isin(kind, (KERNEL, OPERATOR)).any():
        cut = f" before its cut ({stream.cut})" if stream.cut else ""
        raise UserError(f"{path} holds no kernel and no operator{cut}; record with torch.profiler, CPU and CUDA")
    name, lane, correlation, start, duration = (
        np.frombuffer(column, np.int64)
        for column in (columns.name, columns.lane, columns.correlation, columns.start, columns.duration)
    )
    recording = TraceEvents(
        path=path,
        metadata=stream.metadata,
        kind=kind,
        name=name,
        lane=lane,
        start=start,
        end=start + duration,
        correlation=correlation,
        origin=(columns.first or 0) * 1000 + _parse_ns(stream.metadata.get("baseTimeNanoseconds")),
        names=list(columns.names),
        lanes=list(columns.lanes),
        messages=columns.messages,
    )
    _name_as_asked(recording)
    if stream.cut:
        recording.remarks.append(f"{path.name}: {stream.cut}; read up to there, {len(kind):,} events")
    lost_events = stream.broken + skipped["unread"]
    if lost_events:
        recording.remarks.append(f"{path.name}: {lost_events:,} broken event{'s' if lost_events > 1 else ''} left out")
    return recording


def _name_as_asked(recording: TraceEvents) -> None:
    """Rename gloo's reduce-scatters, which it runs and records as all-reduces.

    They are identified by the order of c10d's calls.
    """
    call_names = {recording.names.index(name): name for name in ALL_REDUCES if name in recording.names}
    calls = np.flatnonzero((recording.kind == OPERATOR) & np.isin(recording.name, list(call_names)))
    all_reduce_indices = [
        index for index, message in enumerate(recording.messages) if message.collective == "all_reduce"
    ]
    if recording.has_gpu_kernels or len(calls) != len(all_reduce_indices):
        return
    all_reduce_indices.sort(key=lambda index: int(recording.start[recording.messages[index].event]))
    for call, index in zip(
        calls[np.argsort(recording.start[calls], kind="stable")].tolist(), all_reduce_indices, strict=True
    ):
        if "reduce_scatter" in call_names[int(recording.name[call])]:
            recording.messages[index] = recording.messages[index]._replace(collective="reduce_scatter")


def _parse_ns(value: object) -> int:
    """Return a time in ns; 0 if the value is not a valid integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_TIME_NS else 0


def _parse_message(row: int, kind: int, name: str, args: dict[str, Any]) -> RecordedMessage | None:
    """Return the message that the ``args`` of an NCCL kernel or a gloo annotation describe; None for all others."""
    if kind == KERNEL and "Collective name" in args:
        return _read_message(row, args)
    if kind == ANNOTATION and name.startswith("gloo:"):
        size = _count_dims_bytes(args.get("Input Dims"), args.get("Input type"))
        collective = name.removeprefix("gloo:").lower()
        return RecordedMessage(row, SAME.get(collective, collective), size, None, "", "", None, ())
    return None


def _read_message(row: int, args: dict[str, Any]) -> RecordedMessage:
    """Read group, ranks and bytes of a message from the arguments of its kernel."""
    element_bytes = ELEMENT_BYTES.get(str(args.get("dtype", "")).lower())
    sizes = [args.get(key) for key in ("In msg nelems", "Out msg nelems")]
    bytes_in, bytes_out = (element_bytes * size if element_bytes and isinstance(size, int) else None for size in sizes)
    collective = str(args["Collective name"]).lower()
    ranks = args.get("Group size")
    return RecordedMessage(
        row,
        SAME.get(collective, collective),
        bytes_in,
        bytes_out,
        group=str(args.get("Process Group Name", "")),
        about=str(args.get("Process Group Description", "")),
        ranks=ranks if isinstance(ranks, int) and ranks > 0 else None,
        members=parse_ranks(args.get("Process Group Ranks")),
        source=_rank(args.get("Src Rank")),
        target=_rank(args.get("Dst Rank")),
        sequence=_rank(args.get("Seq")),
    )


def parse_ranks(value: object) -> tuple[int, ...]:
    """Parse ``"[0, 1]"`` or ``[0, 1]`` into ascending ranks; an abbreviated list ("[0, 1, ..., 7]") gives none."""
    return _parse_ranks(str(value or ""))


@lru_cache(maxsize=4096)  # every message of a group repeats it
def _parse_ranks(text: str) -> tuple[int, ...]:
    words = text.strip("[]").split(",")
    try:
        return tuple(sorted({int(word) for word in words}))
    except ValueError:
        return ()


def _rank(value: object) -> int:
    try:
        return int(value) if isinstance(value, int | str) else -1
    except ValueError:
        return -1


def _count_dims_bytes(dims: object, kinds: object) -> int | None:
    """Return the bytes of tensors from record_shapes: [[64, 256]] and ["float"]; None if they are not stated."""
    if not isinstance(dims, list) or not isinstance(kinds, list) or len(dims) != len(kinds) or not dims:
        return None
    total = 0
    for shape, kind in zip(dims, kinds, strict=True):
        size = ELEMENT_BYTES.get(str(kind).lower())
        if size is None:
            return None
        total += int(math.prod(shape)) * size
    return total
