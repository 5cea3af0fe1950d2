"""``fivefold compare``: layouts, machines, stacks, precisions or run files, side by side. Does not import torch."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from fivefold.cli.arguments import add_fields, print_notes
from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.errors import UserError
from fivefold.requests.cases import list_cases, list_jobs, price_cases
from fivefold.requests.commands import CompareOptions
from fivefold.requests.configs import LoadedConfig, build_request, list_fields, load_config
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.planner.compare import ComparedCase


@accept_request(CompareOptions)
def compare(request: CompareOptions, job: Job, stated: frozenset[str]) -> None:
    """Compare predicted steps side by side: layouts, machines, software, precisions, or run files."""
    from fivefold.planner.compare import compare as run
    from fivefold.rendering import charts as pictures
    from fivefold.rendering import comparison as page

    configs, charts = _load_configs(request), request.charts
    if configs:
        selected_cases = _list_config_cases(configs, request, job)
    else:
        selected_cases = list_cases(
            request.words,
            job,
            stacks=request.stacks,
            precisions=request.precisions,
            machine=load_machine,
            stated=stated,
            risk=request.risk,
        )
    comparison = run(price_cases(selected_cases, request.price), risk=request.risk)
    notes = [config.notes for config in configs]
    print_notes(notes)
    with add_fields(list_fields(notes) if request.as_json else {}):
        show(comparison.model_dump_json(indent=2) if request.as_json else page.render_page(comparison))
    if charts:
        pictures.save_all(page.draw_charts(comparison), charts, (".svg",))
        print_line(f"wrote time.svg and memory.svg to {charts}")


def _load_configs(request: CompareOptions) -> list[LoadedConfig]:
    """Load the configs of ``--from``; raises ``UserError`` if options and configs do not go together."""
    files, gpus, ignore = request.from_files, request.gpus, request.ignore
    if files and gpus is None:
        raise UserError(f"--from {files[0]} needs a machine: add --gpus h100:64")
    if not files and gpus:
        raise UserError(f"--gpus {gpus} is valid with --from FILE only; name the machine after the model")
    if not files and ignore:
        raise UserError(f"--ignore {' '.join(ignore)} is valid with --from FILE only: it names keys of a config")
    return [load_config([str(file)], build_request(gpus, _find_model(request)), ignore=ignore) for file in files]


def _find_model(request: CompareOptions) -> str | None:
    """Return the model that is named before ``--from``, for configs that name none."""
    from pathlib import Path

    from fivefold.model.catalog import find_published

    name = request.words[0] if request.words else None
    is_model = name is not None and (find_published(name) is not None or Path(name).exists())
    return name if is_model else None


def _list_config_cases(configs: list[LoadedConfig], request: CompareOptions, job: Job) -> list[ComparedCase]:
    """Return the cases of each config: its own layout and the layouts named, on every machine."""
    from fivefold.cli.arguments import resolve_machine
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import is_named
    from fivefold.planner.compare import ComparedCase

    if job != Job():
        raise UserError(
            "--from takes the job from the configs; drop the job options (such as --seq), or compare a model, machines "
            "and layouts without --from"
        )
    words = request.words[1:] if _find_model(request) else request.words
    machine_names = [word for word in words if is_named(word)]
    layouts = [Layout.parse(word) for word in words if not is_named(word)]
    config_cases = []
    for config in configs:
        machines = [resolve_machine(request.gpus or "", config.layout.world), *map(load_machine, machine_names)]
        jobs = list_jobs(config.job, request.stacks, request.precisions)
        config_cases += [
            ComparedCase(config.model, *combination)
            for combination in product(machines, [config.layout, *layouts], jobs)
        ]
    return config_cases
