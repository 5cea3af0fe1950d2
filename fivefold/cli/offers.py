"""``fivefold search`` over several machines or numbers of ranks: one run, one table; prices, deadline, assumptions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import typer

from fivefold.cli.options import print_line, show
from fivefold.requests.commands import SearchOptions
from fivefold.requests.offers import list_offers

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.run_estimate import Offers


def show_offers(
    request: SearchOptions,
    model: Model,
    machines: Sequence[Machine],
    job: Job,
    *,
    stated: Collection[str] | None = None,
    batch_reason: str = "",
) -> None:
    """Print the table of one run on each machine."""
    from fivefold.rendering import run_estimate as page
    from fivefold.rendering.progress import show_progress

    with show_progress("searching") as progress:
        counter = iter(range(1, 10**6))
        results = list_offers(request, model, machines, job, done=lambda name: progress(name, next(counter), 0))
    if not request.as_json:
        from fivefold.rendering.question import describe_job

        show(describe_job(job, stated=stated, batch_reason=batch_reason))
    show(results.model_dump_json(indent=2) if request.as_json else page.render_offers(results))
    if not request.as_json:
        print_missing_options(request, results)
    if results.stopped:
        print_line("stopped: machines that were not searched yet are missing; others may be better")
        raise typer.Exit(130)


def print_missing_options(request: SearchOptions, results: Offers) -> None:
    """Print which option gives dollars, or more ranks to try, where they are missing from the table."""
    runs = [offer.run for offer in results.offers if offer.run]
    if request.deadline and request.tried_gpu_counts is None and len(runs) < len(results.offers):
        print_line("more GPUs than the machine has were not tried; give a range, such as --gpu-counts 64-8192")
    if runs and all(run.dollars is None for run in runs):
        names = dict.fromkeys(run.machine.split()[0] for run in runs)
        print_line(f"for dollars give {' '.join(f'--price {name}=DOLLARS/h' for name in names)}")
