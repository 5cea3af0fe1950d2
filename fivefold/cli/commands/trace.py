"""``fivefold trace``: breaks down the time in PyTorch profiler traces of any trainer. Does not import torch."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING

from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.commands import TraceOptions
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.step import Step


@accept_request(TraceOptions)
def trace(request: TraceOptions, job: Job) -> None:
    """Break down the time of a real run, from PyTorch profiler traces of one or many ranks, of any trainer."""
    from fivefold.profiling.trace_advice import advise
    from fivefold.profiling.traces import read
    from fivefold.profiling.traces.prediction import compare_with_prediction, find_axes
    from fivefold.rendering.progress import show_progress
    from fivefold.rendering.trace_report import render_page, save_charts

    links = load_machine(request.machine) if request.machine else None
    predicted, layout, links = _predict(request.against, job, links)
    with show_progress("reading") as progress:
        result = read(
            request.files,
            step=request.step,
            top=request.top,
            machine=links,
            axes=find_axes(layout) if layout else None,
            progress=progress,
        )
    rows = compare_with_prediction(predicted, result.report, messages=result.lowest) if predicted else []
    advice = advise(result.report, predicted)
    if request.as_json:
        data = result.report.model_dump(mode="json")
        data["against"] = [row.model_dump(mode="json") for row in rows]
        data["predicted"] = predicted.model_dump(mode="json") if predicted else None
        data["advice"] = advice.model_dump(mode="json") if advice else None
        show(json_module.dumps(data, indent=2))
    else:
        show(render_page(result.report, rows=rows, predicted=predicted, advice=advice))
    if request.charts:
        save_charts(result.report, result.pieces(), request.charts)
        print_line(f"wrote breakdown and critical-path as .svg and .html to {request.charts}")


def _predict(
    against: tuple[str, str, str] | None, job: Job, links: Machine | None
) -> tuple[Step | None, Layout | None, Machine | None]:
    """Return the predicted step, its layout, and the machine: the one named, else that of the prediction."""
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.planner.predict import predict

    if against is None:
        if job != Job():
            raise UserError("job options apply to a prediction only; add --against MODEL MACHINE LAYOUT")
        return None, None, links
    model, machine, text = against
    predicted_machine = load_machine(machine)
    layout = Layout.parse(text, machine=predicted_machine)
    return (
        predict(model=resolve(model), machine=predicted_machine, layout=layout, job=job),
        layout,
        links or predicted_machine,
    )
