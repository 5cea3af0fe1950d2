"""``fivefold search`` of several machines or numbers of ranks: one run, one table; prices, deadline, assumptions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import show, tokens_of
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.where import Where
    from fivefold.layout.whole_run import Offers
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.plan.search.across import Goal

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
TOKENS = 1e12


def is_asked(by: str, others: Sequence[str] | None, *words: object) -> bool:
    """Whether a search is of a run on several machines or numbers of ranks, rather than of layouts of one machine."""
    return bool(others) or by == "energy" or any(word is not None for word in words)


def show_offers(
    model: Model, machines: Sequence[Machine], job: Job, *, by: str, where: Where, within: float, tokens: float | None,
    prices: Sequence[str], deadline: str | None, ranks: str | None, assume: Sequence[str], json: bool,
) -> None:  # fmt: skip
    """The table of the run on each machine."""
    from fivefold.show import whole_run as page
    from fivefold.show.progress import bar

    with bar("searching") as progress:
        done = iter(range(1, 10**6))
        found = offers(
            model, machines, job, by=by, where=where, within=within, tokens=tokens, prices=prices, deadline=deadline,
            ranks=ranks, assume=assume, done=lambda name: progress(name, next(done), 0),
        )  # fmt: skip
    show(found.model_dump_json(indent=2) if json else page.offers(found))


def offers(
    model: Model, machines: Sequence[Machine], job: Job, *, by: str, where: Where, within: float, tokens: float | None,
    prices: Sequence[str] = (), deadline: str | None = None, ranks: str | None = None, assume: Sequence[str] = (),
    done: Callable[[str], None] = lambda _: None,
) -> Offers:  # fmt: skip
    """The run on each machine, by the words of the command line."""
    from fivefold.machine.site import assumed
    from fivefold.plan.search.across import Choice, across, sizes_between

    goal: dict[str, Goal] = {"time": "time", "cost": "cost", "energy": "energy"}
    if by not in goal:
        raise Mistake(f"--by {by} is of layouts of one machine; several are ranked by time, cost or energy")
    few_many = None if ranks is None else _range(ranks)
    choices = []
    for machine in priced(machines, prices):
        low, high = few_many or (
            min(machine.ranks_per_node, machine.ranks) if deadline else machine.ranks,
            machine.ranks,
        )
        choices.append(Choice(machine, sizes_between(low, high, node=machine.ranks_per_node)))
    return across(
        model=model, choices=choices, job=job, tokens=TOKENS if tokens is None else tokens, site=assumed(assume),
        by=goal[by], within=within, where=where, deadline=None if deadline is None else _deadline(deadline),
        done=done,
    )  # fmt: skip


def priced(machines: Sequence[Machine], prices: Sequence[str]) -> list[Machine]:
    """The machines with the prices of ``--price``; a ``Mistake`` if one names a machine that is not there."""
    found = list(machines)
    for word in prices:
        name, equals, price = word.rpartition("=")
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", price.removesuffix("/h")):
            raise Mistake(f"--price {word!r} is no price; write h100=2.2/h, or 2.2 for all machines")
        mine = [at for at, each in enumerate(found) if not equals or each.name.split()[0] == name]
        if not mine:
            names = ", ".join(dict.fromkeys(each.name.split()[0] for each in found))
            raise Mistake(f"--price {word!r}: no machine is called {name!r}; there is {names}")
        for at in mine:
            found[at] = found[at].replace(dollars_per_rank_hour=float(price.removesuffix("/h")))
    return found


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,7})-([0-9]{1,7})", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]):
        raise Mistake(f"--ranks {text!r} is no range of ranks; write such as 64-512")
    return int(match[1]), int(match[2])


def _deadline(text: str) -> float:
    from fivefold.machine.site import seconds_of

    try:
        seconds = seconds_of(text)
    except ValueError as error:
        raise Mistake(f"--deadline {text!r} {error}") from None
    if not seconds:
        raise Mistake(f"--deadline {text!r} is no time; write such as 30d")
    return seconds
