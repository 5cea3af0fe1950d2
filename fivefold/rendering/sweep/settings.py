"""The settings that a sweep varies, and its best rows by these settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.rendering.question import describe_job
from fivefold.results.sweep_row import SweepRow
from fivefold.units import choose_byte_unit, show_count

Key = TypeVar("Key", bound=Hashable)
AXES = ("model", "machine", "ranks", "sequence", "batch", "precision", "stack")


def list_varied_axes(rows: Sequence[SweepRow]) -> list[str]:
    """Return the axes of settings with two or more values; without the batch if it follows from the sequence."""
    axes = [axis for axis in AXES if len(list_values(rows, axis)) > 1]
    pairs = {(row.sequence, row.batch) for row in rows}
    if "batch" in axes and "sequence" in axes and len(pairs) == len(list_values(rows, "sequence")):
        axes.remove("batch")
    return axes


def list_values(rows: Sequence[SweepRow], axis: str) -> list[Any]:
    """Return the values of an axis: numbers and models by size, text in order of occurrence."""
    distinct = list(dict.fromkeys(getattr(row, axis) for row in rows))
    if axis == "model":
        sizes = {row.model: row.parameters for row in rows if row.parameters}
        return sorted(distinct, key=lambda name: sizes.get(name, 0))
    return sorted(distinct) if axis in ("ranks", "sequence", "batch") else distinct


def find_best(rows: Iterable[SweepRow], key: Callable[[SweepRow], Key]) -> dict[Key, SweepRow]:
    """Return the row with the highest MFU among those of each key that fit."""
    best_rows: dict[Key, SweepRow] = {}
    for row in rows:
        if row.status == "fits" and (key(row) not in best_rows or get_mfu(row) > get_mfu(best_rows[key(row)])):
            best_rows[key(row)] = row
    return best_rows


def get_mfu(row: SweepRow) -> float:
    """Return the measured MFU, else the predicted one; with causal attention."""
    return row.measured_mfu_causal or row.mfu_causal or 0.0


def format_setting(row: SweepRow, axes: Sequence[str]) -> str:
    """Return the values of ``axes`` as text: ``llama3-8b, 64 ranks, batch 256``."""
    return ", ".join(format_value(axis, getattr(row, axis)) for axis in axes)


def format_value(axis: str, value: Any) -> str:
    """Return one value of an axis, with the name of the axis if it is not clear."""
    if axis == "ranks":
        return f"{value:,} rank{'s' if value != 1 else ''}"
    if axis in ("sequence", "batch"):
        return f"{axis} {value:,}"
    return str(value)


def name_with_size(row: SweepRow) -> str:
    """Return a model's name with its size."""
    return f"{row.model} ({show_count(row.parameters)})" if row.parameters else row.model


def list_fixed(rows: Sequence[SweepRow]) -> str:
    """Return what all rows share, as the subtitle of a picture."""
    changing = list_varied_axes(rows)
    axes = [axis for axis in AXES if axis not in changing and axis != "batch"]
    if "batch" not in changing and len(list_values(rows, "batch")) == 1:
        axes.append("batch")
    return format_setting(rows[0], axes) if rows else ""


def describe_rows(rows: Sequence[SweepRow]) -> str:
    """Return in one line what all rows share; the optimizer is left out, as rows do not have it."""
    if not rows:
        return ""
    shared_text = format_setting(
        rows[0], [axis for axis in ("model", "machine", "ranks") if axis not in list_varied_axes(rows)]
    )
    settings = dict.fromkeys((row.sequence, row.batch, row.precision, row.stack) for row in rows)
    fields = ("sequence", "global_batch", "precision", "stack")
    try:
        jobs = [Job.read(dict(zip(fields, row_setting, strict=True)), origin="row") for row_setting in settings]
    except UserError:  # a custom precision or stack
        return list_fixed(rows)
    return " · ".join(filter(None, (shared_text, describe_job(*jobs, open_fields=("optimizer.kind",)))))


def choose_memory_unit(rows: Sequence[SweepRow]) -> tuple[int, str]:
    """Return the unit in which the memory of rows is drawn: its bytes and its name."""
    return choose_byte_unit(max((row.peak_bytes or 0) for row in rows))
