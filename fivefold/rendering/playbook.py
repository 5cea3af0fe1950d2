"""Show a plan step by step: what was asked, what was tried with its numbers, what was chosen and why."""

from __future__ import annotations

from collections.abc import Collection

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Grid
from fivefold.rendering.interval import render_intervals
from fivefold.rendering.question import describe_step
from fivefold.rendering.run_estimate import summarize_run
from fivefold.rendering.table import build_heading
from fivefold.results.playbook import Playbook, Stage
from fivefold.units import show_bytes, show_count, show_seconds


def render_page(playbook: Playbook, *, stated: Collection[str] | None = None) -> RenderableType:
    """Return the page: the steps, the resulting layout, the run, and the commands to type.

    ``stated``: fields of the job that the user gave, as ``describe_job`` takes them.
    """
    job = describe_step(playbook.step, open_fields=("global_batch",), stated=stated)
    parts: list[RenderableType] = [
        Text(
            f"{playbook.model} on {playbook.ranks} {playbook.machine}, {show_count(playbook.tokens)} tokens",
            style="dim",
        ),
        Text(job, style="dim", overflow="fold"),
    ]
    for number, stage in enumerate(playbook.stages, start=1):
        parts += _render_stage(number, stage)
    step = playbook.step
    parts += [
        build_heading(f"{len(playbook.stages) + 1}  The run"),
        Text(step.layout, style="bold cyan", overflow="fold"),
        Text(
            f"step time {show_seconds(step.time.step_seconds)}, peak memory {show_bytes(step.memory.peak_bytes)}, MFU "
            f"{step.mfu.causal:.1%}",
            overflow="fold",
        ),
        render_intervals(step),
        Text(""),
        summarize_run(playbook.run),
    ]
    for software, lines in playbook.commands.items():
        source = ": add --write run.toml for the run file" if software == "fivefold" else ""
        parts.append(build_heading(f"With {software}{source}"))
        parts += [Text(line, overflow="fold") for line in lines]
    return Group(*parts)


def _render_stage(number: int, stage: Stage) -> list[RenderableType]:
    """Return the heading of a stage of the plan, the table of what it tried, and its reason."""
    has_sizes = any(attempt.peak_bytes is not None for attempt in stage.tried)
    rows: list[tuple[str, ...]] = []
    for attempt in stage.tried:
        peak = "–" if attempt.peak_bytes is None else show_bytes(attempt.peak_bytes)
        seconds = "–" if attempt.step_seconds is None else show_seconds(attempt.step_seconds)
        rows.append(
            ("→" if attempt.chosen else "", attempt.layout, *((peak, seconds) if has_sizes else ()), attempt.why)
        )
    headings = ("", "layout", "peak memory", "step time", "result") if has_sizes else ("", "batch", "recommended by")
    words = tuple(name for name in headings if name not in ("peak memory", "step time"))
    return [
        build_heading(f"{number}  {stage.title}", stage.question),
        Grid(headings, tuple(rows), words=words),
        Text(stage.reason, style="bold", overflow="fold"),
    ]
