"""Converts a simulated dry run into charts' data: the spans of a rank's actions, and its memory over time.

scopes and waits → Span        allocations and frees at their seconds → Level
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fivefold.dry_run.memory.breakdown import list_levels
from fivefold.dry_run.record.tape import SCOPE, WAIT, Tape
from fivefold.dry_run.time.simulation import SimulatedTapes, TimedSpan
from fivefold.layout.schedule.columns import Row
from fivefold.results.spans import Level, Span

CHART_INTERVALS = 1200  # equal time intervals; the levels of highest and lowest memory of each are kept
SAME_TIME_SECONDS = 1e-9  # seconds: tolerance for two events at the same time


def thin_levels(simulation: SimulatedTapes, tape: Tape) -> list[Level]:
    """Return live bytes over time on the tape's rank, thinned to about 2 · ``CHART_INTERVALS``.

    Causes omit the line of code, for which a chart has no room.
    """
    rank_levels = list_levels(tape, simulation.seconds_at(tape.rank))
    interval = simulation.step_seconds / CHART_INTERVALS or 1.0
    kept: list[Level] = []
    for _, levels_of_interval in groupby(rank_levels, key=lambda level: int(level.seconds / interval)):
        in_interval = list(levels_of_interval)
        extremes = {id(pick(in_interval, key=lambda level: level.live_bytes)) for pick in (max, min)}
        if kept and in_interval[0].seconds - kept[-1].seconds > interval:  # hold the last level: no slope
            kept.append(kept[-1]._replace(seconds=in_interval[0].seconds, cause=""))
        kept += [level._replace(cause=level.cause.partition(" (")[0]) for level in in_interval if id(level) in extremes]
    return [*kept, kept[-1]._replace(seconds=simulation.step_seconds, cause="")]


def list_action_spans(simulation: SimulatedTapes, tape: Tape, row: Row) -> tuple[Span, ...]:
    """Return the spans of a rank: each action of its ``row`` with its exposed messages, then the update."""
    action_spans: list[Span] = []
    waits: list[TimedSpan] = []
    actions = iter(row)
    for span in simulation.spans(tape.rank):
        if span.kind == WAIT:
            waits.append(span)
        elif span.kind == SCOPE:
            phase = tape.scopes[span.list_index].phase
            if phase == "update":  # drawn from the end of its last wait, for the gradient norm
                start = max((wait.end for wait in waits), default=span.start)
                action_spans.append(Span("update", "update", start, span.end))
            elif phase != "start":
                action = next(actions)
                action_spans.append(Span(action.kind, str(action), *_trim_pp_waits(span, waits, tape), *action[1:]))
            waits = []
    return tuple(action_spans)


def _trim_pp_waits(
    span: TimedSpan, waits: Sequence[TimedSpan], tape: Tape
) -> tuple[float, float, float, tuple[str, ...]]:
    """Return start and end of a scope without the pp waits at its two ends.

    The seconds of the waits in between and the axes of those waits follow.
    """
    start, end, seconds, axes = span.start, span.end, 0.0, dict[str, None]()
    pp_waits = [wait for wait in waits if tape.messages[wait.list_index].axis == "pp"]
    for wait in pp_waits:
        start = wait.end if wait.start <= start + SAME_TIME_SECONDS else start
    for wait in reversed(pp_waits):
        end = wait.start if wait.end >= end - SAME_TIME_SECONDS and wait.start >= start else end
    for wait in waits:
        if wait.start >= start and wait.end <= end:
            seconds += wait.end - wait.start
            axes[tape.messages[wait.list_index].axis] = None
    return start, end, min(seconds, end - start), tuple(axes)
