"""A row of a sweep: one layout of one model, machine and job, predicted and perhaps measured. Flat, like a table.

Memory is that of the fullest stage, in bytes; ``why`` and ``measured_why`` explain in one line what went wrong.
"""

from __future__ import annotations

from typing import Any, Literal

from fivefold.layout.spec import Layout
from fivefold.record import Record
from fivefold.step import Step

Status = Literal["fits", "memory", "invalid"]
Measured = Literal["", "measured", "invalid", "memory", "timeout", "failed", "waiting"]


class SweepRow(Record):
    """A row of a sweep. ``status``: fits, out of memory, or invalid. ``measured``: how the trial ended, if any."""

    model: str
    machine: str
    ranks: int
    layout: str
    recomputation: str
    sequence: int
    batch: int  # sequences per step
    precision: str
    stack: str
    status: Status
    why: str = ""
    parameters: int | None = None
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    ep: int | None = None
    v: int | None = None
    zero: int | None = None
    mbs: int | None = None
    schedule: str | None = None
    step_seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu_causal: float | None = None
    mfu_non_causal: float | None = None
    hfu: float | None = None
    compute_seconds: float | None = None
    bubble_seconds: float | None = None
    exposed_seconds: float | None = None
    optimizer_seconds: float | None = None
    time_error: float | None = None  # expected relative error
    longest_part: str | None = None
    capacity_bytes: int | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    activations_bytes: int | None = None
    temporary_bytes: int | None = None
    measured: Measured = ""
    measured_why: str = ""
    measured_step_seconds: float | None = None
    measured_tokens_per_second_per_gpu: float | None = None
    measured_mfu_causal: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def name(self) -> tuple[str, str, int, str, str, int, int, str, str]:
        """Return the columns that identify this row among all rows of a sweep."""
        return (
            self.model,
            self.machine,
            self.ranks,
            self.layout,
            self.recomputation,
            self.sequence,
            self.batch,
            self.precision,
            self.stack,
        )

    def with_measured(self, step: Step) -> SweepRow:
        """Return the row with its measured values."""
        return self.replace(
            measured="measured",
            measured_step_seconds=step.time.step_seconds,
            measured_tokens_per_second_per_gpu=step.tokens_per_second_per_gpu,
            measured_mfu_causal=step.mfu.causal,
            measured_peak_bytes=step.memory.peak_bytes,
        )


def list_layout_columns(layout: Layout) -> dict[str, Any]:
    """Return the columns that a layout fills."""
    names = ("dp", "tp", "cp", "pp", "ep", "v", "zero", "mbs", "schedule")
    return {name: getattr(layout, name) for name in names} | {"layout": str(layout), "recomputation": layout.ac}


def list_step_columns(step: Step) -> dict[str, Any]:
    """Return the columns that a predicted step fills."""
    time, mfu, memory = step.time, step.mfu, step.memory
    fullest = max(memory.stages, key=lambda stage: stage.peak_bytes)
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary", "peak")
    return {
        "parameters": step.work.parameters,
        "step_seconds": time.step_seconds,
        "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
        "mfu_causal": mfu.causal,
        "mfu_non_causal": mfu.non_causal,
        "hfu": step.hfu,
        "compute_seconds": time.compute_seconds,
        "bubble_seconds": time.bubble_seconds,
        "exposed_seconds": sum(time.exposed_seconds.values()),
        "optimizer_seconds": time.optimizer_seconds,
        "time_error": time.error,
        "longest_part": time.longest_part,
        "reserved_bytes": memory.reserved_bytes,
    } | {f"{part}_bytes": getattr(fullest, f"{part}_bytes") for part in parts}
