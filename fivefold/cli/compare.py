"""``fivefold compare``: several layouts, machines, stacks, precisions or run files, side by side. No torch."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.arguments import shows_notes
from fivefold.cli.job_options import takes_job
from fivefold.cli.options import AsJson, Gpus, Ignore, say, show
from fivefold.record import Mistake
from fivefold.requests.cases import cases, jobs_of
from fivefold.requests.configs import LoadedConfig, build_request, load_config
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.planner.compare import Case


@takes_job
def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL MACHINE… LAYOUT… | RUN.toml…", help="One model, machines, layouts; or run files."
        ),
    ] = None,
    *,
    job: Job,
    from_files: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Configs of any software; beside them other layouts, and machines."),
    ] = None,
    gpus: Gpus = None,
    stacks: Annotated[str, typer.Option(help="Several softwares: fivefold,megatron-core.")] = "",
    ignore: Ignore = None,
    precisions: Annotated[str, typer.Option(help="Several precisions: bf16,fp8.")] = "",
    charts: Annotated[Path | None, typer.Option("--charts", help="Write time.svg and memory.svg there.")] = None,
    json: AsJson = False,
) -> None:
    """Predicted steps side by side: every layout on every machine, by every software, in every precision."""
    from fivefold.planner.compare import compare as run
    from fivefold.rendering import charts as pictures
    from fivefold.rendering import comparison as page

    configs = _load_configs(from_files, gpus, ignore)
    if configs:
        found = run(_of_configs(configs, gpus or "", words or [], job, stacks=stacks, precisions=precisions))
    else:
        found = run(cases(words or [], job, stacks=stacks, precisions=precisions, machine=load_machine))
    with shows_notes([config.notes for config in configs], json=json):
        show(found.model_dump_json(indent=2) if json else page.page(found))
    if charts:
        if charts.exists() and not charts.is_dir():
            raise Mistake(f"--charts {charts}: is a file; name a folder")
        charts.mkdir(parents=True, exist_ok=True)
        for name, chart in page.charts(found).items():
            pictures.save(chart, (charts / name).with_suffix(".svg"))
        say(f"wrote time.svg and memory.svg to {charts}")


def _load_configs(files: list[Path] | None, gpus: str | None, ignore: list[str] | None) -> list[LoadedConfig]:
    """The configs of ``--from``; ``Mistake`` if options are given that go with one, or the machine is not."""
    if files and gpus is None:
        raise Mistake(f"--from {files[0]}: on what machine? say --gpus h100:64")
    if not files and gpus:
        raise Mistake(f"--gpus {gpus} goes with --from FILE; name the machine after the model")
    if not files and ignore:
        raise Mistake(f"--ignore {' '.join(ignore)} goes with --from FILE: it names keys of a config")
    return [load_config([str(file)], build_request(gpus), ignore=ignore or ()) for file in files or []]


def _of_configs(
    configs: list[LoadedConfig], gpus: str, words: list[str], job: Job, *, stacks: str, precisions: str
) -> list[Case]:
    """Each config as it is, and with the layouts that are named instead of its own, on every machine."""
    from fivefold.cli.arguments import machine_of
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import is_named
    from fivefold.planner.compare import Case

    if job != Job():
        raise Mistake("--from takes the job of the configs; drop the options, or compare a model, machines and layouts")
    others = [word for word in words if is_named(word)]
    layouts = [Layout.parse(word) for word in words if not is_named(word)]
    found = []
    for config in configs:
        machines = [machine_of(gpus, config.layout.world), *map(load_machine, others)]
        jobs = jobs_of(config.job, stacks, precisions)
        found += [Case(config.model, *each) for each in product(machines, [config.layout, *layouts], jobs)]
    return found
