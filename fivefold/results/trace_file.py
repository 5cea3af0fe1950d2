"""The traces of a run as files: ``trace/rank0.json`` … in its folder, each written by its own rank, with spans as rows.

{"rank": 0, "world": 2, …, "steps": [{"step": 6, "begin": 0.0, "spans": [["F", "F0.0", …], …], "messages": […]}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fivefold.atomic_file import replace_file
from fivefold.bounded_file import ROWS_BYTES, read_bytes
from fivefold.errors import UserError
from fivefold.results.spans import RankStep, RankTrace, Span, TracedMessage

FOLDER, PLANNED = "trace", "planned.json"  # in the run's folder
RETRACE_ADVICE = "train again with --trace"


def write(trace: RankTrace, folder: Path) -> Path:
    """Write one rank's trace into its run's ``folder``, over an earlier one; raises ``RunFailure`` on failure."""
    path = folder / FOLDER / f"rank{trace.rank}.json"
    with replace_file(path, contents="the trace", advice="the run itself is saved") as file:
        file.write_text(json.dumps(trace._asdict() | {"steps": [step._asdict() for step in trace.steps]}))
    return path


def write_planned(rows: Mapping[str, Sequence[Sequence[Span]]], folder: Path) -> None:
    """Write the spans of the predicted and the dry-run step by pipeline rank, for pictures with the traces."""
    with replace_file(folder / FOLDER / PLANNED, contents="the planned spans") as file:
        file.write_text(json.dumps(rows))


def read_planned(folder: Path) -> dict[str, list[list[Span]]]:
    """Read what ``write_planned`` has written; empty if there is no such file."""
    path = folder / FOLDER / PLANNED
    try:
        rows_by_kind = json.loads(_read_text(path)) if path.exists() else {}
        return {kind: [_read_spans(row) for row in rows] for kind, rows in rows_by_kind.items()}
    except (OSError, AttributeError, IndexError, RecursionError, TypeError, ValueError):
        raise UserError(f"{path} is damaged; {RETRACE_ADVICE}") from None


def read(folder: Path) -> list[RankTrace]:
    """Read the traces of all ranks of the run in ``folder``.

    Raises ``UserError`` if one is missing, damaged or from another run.
    """
    first = folder / FOLDER / "rank0.json"
    if not first.exists():
        raise UserError(f"{first.parent}: there is no trace; {RETRACE_ADVICE}")
    traces = [_read(first)]
    paths = [folder / FOLDER / f"rank{rank}.json" for rank in range(1, traces[0].world)]
    missing = [path.stem[4:] for path in paths if not path.exists()]
    if missing:
        names = ", ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        raise UserError(
            f"{first.parent}: of {traces[0].world} ranks {len(missing)} have no file here ({names}); copy them from "
            f"their hosts, or {RETRACE_ADVICE}"
        )
    traces += map(_read, paths)
    for path, trace in zip(paths, traces[1:], strict=True):
        if [step.step for step in trace.steps] != [step.step for step in traces[0].steps]:
            raise UserError(f"{path} has different steps from rank 0, so it belongs to another run; {RETRACE_ADVICE}")
    return traces


def _read(path: Path) -> RankTrace:
    """Read the trace of one rank; raises ``UserError`` if the file is damaged."""
    try:
        values = json.loads(_read_text(path))
        steps = tuple(_step(step) for step in values.pop("steps"))
        evaluations = tuple(_read_spans(values.pop("evaluations")))
        return RankTrace(**values, steps=steps, evaluations=evaluations)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is cut off or damaged at character {error.pos}; {RETRACE_ADVICE}") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise UserError(f"{path} is not a trace of a rank; {RETRACE_ADVICE}") from None


def _read_text(path: Path) -> str:
    """Return the text of one of our trace files, which holds a few steps of a rank."""
    return read_bytes(path, most_bytes=ROWS_BYTES).decode()


def _step(values: dict[str, Any]) -> RankStep:
    """Read one step of a trace."""
    messages = tuple(_read_message(row) for row in values["messages"])
    return RankStep(values["step"], values["begin"], tuple(_read_spans(values["spans"])), messages)


def _read_spans(rows: Sequence[Sequence[Any]]) -> list[Span]:
    return [Span(*row)._replace(axes=tuple(row[5])) for row in rows]


def _read_message(row: Sequence[Any]) -> TracedMessage:
    message = TracedMessage(*row)
    return message._replace(ranks=tuple(message.ranks), to=tuple(message.to), source=tuple(message.source))
