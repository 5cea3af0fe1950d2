"""``fivefold dryrun``: full steps of the real training code on one CPU, for any number of ranks, without a GPU.

For a job that would fail, it prints what would go wrong first and exits with 3.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.options import parse_integers, print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import DryrunOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fivefold.dry_run import DryRun
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.spans import Level, Span
    from fivefold.step import Step

WOULD_FAIL = 3  # exit code


@accept_request(DryrunOptions)
def dryrun(request: DryrunOptions, model: Model, machine: Machine, layout: Layout, job: Job) -> None:
    """Dry-run a step: execute the real training code, for any number of ranks, on one CPU.

    The code is always Fivefold's own trainer; --stack gives it the settings of that software, such as its overlap.

    Exit code 3: the step would fail, because a rank raises an error, runs out of memory or
    waits forever for another rank.
    """
    from fivefold.layout.validity import refuse
    from fivefold.planner.predict import predict
    from fivefold.rendering.progress import show_progress
    from fivefold.trainer.run import Run

    selected = _parse_ranks(request.ranks)
    refuse(layout, model=model, job=job, machine=machine)
    table = Run(schedule=request.schedule, job=job).table(layout)
    with show_progress("executing") as progress:
        from fivefold.dry_run import dryrun as run
        from fivefold.dry_run.report import dump_dry_run

        dry_run = run(
            model=model,
            machine=machine,
            layout=layout,
            job=job,
            table=table,
            every_rank=request.every_rank,
            replay=not request.every_layer,
            ranks=selected,
            progress=lambda done, total: progress("ranks", done, total),
        )
        # The planner knows only the layout's own schedules.
        is_predictable = dry_run.step is not None and table is None
        predicted = predict(model=model, machine=machine, layout=layout, job=job) if is_predictable else None
    show(
        json_module.dumps(dump_dry_run(dry_run, predicted), indent=2)
        if request.as_json
        else _render_page(dry_run, predicted)
    )
    if dry_run.step is not None:
        if request.over_time and not request.as_json:
            _draw(dry_run, machine)
        expandable = job.stack.expandable_segments
        _save(
            dry_run,
            machine,
            selected,
            charts=request.charts,
            trace=request.trace,
            snapshot=request.snapshot,
            expandable=expandable,
        )
    if dry_run.findings:
        raise SystemExit(WOULD_FAIL)


def _parse_ranks(text: str | None) -> tuple[int, ...]:
    return parse_integers(text, option="--ranks", of="ranks", such="0,3") if text else ()


def _render_page(dry_run: DryRun, predicted: Step | None) -> RenderableType:
    """Return the page of a dry run next to its prediction, or its findings if it has no step."""
    from fivefold.rendering.dry_run import render_failures, render_page

    if dry_run.step is None:
        return render_failures(dry_run.findings)
    from fivefold.dry_run.report import describe_peak

    full = dry_run.peak_rank
    at_peak = describe_peak(dry_run.tapes[full.rank])
    return render_page(
        dry_run.step,
        findings=dry_run.findings,
        assumed=dry_run.assumed,
        moment=at_peak,
        first=full.first,
        predicted=predicted,
    )


def _draw(dry_run: DryRun, machine: Machine) -> None:
    """Draw the pipeline and the peak memory per rank on the terminal."""
    from fivefold.rendering import memory, pipeline
    from fivefold.rendering.table import build_heading

    assert dry_run.step is not None
    rows, memory_levels, rank = _list_spans(dry_run)
    title = "Pipeline over time" if len(rows) > 1 else "Time of a rank"
    show(build_heading(title, pipeline.describe_step(dry_run.step.time)))
    show(pipeline.PipelinePicture(rows))
    show(build_heading(f"Memory over time of rank {rank}"))
    show(memory.MemoryPicture(memory_levels, rank=rank, capacity_bytes=machine.chip.memory_bytes))


def _save(
    dry_run: DryRun,
    machine: Machine,
    asked: tuple[int, ...],
    *,
    charts: Path | None,
    trace: Path | None,
    snapshot: Path | None,
    expandable: bool,
) -> None:
    """Save the files; without ``--ranks``, the trace has all dry-run ranks, the snapshot that with the highest peak."""
    if charts:
        _save_charts(dry_run, machine, folder=charts)
    if trace:
        _save_trace(dry_run, asked or tuple(dry_run.tapes), path=trace)
    for rank in asked or (dry_run.peak_rank.rank,):
        if snapshot:
            path = snapshot.with_stem(f"{snapshot.stem}-rank{rank}") if len(asked) > 1 else snapshot
            _save_snapshot(dry_run, rank, path=path, expandable=expandable)


def _save_charts(dry_run: DryRun, machine: Machine, *, folder: Path) -> None:
    """Save the pipeline and the memory over time as .svg and .html."""
    from fivefold.rendering import charts
    from fivefold.rendering.drawing import memory, pipeline

    assert dry_run.step is not None
    rows, memory_levels, rank = _list_spans(dry_run)
    pictures = {
        "pipeline": pipeline.draw_file(rows, step=dry_run.step, drawn="priced, not measured"),
        "memory": memory.draw_file(
            memory_levels, step=dry_run.step, rank=rank, capacity_bytes=machine.chip.memory_bytes
        ),
    }
    charts.save_all(pictures, folder, (".svg", ".html"))
    print_line(f"wrote pipeline and memory as .svg and .html to {folder}")


def _list_spans(dry_run: DryRun) -> tuple[list[tuple[Span, ...]], list[Level], int]:
    """Return spans of every pipeline rank, memory over time of the one with the highest peak, and its number."""
    from fivefold.dry_run.time.pictures import list_action_spans, thin_levels

    assert dry_run.simulation is not None
    assert dry_run.table is not None
    steady = dry_run.steady_tapes
    rows = [
        list_action_spans(dry_run.simulation, steady[rank], row)
        for rank, row in zip(dry_run.ranks, dry_run.table.rows, strict=True)
    ]
    rank = dry_run.peak_rank.rank
    return rows, thin_levels(dry_run.simulation, steady[rank]), rank


def _save_snapshot(dry_run: DryRun, rank: int, *, path: Path, expandable: bool) -> None:
    from fivefold.dry_run.memory.snapshot import write_snapshot

    tapes = dry_run.tapes[rank]
    write_snapshot((tapes.first, tapes.steady), path, expandable=expandable)
    print_line(f"wrote {path}, rank {rank}; open it at https://pytorch.org/memory_viz")


def _save_trace(dry_run: DryRun, ranks: tuple[int, ...], *, path: Path) -> None:
    """Write the simulated operations of the ranks as a trace, and print where it is."""
    from fivefold.dry_run.time.trace import write_trace

    assert dry_run.simulation is not None
    assert dry_run.step is not None
    step = dry_run.step
    metadata = {
        "model": step.model,
        "machine": step.machine,
        "layout": step.layout,
        "step_seconds": f"{step.time.step_seconds:.6g}",
        "drawn": "dry run, time estimated and not measured",
    }
    write_trace(dry_run.simulation, path, ranks=ranks, metadata=metadata)
    print_line(f"wrote {path}; open it at https://ui.perfetto.dev")
