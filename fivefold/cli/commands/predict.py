"""``fivefold predict``: memory, FLOPs, messages and time of one training step. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.cli.options import show
from fivefold.cli.pictures import draw, save_charts, save_trace
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import PredictOptions

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


@accept_request(PredictOptions)
def predict(
    request: PredictOptions, model: Model, machine: Machine, layout: Layout, job: Job, stated: frozenset[str]
) -> None:
    """Estimate memory, FLOPs, communication and time of one training step, without a GPU."""
    from fivefold.planner.predict import get_planner
    from fivefold.planner.predict import predict as run
    from fivefold.rendering import table

    step = run(model=model, machine=machine, layout=layout, job=job)
    show(step.model_dump_json(indent=2) if request.as_json else table.step(step, stated=stated))
    if not request.as_json and step.memory.fits is False:
        from rich.text import Text

        from fivefold.planner.questions.changes import find_fitting_change
        from fivefold.rendering.search import describe_fitting_change

        change = find_fitting_change(model=model, machine=machine, job=job, layout=layout)
        show(Text(f"\n{describe_fitting_change(change)}", style="yellow", overflow="fold"))
    if request.operations and not request.as_json:
        show(table.render_operations(step))
    if request.over_time and not request.as_json:
        draw(get_planner(model, machine, job), layout, step)
    if request.charts:
        save_charts(get_planner(model, machine, job), layout, step, folder=request.charts)
    if request.trace:
        save_trace(get_planner(model, machine, job), layout, step, path=request.trace)
