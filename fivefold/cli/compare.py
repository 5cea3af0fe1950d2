"""``fivefold compare``: several layouts, machines, stacks, precisions or run files, side by side. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.asked.cases import cases
from fivefold.cli.job_options import takes_job
from fivefold.cli.options import AsJson, load_machine, say, show
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.job import Job


@takes_job
def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL MACHINE… LAYOUT… | RUN.toml…", help="One model, machines, layouts; or run files."
        ),
    ],
    job: Job,
    stacks: Annotated[str, typer.Option(help="Several softwares: fivefold,megatron-core.")] = "",
    precisions: Annotated[str, typer.Option(help="Several precisions: bf16,fp8.")] = "",
    charts: Annotated[Path | None, typer.Option("--charts", help="Write time.svg and memory.svg there.")] = None,
    json: AsJson = False,
) -> None:
    """Predicted steps side by side: every layout on every machine, by every software, in every precision."""
    from fivefold.plan.compare import compare as run
    from fivefold.show import charts as pictures
    from fivefold.show import comparison as page

    found = run(cases(words, job, stacks=stacks, precisions=precisions, machine=load_machine))
    show(found.model_dump_json(indent=2) if json else page.page(found))
    if charts:
        if charts.exists() and not charts.is_dir():
            raise Mistake(f"--charts {charts}: is a file; name a folder")
        charts.mkdir(parents=True, exist_ok=True)
        for name, chart in page.charts(found).items():
            pictures.save(chart, (charts / name).with_suffix(".svg"))
        say(f"wrote time.svg and memory.svg to {charts}")
