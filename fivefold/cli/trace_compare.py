"""Compares the traces of a run with its prediction and dry run: one table, and one file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.options import print_line
from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.spans import Span
    from fivefold.step import Step
    from fivefold.trainer.run import Run

Rows = list[tuple["Span", ...]]


def add(run: Run, layout: Layout, *, model: Model, machine: Machine, steps: tuple[Step, ...]) -> None:
    """Dry-run the step of a traced run, write it with ``steps``, and merge the traces."""
    from fivefold.profiling.closed_loop import write_steps

    step, rows = _dry_run_step(run, layout, model=model, machine=machine)
    if step is not None:
        write_steps(run.folder / "step.json", *steps, step)
    _merge(run, layout, model=model, machine=machine, dry_run=rows)


def read_dry_run(path: Path) -> tuple[Step, ...]:
    """Return the dry-run step that a traced run has written with the two others, if any."""
    from fivefold.step import Step
    from fivefold.text_files import read_file

    dry_run_step = read_file(path).get("dry_run") if path.exists() else None
    return (Step.read(dry_run_step, origin=f"{path}: dry_run"),) if dry_run_step else ()


def _dry_run_step(run: Run, layout: Layout, *, model: Model, machine: Machine) -> tuple[Step | None, Rows]:
    """Return the dry-run step and its spans by pipeline rank; None and no spans if it would fail.

    In that case the reason is printed.
    """
    from fivefold.dry_run import dryrun
    from fivefold.dry_run.time.pictures import list_action_spans

    dry_run = dryrun(model=model, machine=machine, layout=layout, job=run.job, table=run.table(layout))
    if dry_run.step is None or dry_run.simulation is None or dry_run.table is None:
        print_line(f"no dry run: {dry_run.findings[0]}")
        return None, []
    rows = zip(dry_run.ranks, dry_run.table.rows, strict=True)
    return dry_run.step, [list_action_spans(dry_run.simulation, dry_run.steady_tapes[rank], row) for rank, row in rows]


def _merge(run: Run, layout: Layout, *, model: Model, machine: Machine, dry_run: Rows) -> None:
    """Merge the ranks' trace files; if some are on other hosts, print that instead."""
    from fivefold.rendering import trace
    from fivefold.results import trace_file

    try:
        traces = trace_file.read(run.folder)
    except UserError as mistake:
        print_line(f"traces are not merged: {mistake}")
        return
    predicted = _list_predicted_spans(run, layout, model=model, machine=machine)
    trace_file.write_planned({"predicted": predicted, "dry_run": dry_run}, run.folder)
    path = run.folder / trace_file.FOLDER / "step.json"
    error = 1e6 * max(rank_trace.clock_error for rank_trace in traces)
    about = {"model": model.name, "machine": machine.name, "layout": str(layout), "clock_error_us": f"{error:.1f}"}
    trace.write(trace.list_lanes(traces, predicted=predicted, dry_run=dry_run), path, about=about)
    print_line(
        f"wrote {path}: {len(traces[0].steps)} steps of {len(traces)} ranks, whose clocks agree to {error:.0f} us; "
        "open it at https://ui.perfetto.dev"
    )


def _list_predicted_spans(run: Run, layout: Layout, *, model: Model, machine: Machine) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of the predicted step, unless the run has a schedule that differs from the layout's own."""
    from fivefold.cli.pictures import TRACE_MICRO_BATCHES
    from fivefold.planner.predict import get_planner
    from fivefold.planner.time.spans import build_spans

    return (
        ()
        if run.schedule is not None
        else build_spans(get_planner(model, machine, run.job), layout, limit=TRACE_MICRO_BATCHES)
    )


def draw(folder: Path, step: Step) -> None:
    """Draw the timeline of a traced run, with the last traced step of its first ranks; nothing if it was not traced."""
    from fivefold.rendering import charts
    from fivefold.rendering.drawing import pipeline
    from fivefold.results import run_folder

    rows_by_kind = run_folder.list_lanes(folder)
    if not rows_by_kind:
        return
    charts.save(
        pipeline.draw_lanes(rows_by_kind, step=step, drawn="messages at the end of the action they belong to"),
        folder / "lanes.svg",
    )
    print_line(f"drew {folder / 'lanes.svg'}")
