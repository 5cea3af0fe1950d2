"""Renders a dry run as HTML, in the process that ran it, because that process has its tapes.

It shows memory over time, with the live tensors under the mouse by module and line, and the streams and messages of
the rank with the highest peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fivefold.dry_run import DryRun
from fivefold.dry_run.memory.breakdown import levels as every_level
from fivefold.dry_run.memory.living import list_live_groups
from fivefold.dry_run.record.tape import KERNEL, START, Message, Tape
from fivefold.dry_run.report import describe_peak
from fivefold.dry_run.time.pictures import levels, spans
from fivefold.dry_run.time.play import Played, TimedSpan
from fivefold.machine.spec import Machine
from fivefold.rendering import memory as shown
from fivefold.rendering.drawing import memory, pipeline, streams
from fivefold.rendering.drawing.bars import draw_stacked, scale
from fivefold.rendering.pipeline import finding
from fivefold.rendering.step_view import split_bytes, view_step
from fivefold.results.spans import Level
from fivefold.step import Step
from fivefold.units import show_bytes, show_seconds
from fivefold.web.pages.render import fragment

TOLD = 240  # points in time at which live tensors are listed


def html(rehearsal: DryRun, *, machine: Machine, predicted: Step | None) -> str:
    """Return the full answer as HTML."""
    if rehearsal.step is None or rehearsal.played is None or rehearsal.table is None:
        return fragment("dryrun_result.html", found=rehearsal)
    rank, chip = rehearsal.peak_rank.rank, machine.chip.memory_bytes
    tape, at_peak = rehearsal.steady_tapes[rank], describe_peak(rehearsal.tapes[rank])
    memory_levels = levels(rehearsal.played, tape)
    rows = tuple(
        spans(rehearsal.played, rehearsal.steady_tapes[shown_rank], row)
        for shown_rank, row in zip(rehearsal.ranks, rehearsal.table.rows, strict=True)
    )
    parts = split_bytes(at_peak.parts)
    stream_rows = stream_lines(rehearsal.played, tape)
    scale_bytes, limit = scale(sum(at_peak.parts.values()), chip)
    return fragment(
        "dryrun_result.html",
        found=rehearsal,
        step=rehearsal.step,
        view=view_step(rehearsal.step),
        predicted=predicted,
        rank=rank,
        chip=chip,
        peak=at_peak,
        parts=parts,
        bar=draw_stacked(parts, whole=scale_bytes, label="memory at the peak", limit=limit),
        memory=memory.picture(
            memory_levels, rank=rank, capacity_bytes=chip, told=list_live_tensors(rehearsal.played, tape)
        ),
        memory_looks=[(name, name) for name in memory.list_looks(memory_levels)],
        memory_finding=shown.finding(memory_levels, rank=rank, capacity_bytes=chip),
        pipeline=pipeline.picture(rows, label=finding(rehearsal.step.time)),
        pipeline_looks=pipeline.list_looks(rows),
        pipeline_finding=finding(rehearsal.step.time),
        streams=streams.picture(stream_rows, last=rehearsal.played.step_seconds, label=f"streams of rank {rank}"),
    )


def list_live_tensors(played: Played, tape: Tape) -> list[tuple[float, float, str]]:
    """Return intervals of the step, in seconds, with the live tensors at the fullest moment of each."""
    event_levels = every_level(tape)  # ``seconds`` of these levels are indices of events
    seconds = played.seconds_at(tape.rank)
    times = seconds[[int(level.seconds) for level in event_levels]]
    edges = np.linspace(0.0, played.step_seconds, TOLD + 1)
    bounds = np.searchsorted(times, edges)
    intervals, last = [], 0
    for index in range(TOLD):
        stretch = event_levels[bounds[index] : bounds[index + 1]] or [event_levels[last]]
        last = max(last, int(bounds[index + 1]) - 1)
        intervals.append((edges[index], edges[index + 1], shown.peak(stretch)))
    groups = list_live_groups(tape, [int(level.seconds) for _, _, level in intervals])
    return [
        (float(start), float(end), _words(level, group, float(seconds[int(level.seconds)])))
        for (start, end, level), group in zip(intervals, groups, strict=True)
    ]


def _words(level: Level, group: Any, seconds: float) -> str:
    lines = [f"{show_bytes(level.live_bytes)} at {show_seconds(seconds)}", level.cause, "", "largest of what lives"]
    for tensors in group:
        count_text = f"{tensors.number} × " if tensors.number > 1 else ""
        where = " ".join(filter(None, (tensors.module, f"({tensors.line})" if tensors.line else "")))
        lines.append(f"{show_bytes(tensors.bytes)}  {count_text}{tensors.category}  {where}")
    return "\n".join(lines)


def stream_lines(played: Played, tape: Tape) -> list[tuple[str, list[streams.Piece]]]:
    """Return the compute stream, then one line per communicator."""
    timed = list(played.spans(tape.rank))
    lines = {"compute": list(_compute(tape, [span for span in timed if span.kind == KERNEL]))}
    axes: dict[str, str] = {}
    for span in (span for span in timed if span.kind == START and span.end > span.start):
        message = tape.messages[span.place]
        if message.group not in axes:
            same_axis = sum(name.split()[0] == message.axis for name in axes.values())
            axes[message.group] = f"{message.axis} {same_axis + 1}" if same_axis else message.axis
        lines.setdefault(axes[message.group], []).append(
            streams.Piece(span.start, span.end, "k-messages", _message(message, tape))
        )
    return [(name, sorted(pieces)) for name, pieces in lines.items()]


def _compute(tape: Tape, kernels: list[TimedSpan]) -> Iterator[streams.Piece]:
    for span in kernels:
        kernel = tape.kernels[span.place]
        site = tape.sites[kernel.site]
        look = "k-F" if kernel.kind == "matmul" else "k-BW" if kernel.kind.startswith("attention") else "k-update"
        yield streams.Piece(span.start, span.end, look, f"{kernel.kind}: {site}")


def _message(message: Message, tape: Tape) -> str:
    way = ("receive from" if message.receives else "send to") + f" {message.peer}" if message.peer >= 0 else ""
    return f"{message.axis} {way or message.collective}, {show_bytes(message.payload)}\n{tape.sites[message.site]}"
