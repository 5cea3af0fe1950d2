"""Draws a predicted step: the pipeline and the memory over time, on the terminal, as charts, as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.cli.options import print_line, show

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.planner.predict import Planner
    from fivefold.step import Step

# Limits on the micro-batches drawn, each through every stage of a rank: more would be unreadable.
TERMINAL_MICRO_BATCHES, CHART_MICRO_BATCHES, TRACE_MICRO_BATCHES = 8, 16, 512


def draw(planner: Planner, layout: Layout, step: Step) -> None:
    """Draw the pipeline and the memory over time on the terminal."""
    from fivefold.planner.time.memory_over_time import list_levels
    from fivefold.planner.time.spans import build_spans
    from fivefold.rendering import memory, pipeline
    from fivefold.rendering.table import build_heading

    rank, limit = find_peak_stage(step), TERMINAL_MICRO_BATCHES // layout.v
    memory_levels = list_levels(planner, layout, rank=rank, limit=limit)
    rows = build_spans(planner, layout, limit=limit)
    show(
        build_heading(
            "Pipeline over time" if layout.pp > 1 else "Time of a rank", pipeline.describe_step(step.time, rows)
        )
    )
    show(pipeline.PipelinePicture(rows, drawn=describe_limit(planner, layout, limit)))
    show(build_heading(f"Memory over time of pipeline rank {rank}" if layout.pp > 1 else "Memory over time"))
    show(memory.MemoryPicture(memory_levels, rank=rank, capacity_bytes=planner.machine.chip.memory_bytes))


def draw_step_charts(planner: Planner, layout: Layout, step: Step) -> dict[str, Any]:
    """Return charts of the pipeline and of the peak memory per rank."""
    from fivefold.planner.time.memory_over_time import list_levels
    from fivefold.planner.time.spans import build_spans
    from fivefold.rendering.drawing import memory, pipeline

    rank, limit = find_peak_stage(step), CHART_MICRO_BATCHES // layout.v
    memory_levels = list_levels(planner, layout, rank=rank, limit=limit)
    caption = describe_limit(planner, layout, limit)
    return {
        "pipeline": pipeline.draw_file(build_spans(planner, layout, limit=limit), step=step, drawn=caption),
        "memory": memory.draw_file(
            memory_levels, step=step, rank=rank, capacity_bytes=planner.machine.chip.memory_bytes, drawn=caption
        ),
    }


def save_charts(planner: Planner, layout: Layout, step: Step, *, folder: Path) -> None:
    """Save charts of the pipeline and of the peak memory per rank, as .svg and .html."""
    from fivefold.rendering import charts

    charts.save_all(draw_step_charts(planner, layout, step), folder, (".svg", ".html"))
    print_line(f"wrote pipeline and memory as .svg and .html to {folder}")


def save_trace(planner: Planner, layout: Layout, step: Step, *, path: Path) -> None:
    """Save every span of every pipeline rank as a trace."""
    from fivefold.planner.time.spans import build_spans
    from fivefold.rendering import trace

    about = {
        "model": step.model,
        "machine": step.machine,
        "layout": step.layout,
        "step_seconds": f"{step.time.step_seconds:.6g}",
        "drawn": describe_limit(planner, layout, TRACE_MICRO_BATCHES),
    }
    trace.save(build_spans(planner, layout, limit=TRACE_MICRO_BATCHES), path, about=about)
    print_line(f"wrote {path}; open it at https://ui.perfetto.dev")


def describe_limit(planner: Planner, layout: Layout, limit: int) -> str:
    """Return which micro-batches of a step are drawn, if not all are."""
    from fivefold.planner.time.spans import count_simulated
    from fivefold.rendering.pipeline import describe_window

    micro_batches = layout.micro_batches(planner.job)
    return describe_window(count_simulated(layout, micro_batches=micro_batches, limit=limit), micro_batches)


def find_peak_stage(step: Step) -> int:
    """Return the pipeline stage with the highest peak."""
    return max(step.memory.stages, key=lambda stage: stage.peak_bytes).stage
