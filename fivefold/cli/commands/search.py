"""``fivefold search``: the best layouts for one machine, or single changes of one layout. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fivefold.cli.offers import show_offers
from fivefold.cli.options import print_line, show, show_question
from fivefold.cli.request_options import accept_request
from fivefold.cli.written_configs import choose_format, show_config, write_best
from fivefold.requests.commands import SearchOptions
from fivefold.requests.machines import load_machine
from fivefold.requests.offers import price_and_limit
from fivefold.requests.search import search_with_progress, walk

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.search_result import SearchResult


WRITABLE = 200  # layouts to rank, so that the stack's config can express at least one


@accept_request(SearchOptions)
def search(
    request: SearchOptions,
    model: Model,
    machine: Machine,
    job: Job,
    stated: frozenset[str],
    batch_reason: str = "",
    layout: Layout | None = None,
) -> None:
    """Find the best of all valid layouts that fit, and explain the choice; or compare one run on several machines."""
    if request.compares_machines:
        machines = [machine, *map(load_machine, request.machines)]
        show_offers(request, model, machines, job, stated=stated, batch_reason=batch_reason)
        return
    machine = price_and_limit(request, machine)
    if request.by == "cost" and machine.dollars_per_rank_hour is None:
        name = machine.name.split()[0]
        print_line(f"{machine.name} has no price: ranked by GPU hours; for dollars give --price {name}=2.2/h")
    if request.keep is not None:
        show_walk(request, model, machine, job, stated=stated)
        return
    form = choose_format(model, machine, job, request.write) if request.write else ""
    result = search_with_progress(
        request,
        model,
        machine,
        job,
        measure=request.measure,
        own=layout if layout and layout.world == machine.ranks else None,
        top=max(request.top, WRITABLE) if form else request.top,
    )
    show_found(
        result.replace(best=result.best[: request.top]), model, machine, job, json=request.as_json, stated=stated
    )
    if not job.stack.is_own_trainer and not request.write and not request.as_json:
        show_config(rank_layouts(result), model=model, machine=machine, job=take_precision(result, job))
    if request.write:
        written_job = take_precision(result, job)
        write_best(
            rank_layouts(result),
            model=model,
            machine=machine,
            job=written_job,
            path=request.write,
            form=form,
            stated=stated,
        )
    if request.chart:
        draw_front(result, request.chart, of=f"{model.name} on {machine.ranks} {machine.name}")
    exit_if_stopped(result)


def exit_if_stopped(result: SearchResult) -> None:
    """Exit with the code of an interrupted command, if Ctrl-C stopped the search."""
    if result.stopped:
        print_line(f"stopped: the best when {result.tried:,} layouts were decided; others may be better")
        raise typer.Exit(130)


def show_found(
    result: SearchResult, model: Model, machine: Machine, job: Job, *, json: bool, stated: Collection[str]
) -> None:
    """Print the page of a search, or its data."""
    from fivefold.rendering import search as page

    if not json:
        show_question(model, machine, job, remarks=result.remarks, stated=stated)
    show(result.model_dump_json(indent=2) if json else page.render_page(result, precision=job.precision.name))


def rank_layouts(result: SearchResult) -> list[str]:
    """Return layouts of one precision in order of preference: the proposal, then the fastest first."""
    ranked_steps = [*([result.proposal.choice] if result.proposal else []), *result.best]
    return [ranked.step.layout for ranked in ranked_steps if ranked.precision == ranked_steps[0].precision]


def take_precision(result: SearchResult, job: Job) -> Job:
    """Return the job in the precision of the layout that is preferred; with ``--also`` it may be another."""
    from fivefold.job import Job

    ranked_steps = [*([result.proposal.choice] if result.proposal else []), *result.best]
    if not ranked_steps or ranked_steps[0].precision == job.precision.name:
        return job
    return job.replace(precision=Job.read(dict(ranked_steps[0].step.job), origin="job").precision)


def show_walk(request: SearchOptions, model: Model, machine: Machine, job: Job, *, stated: Collection[str]) -> None:
    """Print the single changes of the layout that the request keeps."""
    from fivefold.rendering import search as page

    result = walk(request, model, machine, job)
    if not request.as_json:
        show_question(model, machine, job, stated=stated)
    show(result.model_dump_json(indent=2) if request.as_json else page.walk(result, top=request.top))


def draw_front(result: SearchResult, path: Path, *, of: str) -> None:
    """Draw the Pareto front of memory against time as a picture."""
    from fivefold.rendering.charts import save
    from fivefold.rendering.point_charts import draw_front_file

    save(draw_front_file(result, subtitle=of), path)
    print_line(f"drew {path}")
