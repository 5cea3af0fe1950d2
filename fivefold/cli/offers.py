"""``fivefold search`` over several machines or numbers of ranks: one run, one table; prices, deadline, assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fivefold.cli.options import say, show
from fivefold.requests.commands import SearchOptions
from fivefold.requests.offers import list_offers

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.where import Where
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model


def show_offers(
    request: SearchOptions, model: Model, machines: Sequence[Machine], job: Job, *, where: Where, within: float
) -> None:
    """Print the table of one run on each machine."""
    from fivefold.rendering import whole_run as page
    from fivefold.rendering.progress import bar

    with bar("searching") as progress:
        counter = iter(range(1, 10**6))
        results = list_offers(
            model,
            machines,
            job,
            by=request.by,
            where=where,
            within=within,
            tokens=request.tokens,
            prices=request.price,
            deadline=request.deadline,
            ranks=request.ranks,
            assume=request.assume,
            risk=request.risk,
            done=lambda name: progress(name, next(counter), 0),
        )
    if not request.as_json:
        from fivefold.rendering.question import describe_job

        show(describe_job(job))
    show(results.model_dump_json(indent=2) if request.as_json else page.offers(results))
    if results.stopped:
        say("stopped: machines that were not searched yet are missing; others may be better")
        raise typer.Exit(130)
