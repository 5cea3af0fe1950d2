"""``fivefold search`` of several machines or numbers of ranks: one run, one table; prices, deadline, assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import say, show
from fivefold.requests.across import offers
from fivefold.requests.words import tokens_of

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.where import Where
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model

Others = Annotated[
    list[str] | None, typer.Argument(metavar="[MACHINE…]", help="More machines: one table of the run on each.")
]
Tokens = Annotated[
    float | None,
    typer.Option(parser=tokens_of, metavar="TOKENS", help="Of the run, with several machines or ranks: such as 2T."),
]
Prices = Annotated[list[str] | None, typer.Option("--price", help="Dollars per GPU and hour: 'h100=2.2/h', or '2.2'.")]
Deadline = Annotated[
    str | None, typer.Option(help="The fewest ranks of each machine whose run takes at most this: 30d.")
]
Ranks = Annotated[str | None, typer.Option("--ranks", help="Numbers of ranks to try, from FEW-MANY: 64-512.")]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", help="Of a whole run: failures=, restart=, checkpoint=, storage=, pue=, grid=, …"),
]


def show_offers(
    model: Model, machines: Sequence[Machine], job: Job, *, by: str, where: Where, within: float, tokens: float | None,
    prices: Sequence[str], deadline: str | None, ranks: str | None, assume: Sequence[str], risk: float, json: bool,
) -> None:  # fmt: skip
    """The table of the run on each machine."""
    from fivefold.rendering import whole_run as page
    from fivefold.rendering.progress import bar

    with bar("searching") as progress:
        done = iter(range(1, 10**6))
        found = offers(
            model, machines, job, by=by, where=where, within=within, tokens=tokens, prices=prices, deadline=deadline,
            ranks=ranks, assume=assume, risk=risk, done=lambda name: progress(name, next(done), 0),
        )  # fmt: skip
    if not json:
        from fivefold.rendering.question import describe_job

        show(describe_job(job))
    show(found.model_dump_json(indent=2) if json else page.offers(found))
    if found.stopped:
        say("stopped: machines that were not searched yet are missing; others may be better")
        raise typer.Exit(130)
