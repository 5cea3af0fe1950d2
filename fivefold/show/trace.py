"""The spans of a step as a trace in the Trace Event Format, which Perfetto and chrome://tracing open.

    {"name": "F0.3", "cat": "F", "ph": "X", "ts": 1500.0, "dur": 620.0, "pid": 0, "tid": 0}      microseconds

A process per pipeline rank. The messages that nothing hides end the span that they belong to, on a line below it.
Source: the format's description, "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fivefold.layout.spans import Span
from fivefold.record import Fault


def events(rows: Sequence[Sequence[Span]]) -> Iterator[dict[str, Any]]:
    """Names of processes and lines, then the spans."""
    for rank, row in enumerate(rows):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for line, name in enumerate(("step", "messages that nothing hides")):
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": line, "args": {"name": name}}
        for span in row:
            known = {"stage": span.stage, "micro_batch": span.micro_batch} if span.stage >= 0 else {}
            yield _event(span.name, span.kind, rank, 0, start=span.start, end=span.end, known=known)
            if span.messages:
                name = ", ".join(span.axes)
                yield _event(name, "messages", rank, 1, start=span.end - span.messages, end=span.end, known={})


def _event(
    name: str, category: str, rank: int, line: int, *, start: float, end: float, known: dict[str, int]
) -> dict[str, Any]:
    return {
        "name": name, "cat": category, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6,
        "pid": rank, "tid": line, "args": known,
    }  # fmt: skip


def save(rows: Sequence[Sequence[Span]], path: Path, *, about: dict[str, str]) -> None:
    """Write the trace, with ``about`` as its metadata."""
    whole = {"traceEvents": list(events(rows)), "displayTimeUnit": "ms", "otherData": about}
    try:
        path.write_text(json.dumps(whole), encoding="utf-8")
    except OSError as error:
        raise Fault(f"{path}: the trace cannot be written: {error.strerror}") from None
