"""The traces of a run beside its prediction and its rehearsal: one table, and one file for Perfetto in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.options import say
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.spans import Span
    from fivefold.step import Step
    from fivefold.trainer.run import Run

Rows = list[tuple["Span", ...]]


def add(run: Run, layout: Layout, *, model: Model, machine: Machine, steps: tuple[Step, ...]) -> None:
    """Rehearse the step of a traced run, write it beside ``steps``, and merge the traces."""
    from fivefold.profiling.closed_loop import write_steps

    step, rows = _rehearse(run, layout, model=model, machine=machine)
    if step is not None:
        write_steps(run.folder / "step.json", *steps, step)
    _merge(run, layout, model=model, machine=machine, rehearsed=rows)


def rehearsed(path: Path) -> tuple[Step, ...]:
    """The rehearsed step that a traced run has written beside the two others, if any."""
    from fivefold.record import read_file
    from fivefold.step import Step

    found = read_file(path).get("rehearsed") if path.exists() else None
    return (Step.read(found, origin=f"{path}: rehearsed"),) if found else ()


def _rehearse(run: Run, layout: Layout, *, model: Model, machine: Machine) -> tuple[Step | None, Rows]:
    """The rehearsed step and its spans by pipeline rank; None and none, with a line that says why, if it would fail."""
    from fivefold.dry_run import dryrun
    from fivefold.dry_run.time.pictures import spans

    found = dryrun(model=model, machine=machine, layout=layout, job=run.job, table=run.table(layout))
    if found.step is None or found.played is None or found.table is None:
        say(f"not rehearsed: {found.findings[0]}")
        return None, []
    rows = zip(found.ranks, found.table.rows, strict=True)
    return found.step, [spans(found.played, found.steady[rank], row) for rank, row in rows]


def _merge(run: Run, layout: Layout, *, model: Model, machine: Machine, rehearsed: Rows) -> None:
    """Merge the ranks' files; where some lie on other hosts, say so instead."""
    from fivefold.rendering import trace
    from fivefold.results import trace_file

    try:
        traces = trace_file.read(run.folder)
    except Mistake as mistake:
        say(f"traces are not merged: {mistake}")
        return
    predicted = _planned(run, layout, model=model, machine=machine)
    trace_file.write_planned({"predicted": predicted, "rehearsed": rehearsed}, run.folder)
    path = run.folder / trace_file.FOLDER / "step.json"
    error = 1e6 * max(each.clock_error for each in traces)
    about = {"model": model.name, "machine": machine.name, "layout": str(layout), "clock_error_us": f"{error:.1f}"}
    trace.write(trace.lanes(traces, predicted=predicted, rehearsed=rehearsed), path, about=about)
    say(f"wrote {path}: {len(traces[0].steps)} steps of {len(traces)} ranks, whose clocks agree to {error:.0f} us; "
        "open it at https://ui.perfetto.dev")  # fmt: skip


def _planned(run: Run, layout: Layout, *, model: Model, machine: Machine) -> tuple[tuple[Span, ...], ...]:
    """The spans of the predicted step, unless the run has another schedule than the layout's own."""
    from fivefold.cli.pictures import IN_TRACE
    from fivefold.planner.predict import planner
    from fivefold.planner.time.spans import spans

    return () if run.schedule is not None else spans(planner(model, machine, run.job), layout, limit=IN_TRACE)


def draw(folder: Path, step: Step) -> None:
    """The lanes of a traced run as a picture, with the last traced step of its first ranks; nothing if not traced."""
    from fivefold.rendering import charts
    from fivefold.rendering.drawing import pipeline
    from fivefold.results import run_folder

    kinds = run_folder.lanes(folder)
    if not kinds:
        return
    charts.save(pipeline.draw_lanes(kinds, step=step, drawn="messages at the end of the action they belong to"),
                folder / "lanes.svg")  # fmt: skip
    say(f"drew {folder / 'lanes.svg'}")
