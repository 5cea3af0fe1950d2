"""The commands that plan: predict, search, ratios, published. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.pictures import ChartFolder, OverTime, TraceFile, draw, save_charts, save_trace
from fivefold.cli.words import (
    AsJson,
    Attention,
    GlobalBatch,
    JobFile,
    LayoutText,
    MachineName,
    ModelName,
    Precision,
    Sequence,
    Settings,
    load_job,
    load_machine,
    say,
    show,
)


def predict(
    model: ModelName,
    machine: MachineName,
    layout: LayoutText,
    job: JobFile = None,
    seq: Sequence = None,
    gbs: GlobalBatch = None,
    precision: Precision = None,
    attention: Attention = None,
    settings: Settings = None,
    operations: Annotated[bool, typer.Option("--operations", help="Also list every operation.")] = False,
    over_time: OverTime = False,
    charts: ChartFolder = None,
    trace: TraceFile = None,
    json: AsJson = False,
) -> None:
    """Memory, work, traffic and time of one training step, without a GPU."""
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.plan.predict import planner
    from fivefold.plan.predict import predict as run
    from fivefold.show import table

    chosen, spec, ranks = Layout.parse(layout), resolve(model), load_machine(machine)
    task = load_job(job, settings, sequence=seq, global_batch=gbs, precision=precision, attention=attention)
    step = run(model=spec, machine=ranks, layout=chosen, job=task)
    show(step.model_dump_json(indent=2) if json else table.step(step))
    if operations and not json:
        show(table.operations(step))
    if over_time and not json:
        draw(planner(spec, ranks, task), chosen, step)
    if charts:
        save_charts(planner(spec, ranks, task), chosen, step, folder=charts)
    if trace:
        save_trace(planner(spec, ranks, task), chosen, step, path=trace)


def search(
    model: ModelName,
    machine: MachineName,
    job: JobFile = None,
    seq: Sequence = None,
    gbs: GlobalBatch = None,
    precision: Precision = None,
    attention: Attention = None,
    settings: Settings = None,
    top: Annotated[int, typer.Option(help="How many layouts to show.")] = 10,
    json: AsJson = False,
) -> None:
    """The fastest layouts that fit, and why the others lost."""
    import json as json_module

    from fivefold.model.catalog import resolve
    from fivefold.plan.search import search as run
    from fivefold.show import table

    found = run(
        model=resolve(model), machine=load_machine(machine),
        job=load_job(job, settings, sequence=seq, global_batch=gbs, precision=precision, attention=attention),
    )  # fmt: skip
    if json:
        steps = [step.model_dump(mode="json") for step in found.steps[:top]]
        refused = [{"layout": layout, "reason": reason} for layout, reason in found.refused]
        show(json_module.dumps({"steps": steps, "refused": refused}, indent=2))
    else:
        show(table.layouts(found.steps, refused=found.refused, limit=top))


def ratios(
    model: ModelName,
    machine: MachineName,
    layout: Annotated[str, typer.Argument(help="The degrees that stay; each axis is varied alone.")] = "dp1",
    job: JobFile = None,
    seq: Sequence = None,
    gbs: GlobalBatch = None,
    precision: Precision = None,
    settings: Settings = None,
    degrees: Annotated[bool, typer.Option("--degrees", help="Also list every degree.")] = False,
    json: AsJson = False,
) -> None:
    """FLOPs per byte that each axis offers against what the links ask for: when it stops paying."""
    from fivefold.layout.spec import Layout
    from fivefold.model.catalog import resolve
    from fivefold.plan.ratios import ratios as run
    from fivefold.show import ratios as page

    found = run(
        resolve(model), machine=load_machine(machine), layout=Layout.parse(layout),
        job=load_job(job, settings, sequence=seq, global_batch=gbs, precision=precision),
    )  # fmt: skip
    show(found.model_dump_json(indent=2) if json else page.page(found))
    if degrees and not json:
        show(page.degrees(found))


def published(
    sources: Annotated[list[str] | None, typer.Argument(help="Data files by name; without any, all of them.")] = None,
    excluded: Annotated[
        bool, typer.Option("--excluded", help="Also list what is left out, and why.")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every run with its prediction.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As the table of the README.")] = False,
    learn: Annotated[Path | None, typer.Option(help="Write the error to expect of each class of runs here.")] = None,
    json: AsJson = False,
) -> None:
    """Predictions against what others measured and published: every accuracy claim, made anew."""
    from fivefold.check.published import SOURCES, run, table_markdown
    from fivefold.check.published.regimes import learn as learned
    from fivefold.check.published.regimes import write
    from fivefold.show import published as page

    report = run(tuple(sources) if sources else SOURCES)
    if json:
        show(report.model_dump_json(indent=2))
    elif markdown:
        show(table_markdown(report))
    else:
        left_out = [(refusal.source, refusal.rule) for refusal in report.excluded] if excluded else []
        show(page.table(report.summaries, excluded=left_out))
        if rows:
            show(page.runs([(s.source, s.row, s.layout, s.quantity, s.predicted, s.measured) for s in report.scores]))
    if learn:
        write(learned(report.scores), learn)
        say(f"wrote {learn}")
