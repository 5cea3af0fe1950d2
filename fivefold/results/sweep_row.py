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

    model: str  # name of the model
    machine: str  # name of the machine
    ranks: int  # ranks of the layout
    layout: str  # layout in canonical order
    recomputation: str  # what is recomputed: the ac= of the layout
    sequence: int  # tokens per sequence
    batch: int  # sequences per step
    precision: str  # name of the precision recipe
    stack: str  # name of the training software
    status: Status  # whether the layout fits
    why: str = ""  # why it does not fit or is invalid
    parameters: int | None = None  # parameters of the model
    dp: int | None = None  # data parallel degree
    tp: int | None = None  # tensor parallel degree
    cp: int | None = None  # context parallel degree
    pp: int | None = None  # pipeline parallel degree
    ep: int | None = None  # expert parallel degree
    v: int | None = None  # virtual stages per pipeline rank
    zero: int | None = None  # ZeRO stage
    mbs: int | None = None  # sequences of a micro-batch
    schedule: str | None = None  # pipeline schedule
    step_seconds: float | None = None  # predicted step time
    tokens_per_second_per_gpu: float | None = None  # predicted tokens per second and GPU
    mfu_causal: float | None = None  # predicted MFU with causal attention FLOPs
    mfu_non_causal: float | None = None  # predicted MFU with FLOPs of full attention
    hfu: float | None = None  # predicted MFU with the FLOPs of recomputation
    compute_seconds: float | None = None  # compute of the slowest rank
    bubble_seconds: float | None = None  # pipeline bubble
    exposed_seconds: float | None = None  # exposed communication
    optimizer_seconds: float | None = None  # update of the weights
    time_error: float | None = None  # expected relative error
    longest_part: str | None = None  # operation or message with the most time
    capacity_bytes: int | None = None  # memory of a GPU
    peak_bytes: int | None = None  # predicted peak of tensors
    reserved_bytes: int | None = None  # predicted memory that PyTorch reserves
    parameters_bytes: int | None = None  # weights at the peak
    gradients_bytes: int | None = None  # gradients at the peak
    optimizer_bytes: int | None = None  # optimizer state at the peak
    activations_bytes: int | None = None  # activations at the peak
    temporary_bytes: int | None = None  # temporary memory at the peak
    measured: Measured = ""  # outcome of the measurement; empty: not measured
    measured_why: str = ""  # why the measurement failed
    measured_step_seconds: float | None = None  # measured step time
    measured_tokens_per_second_per_gpu: float | None = None  # measured tokens per second and GPU
    measured_mfu_causal: float | None = None  # measured MFU with causal attention FLOPs
    measured_peak_bytes: int | None = None  # measured peak of tensors

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
