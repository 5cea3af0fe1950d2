"""What a sweep varies, and the best of its rows by what it varies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from fivefold.job import Job
from fivefold.record import Mistake
from fivefold.rendering.question import describe_job
from fivefold.results.sweep_row import Row
from fivefold.units import byte_unit, show_count

Key = TypeVar("Key", bound=Hashable)
AXES = ("model", "machine", "ranks", "sequence", "batch", "precision", "stack")


def varied(rows: Sequence[Row]) -> list[str]:
    """The axes of settings that have two or more values; not the batch where it follows from the sequence."""
    found = [axis for axis in AXES if len(values(rows, axis)) > 1]
    pairs = {(row.sequence, row.batch) for row in rows}
    if "batch" in found and "sequence" in found and len(pairs) == len(values(rows, "sequence")):
        found.remove("batch")
    return found


def values(rows: Sequence[Row], axis: str) -> list[Any]:
    """The values of an axis: numbers and models by size, words as they come."""
    found = list(dict.fromkeys(getattr(row, axis) for row in rows))
    if axis == "model":
        sizes = {row.model: row.parameters for row in rows if row.parameters}
        return sorted(found, key=lambda name: sizes.get(name, 0))
    return sorted(found) if axis in ("ranks", "sequence", "batch") else found


def best(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, Row]:
    """The row of the highest MFU among those of one key that fit."""
    found: dict[Key, Row] = {}
    for row in rows:
        if row.status == "fits" and (key(row) not in found or mfu(row) > mfu(found[key(row)])):
            found[key(row)] = row
    return found


def mfu(row: Row) -> float:
    """As measured, or else as predicted; with causal attention."""
    return row.measured_mfu_causal or row.mfu_causal or 0.0


def setting(row: Row, axes: Sequence[str]) -> str:
    """The values of ``axes`` in words: ``llama3-8b, 64 ranks, batch 256``."""
    return ", ".join(word(axis, getattr(row, axis)) for axis in axes)


def word(axis: str, value: Any) -> str:
    """One value of an axis, with what it is of where that is not clear."""
    if axis == "ranks":
        return f"{value:,} rank{'s' if value != 1 else ''}"
    if axis in ("sequence", "batch"):
        return f"{axis} {value:,}"
    return str(value)


def sized(row: Row) -> str:
    """A model with its size, if its name does not say it."""
    return f"{row.model} ({show_count(row.parameters)})" if row.parameters else row.model


def fixed(rows: Sequence[Row]) -> str:
    """What all rows share, as the subtitle of a picture."""
    changing = varied(rows)
    axes = [axis for axis in AXES if axis not in changing and axis != "batch"]
    if "batch" not in changing and len(values(rows, "batch")) == 1:
        axes.append("batch")
    return setting(rows[0], axes) if rows else ""


def describe_rows(rows: Sequence[Row]) -> str:
    """Return in one line what all rows share of what was asked; rows do not say their optimizer."""
    if not rows:
        return ""
    words = setting(rows[0], [axis for axis in ("model", "machine", "ranks") if axis not in varied(rows)])
    asked = dict.fromkeys((row.sequence, row.batch, row.precision, row.stack) for row in rows)
    fields = ("sequence", "global_batch", "precision", "stack")
    try:
        jobs = [Job.read(dict(zip(fields, each, strict=True)), origin="row") for each in asked]
    except Mistake:  # a precision or a software of the user's own
        return fixed(rows)
    return " · ".join(filter(None, (words, describe_job(*jobs, open_fields=("optimizer.kind",)))))


def memory_unit(rows: Sequence[Row]) -> tuple[int, str]:
    """In what the memory of rows is drawn: bytes of the unit, and its name."""
    return byte_unit(max((row.peak_bytes or 0) for row in rows))
