"""A rehearsal as HTML: drawn where its tapes are, in the process that has run it.

memory over time, with what lives under the mouse by module and line · streams and messages of the fullest rank
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fivefold.dry_run import Rehearsal
from fivefold.dry_run.memory.breakdown import levels as every_level
from fivefold.dry_run.memory.living import living
from fivefold.dry_run.record.tape import KERNEL, START, Message, Tape
from fivefold.dry_run.report import moment
from fivefold.dry_run.time.pictures import levels, spans
from fivefold.dry_run.time.play import Played, TimedSpan
from fivefold.machine.spec import Machine
from fivefold.rendering import memory as shown
from fivefold.rendering.drawing import memory, pipeline, streams
from fivefold.rendering.drawing.bars import scale, stacked
from fivefold.rendering.pipeline import finding
from fivefold.rendering.step_view import split_bytes, view_step
from fivefold.results.spans import Level
from fivefold.step import Step
from fivefold.units import show_bytes, show_seconds
from fivefold.web.pages.render import fragment

TOLD = 240  # moments at which is told what lives


def html(found: Rehearsal, *, machine: Machine, predicted: Step | None) -> str:
    """The whole answer."""
    if found.step is None or found.played is None or found.table is None:
        return fragment("rehearsed.html", found=found)
    rank, chip = found.fullest.rank, machine.chip.memory_bytes
    tape, at_peak = found.steady[rank], moment(found.tapes[rank])
    drawn = levels(found.played, tape)
    rows = tuple(spans(found.played, found.steady[each], row)
                 for each, row in zip(found.ranks, found.table.rows, strict=True))  # fmt: skip
    parts = split_bytes(at_peak.parts)
    lines = stream_lines(found.played, tape)
    whole, limit = scale(sum(at_peak.parts.values()), chip)
    return fragment(
        "rehearsed.html", found=found, step=found.step, view=view_step(found.step), predicted=predicted,
        rank=rank, chip=chip, peak=at_peak,
        parts=parts, bar=stacked(parts, whole=whole, label="memory at the peak", limit=limit),
        memory=memory.picture(drawn, rank=rank, capacity_bytes=chip, told=told(found.played, tape)),
        memory_looks=[(name, name) for name in memory.looks(drawn)],
        memory_finding=shown.finding(drawn, rank=rank, capacity_bytes=chip),
        pipeline=pipeline.picture(rows, label=finding(found.step.time)), pipeline_looks=pipeline.looks(rows),
        pipeline_finding=finding(found.step.time),
        streams=streams.picture(lines, last=found.played.step_seconds, label=f"streams of rank {rank}"),
    )  # fmt: skip


def told(played: Played, tape: Tape) -> list[tuple[float, float, str]]:
    """Stretches of the step, in seconds, and what lives at the fullest moment of each."""
    whole = every_level(tape)  # whose seconds are places of events
    seconds = played.seconds_at(tape.rank)
    times = seconds[[int(level.seconds) for level in whole]]
    edges = np.linspace(0.0, played.step_seconds, TOLD + 1)
    bounds = np.searchsorted(times, edges)
    found, last = [], 0
    for at in range(TOLD):
        stretch = whole[bounds[at] : bounds[at + 1]] or [whole[last]]
        last = max(last, int(bounds[at + 1]) - 1)
        found.append((edges[at], edges[at + 1], shown.peak(stretch)))
    groups = living(tape, [int(level.seconds) for _, _, level in found])
    return [(float(start), float(end), _words(level, group, float(seconds[int(level.seconds)])))
            for (start, end, level), group in zip(found, groups, strict=True)]  # fmt: skip


def _words(level: Level, group: Any, seconds: float) -> str:
    lines = [f"{show_bytes(level.live_bytes)} at {show_seconds(seconds)}", level.cause, "", "largest of what lives"]
    for each in group:
        many = f"{each.number} × " if each.number > 1 else ""
        where = " ".join(filter(None, (each.module, f"({each.line})" if each.line else "")))
        lines.append(f"{show_bytes(each.bytes)}  {many}{each.category}  {where}")
    return "\n".join(lines)


def stream_lines(played: Played, tape: Tape) -> list[tuple[str, list[streams.Piece]]]:
    """The compute stream, then a line for each communicator."""
    timed = list(played.spans(tape.rank))
    lines = {"compute": list(_compute(tape, [span for span in timed if span.kind == KERNEL]))}
    axes: dict[str, str] = {}
    for span in (span for span in timed if span.kind == START and span.end > span.start):
        message = tape.messages[span.place]
        if message.group not in axes:
            alike = sum(name.split()[0] == message.axis for name in axes.values())
            axes[message.group] = f"{message.axis} {alike + 1}" if alike else message.axis
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
