"""Renders a dry run as HTML, in the process that ran it, because that process has its tapes.

It shows memory over time, with the live tensors under the mouse by module and line, and the streams and messages of
the rank with the highest peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fivefold.dry_run import DryRun
from fivefold.dry_run.memory.breakdown import list_levels as list_event_levels
from fivefold.dry_run.memory.breakdown import list_live_groups
from fivefold.dry_run.record.tape import KERNEL, START, Tape, TapeMessage
from fivefold.dry_run.report import describe_peak
from fivefold.dry_run.time.pictures import list_action_spans, thin_levels
from fivefold.dry_run.time.simulation import SimulatedTapes, TimedSpan
from fivefold.machine.spec import Machine
from fivefold.rendering import memory as shown
from fivefold.rendering.drawing import memory, pipeline, streams
from fivefold.rendering.drawing.bars import draw_stacked, scale
from fivefold.rendering.pipeline import describe_step
from fivefold.rendering.step_view import split_bytes, view_step
from fivefold.results.spans import Level
from fivefold.step import Step
from fivefold.units import show_bytes, show_seconds
from fivefold.web.pages.render import render_fragment

LIVE_TENSOR_INTERVALS = 240  # points in time at which live tensors are listed


def render_html(dry_run: DryRun, *, machine: Machine, predicted: Step | None) -> str:
    """Return the full answer as HTML."""
    if dry_run.step is None or dry_run.simulation is None or dry_run.table is None:
        return render_fragment("dryrun_result.html", dry_run=dry_run)
    rank, chip = dry_run.peak_rank.rank, machine.chip.memory_bytes
    tape = dry_run.steady_tapes[rank]
    at_peak = describe_peak(dry_run.tapes[rank])
    memory_levels = thin_levels(dry_run.simulation, tape)
    rows = tuple(
        list_action_spans(dry_run.simulation, dry_run.steady_tapes[shown_rank], row)
        for shown_rank, row in zip(dry_run.ranks, dry_run.table.rows, strict=True)
    )
    parts = split_bytes(at_peak.parts)
    stream_rows = list_stream_lines(dry_run.simulation, tape)
    scale_bytes, limit = scale(sum(at_peak.parts.values()), chip)
    return render_fragment(
        "dryrun_result.html",
        dry_run=dry_run,
        step=dry_run.step,
        view=view_step(dry_run.step),
        predicted=predicted,
        rank=rank,
        chip=chip,
        peak=at_peak,
        parts=parts,
        bar=draw_stacked(parts, total=scale_bytes, label="memory at the peak", limit=limit),
        memory=memory.draw_memory(
            memory_levels, rank=rank, capacity_bytes=chip, labels=list_live_tensors(dry_run.simulation, tape)
        ),
        memory_legend=[(name, name) for name in memory.list_legend_entries(memory_levels)],
        memory_finding=shown.describe_peak(memory_levels, rank=rank, capacity_bytes=chip),
        pipeline=pipeline.draw_pipeline(rows, label=describe_step(dry_run.step.time)),
        pipeline_legend=pipeline.list_legend_entries(rows),
        pipeline_finding=describe_step(dry_run.step.time),
        streams=streams.draw_streams(
            stream_rows, last=dry_run.simulation.step_seconds, label=f"streams of rank {rank}"
        ),
    )


def list_live_tensors(simulation: SimulatedTapes, tape: Tape) -> list[tuple[float, float, str]]:
    """Return intervals of the step, in seconds, with the live tensors at the fullest moment of each."""
    event_levels = list_event_levels(tape)  # ``seconds`` of these levels are indices of events
    seconds = simulation.seconds_at(tape.rank)
    times = seconds[[int(level.seconds) for level in event_levels]]
    edges = np.linspace(0.0, simulation.step_seconds, LIVE_TENSOR_INTERVALS + 1)
    bounds = np.searchsorted(times, edges)
    intervals, last = [], 0
    for index in range(LIVE_TENSOR_INTERVALS):
        stretch = event_levels[bounds[index] : bounds[index + 1]] or [event_levels[last]]
        last = max(last, int(bounds[index + 1]) - 1)
        intervals.append((edges[index], edges[index + 1], shown.find_peak(stretch)))
    groups = list_live_groups(tape, [int(level.seconds) for _, _, level in intervals])
    return [
        (float(start), float(end), _format_level(level, group, float(seconds[int(level.seconds)])))
        for (start, end, level), group in zip(intervals, groups, strict=True)
    ]


def _format_level(level: Level, group: Any, seconds: float) -> str:
    lines = [f"{show_bytes(level.live_bytes)} at {show_seconds(seconds)}", level.cause, "", "largest live tensors"]
    for tensors in group:
        count_text = f"{tensors.number} × " if tensors.number > 1 else ""
        where = " ".join(filter(None, (tensors.module, f"({tensors.line})" if tensors.line else "")))
        lines.append(f"{show_bytes(tensors.bytes)}  {count_text}{tensors.category}  {where}")
    return "\n".join(lines)


def list_stream_lines(simulation: SimulatedTapes, tape: Tape) -> list[tuple[str, list[streams.StreamPiece]]]:
    """Return the compute stream, then one line per communicator."""
    timed = list(simulation.spans(tape.rank))
    lines = {"compute": list(_compute(tape, [span for span in timed if span.kind == KERNEL]))}
    axes: dict[str, str] = {}
    for span in (span for span in timed if span.kind == START and span.end > span.start):
        message = tape.messages[span.list_index]
        if message.group not in axes:
            same_axis = sum(name.split()[0] == message.axis for name in axes.values())
            axes[message.group] = f"{message.axis} {same_axis + 1}" if same_axis else message.axis
        lines.setdefault(axes[message.group], []).append(
            streams.StreamPiece(span.start, span.end, "k-messages", _format_message(message, tape))
        )
    return [(name, sorted(pieces)) for name, pieces in lines.items()]


def _compute(tape: Tape, kernels: list[TimedSpan]) -> Iterator[streams.StreamPiece]:
    for span in kernels:
        kernel = tape.kernels[span.list_index]
        site = tape.sites[kernel.site]
        look = "k-F" if kernel.kind == "matmul" else "k-BW" if kernel.kind.startswith("attention") else "k-update"
        yield streams.StreamPiece(span.start, span.end, look, f"{kernel.kind}: {site}")


def _format_message(message: TapeMessage, tape: Tape) -> str:
    way = ("receive from" if message.receives else "send to") + f" {message.peer}" if message.peer >= 0 else ""
    return f"{message.axis} {way or message.collective}, {show_bytes(message.payload)}\n{tape.sites[message.site]}"
