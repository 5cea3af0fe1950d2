"""The commands that plan: predict, ask, ratios. No torch."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli.across import Assume, Prices
from fivefold.cli.arguments import takes_nouns
from fivefold.cli.job_options import takes_job
from fivefold.cli.options import AsJson, MachineName, ModelName, say, show, show_question
from fivefold.cli.pictures import ChartFolder, OverTime, TraceFile, draw, save_charts, save_trace
from fivefold.cli.risk import Risk
from fivefold.record import Mistake
from fivefold.requests.across import priced
from fivefold.requests.answers import Question, answers, noise_of
from fivefold.requests.machines import load_machine
from fivefold.requests.words import tokens_of
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


@takes_nouns
def predict(
    model: Model,
    machine: Machine,
    layout: Layout,
    job: Job,
    operations: Annotated[bool, typer.Option("--operations", help="Also list every operation.")] = False,
    over_time: OverTime = False,
    charts: ChartFolder = None,
    trace: TraceFile = None,
    json: AsJson = False,
) -> None:
    """Memory, work, traffic and time of one training step, without a GPU."""
    from fivefold.planner.predict import planner
    from fivefold.planner.predict import predict as run
    from fivefold.rendering import table

    step = run(model=model, machine=machine, layout=layout, job=job)
    show(step.model_dump_json(indent=2) if json else table.step(step))
    if operations and not json:
        show(table.operations(step))
    if over_time and not json:
        draw(planner(model, machine, job), layout, step)
    if charts:
        save_charts(planner(model, machine, job), layout, step, folder=charts)
    if trace:
        save_trace(planner(model, machine, job), layout, step, path=trace)


@takes_job
def ask(
    question: Annotated[Question, typer.Argument(help="What to find out.")],
    model: ModelName,
    machine: MachineName,
    layout: Annotated[str | None, typer.Argument(help="For micro-batch, sequence, batch, run and changes.")] = None,
    *,
    job: Job,
    tokens: Annotated[
        float, typer.Option(parser=tokens_of, metavar="TOKENS", help="Of the whole run, for batch and run: 2T.")
    ] = 1e12,
    price: Prices = None,
    assume: Assume = None,
    noise: Annotated[
        str | None, typer.Option(help="Of batch: the gradient noise scale in tokens, or the run folder that has it.")
    ] = None,
    risk: Risk = FITS_RISK,
    chart: Annotated[Path | None, typer.Option(help="Of run and sequence: draw it (.svg or .html).")] = None,
    json: AsJson = False,
) -> None:
    """What people ask: largest micro-batch, longest sequence, fewest gpus, largest model that fits, sound
    batch sizes, time and cost of a run, what one more change would give. Without a layout, of the fastest that fits.
    """
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import is_counted
    from fivefold.machine.datacenter import assumed
    from fivefold.model.catalog import resolve
    from fivefold.rendering import lengths, whole_run
    from fivefold.rendering import search as page

    chosen = None if layout is None else Layout.parse(layout)
    (ranks,) = priced([load_machine(machine)], price or [])
    if chart and question not in PICTURES:
        raise Mistake(f"--chart {chart}: there is no picture of {question!r}, but of {', '.join(PICTURES)}")
    found = answers(
        question, resolve(model), ranks, chosen, job=job, tokens=tokens, site=assumed(assume or []),
        noise=noise_of(noise), risk=risk, counted=is_counted(machine),
    )  # fmt: skip
    if json:
        show(json_module.dumps([each.model_dump(mode="json") for each in found], indent=2))
    else:
        pages: dict[str, Callable[[Any], Any]] = {
            "batch": page.batches, "changes": page.changes, "run": lambda runs: whole_run.page(runs[0]),
            "sequence": lambda found: lengths.page(found[0]),
        }  # fmt: skip
        open_fields = () if question != "gpus" or is_counted(machine) else ("ranks",)
        remarks = found[0].remarks if found else ()
        show_question(resolve(model), ranks, job, remarks=remarks, open_fields=open_fields)
        show(pages.get(question, page.answers)(found))
    if chart:
        save_chart((whole_run if question == "run" else lengths).chart(found[0]), chart)


PICTURES = ("run", "sequence")  # questions whose answer has a picture


def save_chart(chart: Any, path: Path) -> None:
    """A picture of an answer."""
    from fivefold.rendering.charts import save

    save(chart, path)
    say(f"drew {path}")


@takes_job
def ratios(
    model: ModelName,
    machine: MachineName,
    layout: Annotated[str, typer.Argument(help="The degrees that stay; each axis is varied alone.")] = "dp1",
    *,
    job: Job,
    degrees: Annotated[bool, typer.Option("--degrees", help="Also list every degree.")] = False,
    json: AsJson = False,
) -> None:
    """FLOPs per byte that each axis offers against what the links ask for: when it stops paying."""
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.planner.ratios import ratios as run
    from fivefold.rendering import ratios as page

    found = run(
        resolve(model), machine=load_machine(machine), layout=Layout.parse(layout),
        job=job,
    )  # fmt: skip
    if not json:
        show_question(resolve(model), load_machine(machine), job)
    show(found.model_dump_json(indent=2) if json else page.page(found))
    if degrees and not json:
        show(page.degrees(found))
