"""Writes a simulated dry run as a Perfetto trace: per rank its scopes, modules, kernels, messages and live bytes.

    scopes     |forward of micro-batch 0      |backward of micro-batch 0
    modules    |blocks.0.attention  |blocks.0.mlp
    compute    |mm |mm |softmax …                                  dp | reduce_scatter …      live bytes ▁▃▅▇▅▃

One line per communicator, named by its axis. If there are too many kernels, the shortest are left out; small changes
of memory are left out too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, SCOPE, START, Tape
from fivefold.dry_run.time.simulation import SimulatedTapes, TimedSpan
from fivefold.rendering import trace

MAX_SPANS = 50_000  # kernels, and messages, per rank: some 15 MB
MEMORY_STEPS = 2000  # resolution of memory: the counter is written when it has changed by peak ÷ MEMORY_STEPS
SCOPE_LINE, MODULE_LINE, COMPUTE_LINE = range(3)  # line numbers; communicators follow


def write_trace(simulation: SimulatedTapes, path: Path, *, ranks: Sequence[int], metadata: dict[str, str]) -> None:
    """Write the trace of ``ranks``, which must be among the simulated ones, with ``metadata`` as its metadata."""
    trace.write((event for rank in ranks for event in _list_trace_events(simulation, rank)), path, about=metadata)


def _list_trace_events(simulation: SimulatedTapes, rank: int) -> Iterator[dict[str, Any]]:
    """Yield all trace events of one rank."""
    tape = next(tape for tape in simulation.tapes if tape.rank == rank)
    spans = list(simulation.spans(rank))
    groups = _name_communicators(tape)
    yield from trace.name_lines(rank, f"rank {rank}", ("scopes", "modules", "compute", *groups.values()))
    kernels = _select_longest([span for span in spans if span.kind == KERNEL])
    for span in spans:
        if span.kind == SCOPE:
            name = str(tape.scopes[span.list_index])
            yield trace.build_event(name, "scope", rank, SCOPE_LINE, start=span.start, end=span.end, known={})
    yield from _list_module_spans(tape, kernels)
    for span in kernels:
        kernel = tape.kernels[span.list_index]
        site = tape.sites[kernel.site]
        arguments = {
            "at": str(site),
            "shape": kernel.shape,
            "dtype": kernel.dtype,
            "flops": kernel.flops,
            "moved_bytes": kernel.moved_bytes,
        }
        name = site.operation.partition("::")[2] or kernel.kind
        yield trace.build_event(name, kernel.kind, rank, COMPUTE_LINE, start=span.start, end=span.end, known=arguments)
    lines = {group: COMPUTE_LINE + 1 + line for line, group in enumerate(groups)}
    for span in _select_longest([span for span in spans if span.kind == START]):
        message = tape.messages[span.list_index]
        arguments = {
            "at": str(tape.sites[message.site]),
            "payload_bytes": message.payload,
            "dtype": message.dtype,
            "ranks": message.members[:16] if message.peer < 0 else (rank, message.peer),
        }
        name = ("receive" if message.receives else "send") if message.collective == "p2p" else message.collective
        yield trace.build_event(
            name, message.axis, rank, lines[message.group], start=span.start, end=span.end, known=arguments
        )
    yield from _list_memory_counters(tape, simulation)


def _select_longest(spans: list[TimedSpan]) -> list[TimedSpan]:
    """Return the ``MAX_SPANS`` longest spans, of equal ones the first, in their order."""
    if len(spans) <= MAX_SPANS:
        return spans
    longest = sorted(range(len(spans)), key=lambda index: spans[index].start - spans[index].end)
    return [spans[index] for index in sorted(longest[:MAX_SPANS])]


def _name_communicators(tape: Tape) -> dict[str, str]:
    """Return the name of each communicator of a rank: its axis, numbered if the axis has several."""
    axes = dict.fromkeys((message.axis, message.group) for message in tape.messages)
    axis_names = [axis for axis, _ in axes]
    counts: dict[str, int] = {}
    names = {}
    for axis, group in sorted(axes):
        counts[axis] = counts.get(axis, 0) + 1
        names[group] = f"{axis} {counts[axis]}" if axis_names.count(axis) > 1 else axis
    return names


def _list_module_spans(tape: Tape, kernels: list[TimedSpan]) -> Iterator[dict[str, Any]]:
    """Yield one span per run of kernels of the same module."""
    first_span: TimedSpan | None = None
    module, end = "", 0.0
    for span in [*kernels, None]:
        span_module = tape.sites[tape.kernels[span.list_index].site].module if span else None
        if first_span is not None and span_module != module:
            if module:
                yield trace.build_event(
                    module, "module", tape.rank, MODULE_LINE, start=first_span.start, end=end, known={}
                )
            first_span = None
        if span is not None:
            first_span = first_span or span
            module = span_module or ""
            end = span.end


def _list_memory_counters(tape: Tape, simulation: SimulatedTapes) -> Iterator[dict[str, Any]]:
    """Yield live bytes as a counter: at its peak, and whenever it has changed by more than a step."""
    rows = np.frombuffer(tape.events, dtype=np.int64).reshape(-1, 4)
    sizes = dict(rows[rows[:, 0] == ALLOC, 1:3].tolist())
    chosen = np.flatnonzero((rows[:, 0] == ALLOC) | (rows[:, 0] == FREE))
    changes = [size if kind == ALLOC else -sizes[storage] for kind, storage, size, _ in rows[chosen].tolist()]
    live = np.cumsum(changes)
    if not len(live):
        return
    step = int(live.max()) // MEMORY_STEPS
    seconds = simulation.seconds_at(tape.rank)[chosen]
    last_written, peak = -step - 1, int(live.argmax())
    for i, (second, live_bytes) in enumerate(zip(seconds.tolist(), live.tolist(), strict=True)):
        if abs(live_bytes - last_written) > step or i == peak:
            last_written = live_bytes
            yield {
                "name": "live",
                "ph": "C",
                "pid": tape.rank,
                "ts": round(second * 1e6, 3),
                "args": {"bytes": live_bytes},
            }
