"""Write the spans of a step in the Trace Event Format, which Perfetto and chrome://tracing open.

    {"name": "F0.3", "cat": "F", "ph": "X", "ts": 1500.0, "dur": 620.0, "pid": 0, "tid": 0}      microseconds

There is one process per pipeline rank, and in ``list_lanes`` one per traced rank. Exposed messages of a planned span
are drawn at its end, on a line below it; traced ones from post to end, with their waits among the operations.
Source: the format's description, "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.atomic_file import replace_file
from fivefold.results.spans import RankStep, RankTrace, Span


def list_events(rows: Sequence[Sequence[Span]]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of all ranks: names of processes and lines, then the spans."""
    for rank, row in enumerate(rows):
        yield from name_lines(rank, f"pipeline rank {rank}", ("step", "messages that nothing hides"))
        yield from _iterate_planned(row, rank)


def _iterate_planned(row: Sequence[Span], process: int) -> Iterator[dict[str, Any]]:
    for span in row:
        arguments = {"stage": span.stage, "micro_batch": span.micro_batch} if span.stage >= 0 else {}
        yield build_event(span.name, span.kind, process, 0, start=span.start, end=span.end, known=arguments)
        if span.messages:
            name = ", ".join(span.axes)
            yield build_event(name, "messages", process, 1, start=span.end - span.messages, end=span.end, known={})


def list_lanes(
    measured: Sequence[RankTrace], *, predicted: Sequence[Sequence[Span]] = (), dry_run: Sequence[Sequence[Span]] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the events of one picture: the planned step, the dry run, then what each rank did, first step at 0."""
    process = 0
    for kind, rows in (("predicted", predicted), ("dry run", dry_run)):
        for rank, row in enumerate(rows):
            yield from name_lines(process, f"{kind}, pipeline rank {rank}", ("step", "messages that nothing hides"))
            yield from _iterate_planned(row, process)
            process += 1
    origin_seconds = min((step.begin for trace in measured for step in trace.steps[:1]), default=0.0)
    for trace in measured:
        lines = ("schedule", "operations and waits")
        yield from name_lines(process, f"measured, rank {trace.rank} (pipeline rank {trace.stage})", lines)
        for step in trace.steps:
            yield from _iterate_traced(step, process, since=origin_seconds)
        for span in trace.evaluations:
            if span.start >= origin_seconds:
                yield build_event(
                    span.name,
                    span.kind,
                    process,
                    0,
                    start=span.start - origin_seconds,
                    end=span.end - origin_seconds,
                    known={},
                )
        process += 1


def _iterate_traced(step: RankStep, process: int, *, since: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one step of one rank."""
    start = step.begin - since
    for span in step.spans:
        line = int(span.kind in ("op", "call", "post", "wait"))
        arguments = {"own_us": round(span.own * 1e6, 3)} | ({"way": span.way} if span.way else {})
        if span.stage >= 0:
            arguments |= {"stage": span.stage, "micro_batch": span.micro_batch}
        yield build_event(
            span.name, span.kind, process, line, start=start + span.start, end=start + span.end, known=arguments
        )
    for number, message in enumerate(step.messages):
        message_arguments = {
            "sent_bytes": message.bytes,
            "ranks": message.ranks[:16],
            "waited_us": _convert_to_microseconds(message.done - message.waits),
        }
        end = message.waits if message.early else message.done
        common = {"name": message.name, "cat": message.axis, "id": f"{step.step}.{number}", "pid": process, "tid": 0}
        yield common | {"ph": "b", "ts": _convert_to_microseconds(start + message.posted), "args": message_arguments}
        yield common | {"ph": "e", "ts": _convert_to_microseconds(start + end), "args": {}}


def _convert_to_microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def name_lines(process: int, name: str, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the metadata events that name a process and its lines (threads)."""
    yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for line, line_name in enumerate(lines):
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": line, "args": {"name": line_name}}


def build_event(
    name: str, category: str, process: int, line: int, *, start: float, end: float, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a complete event ("X"); ``start`` and ``end`` in seconds, written in µs to the nanosecond."""
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": _convert_to_microseconds(start),
        "dur": _convert_to_microseconds(end - start),
        "pid": process,
        "tid": line,
        "args": known,
    }


def save(rows: Sequence[Sequence[Span]], path: Path, *, about: dict[str, str]) -> None:
    """Write the trace of ``rows`` (spans per pipeline rank) to ``path``, with ``about`` as its metadata."""
    write(list_events(rows), path, about=about)


def write(event_dicts: Iterable[dict[str, Any]], path: Path, *, about: dict[str, str]) -> None:
    """Write events one by one, so that they are never all in memory; raise ``RunFailure`` if writing fails."""
    with replace_file(path, contents="the trace") as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents":[')
        for index, trace_event in enumerate(event_dicts):
            file.write((",\n" if index else "\n") + json.dumps(trace_event, separators=(",", ":")))
        file.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(about)}}}\n')
