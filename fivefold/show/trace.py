"""Writes the spans of a step in the Trace Event Format, which Perfetto and chrome://tracing open.

    {"name": "F0.3", "cat": "F", "ph": "X", "ts": 1500.0, "dur": 620.0, "pid": 0, "tid": 0}      microseconds

One process per pipeline rank. Exposed messages are drawn at the end of their span, on a line below it.
Source: the format's description, "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.layout.spans import Span
from fivefold.record import Fault


def events(rows: Sequence[Sequence[Span]]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of all ranks: names of processes and lines, then the spans."""
    for rank, row in enumerate(rows):
        yield from names(rank, f"pipeline rank {rank}", ("step", "messages that nothing hides"))
        for span in row:
            known = {"stage": span.stage, "micro_batch": span.micro_batch} if span.stage >= 0 else {}
            yield event(span.name, span.kind, rank, 0, start=span.start, end=span.end, known=known)
            if span.messages:
                name = ", ".join(span.axes)
                yield event(name, "messages", rank, 1, start=span.end - span.messages, end=span.end, known={})


def names(process: int, name: str, lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the metadata events that name a process and its lines (threads)."""
    yield {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}}
    for line, called in enumerate(lines):
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": line, "args": {"name": called}}


def event(
    name: str, category: str, process: int, line: int, *, start: float, end: float, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a complete event ("X"); ``start`` and ``end`` in seconds, written in µs to the nanosecond."""
    return {
        "name": name, "cat": category, "ph": "X", "ts": round(start * 1e6, 3), "dur": round((end - start) * 1e6, 3),
        "pid": process, "tid": line, "args": known,
    }  # fmt: skip


def save(rows: Sequence[Sequence[Span]], path: Path, *, about: dict[str, str]) -> None:
    """Write the trace of ``rows`` (spans per pipeline rank) to ``path``, with ``about`` as its metadata."""
    write(events(rows), path, about=about)


def write(found: Iterable[dict[str, Any]], path: Path, *, about: dict[str, str]) -> None:
    """Write events one by one, so that they are never all in memory; raises ``Fault`` if the file cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"traceEvents":[')
            for index, each in enumerate(found):
                file.write((",\n" if index else "\n") + json.dumps(each, separators=(",", ":")))
            file.write(f'\n],"displayTimeUnit":"ms","otherData":{json.dumps(about)}}}\n')
    except OSError as error:
        raise Fault(f"{path}: the trace cannot be written: {error.strerror}") from None
