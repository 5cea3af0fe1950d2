"""The command trace: PyTorch profiler traces of any trainer, read for where the time went. No torch."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.job_options import takes_job
from fivefold.cli.options import AsJson, say, show
from fivefold.record import Mistake
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.step import Step

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE…", help="Traces (.json, .json.gz), one of each rank, or their folder.")
]
Against = Annotated[
    tuple[str, str, str] | None,
    typer.Option("--against", metavar="MODEL MACHINE LAYOUT", help="Lay the predicted step beside it; takes a job."),
]
ChartFolder = Annotated[
    Path | None, typer.Option("--charts", help="Write breakdown and critical-path as .svg and .html into this folder.")
]


@takes_job
def trace(
    files: Files,
    job: Job,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only the ProfilerStep of this number.")] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many kernels to list.")] = 10,
    machine: Annotated[str | None, typer.Option("--machine", help="Whose links the messages use: h100:8, …")] = None,
    against: Against = None,
    charts: ChartFolder = None,
    json: AsJson = False,
) -> None:
    """Where the time of a real run went: PyTorch profiler traces of one or many ranks, of any trainer."""
    from fivefold.profiling.traces import read
    from fivefold.profiling.traces.against import against as beside
    from fivefold.profiling.traces.against import axes_of
    from fivefold.rendering.progress import bar
    from fivefold.rendering.trace_report import page, save_charts

    links = load_machine(machine) if machine else None
    predicted, layout, links = _predicted(against, job, links)
    with bar("reading") as progress:
        found = read(
            files, step=step, top=top, machine=links, axes=axes_of(layout) if layout else None, progress=progress
        )  # fmt: skip
    rows = beside(predicted, found.report, messages=found.lowest) if predicted else []
    if json:
        data = found.report.model_dump(mode="json")
        data["against"] = [row.model_dump(mode="json") for row in rows]
        data["predicted"] = predicted.model_dump(mode="json") if predicted else None
        show(json_module.dumps(data, indent=2))
    else:
        about = f"{predicted.model} on {predicted.machine} · {predicted.layout}" if predicted else ""
        show(page(found.report, rows=rows, predicted=about))
    if charts:
        save_charts(found.report, found.pieces(), charts)
        say(f"wrote breakdown and critical-path as .svg and .html to {charts}")


def _predicted(
    against: tuple[str, str, str] | None, job: Job, links: Machine | None
) -> tuple[Step | None, Layout | None, Machine | None]:
    """The predicted step and its layout; the machine that is named, or else the prediction's."""
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.planner.predict import predict

    if against is None:
        if job != Job():
            raise Mistake("the options of a job are of a prediction; add --against MODEL MACHINE LAYOUT")
        return None, None, links
    model, machine, text = against
    chips, layout = load_machine(machine), Layout.parse(text)
    return predict(model=resolve(model), machine=chips, layout=layout, job=job), layout, links or chips
