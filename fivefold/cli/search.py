"""``fivefold search``: the best layouts of one machine, one change at a time from a layout. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fivefold.cli.across import Assume, Deadline, Others, Prices, Ranks, Tokens, show_offers
from fivefold.cli.arguments import takes_nouns
from fivefold.cli.formats import refuse_untold, write_best
from fivefold.cli.options import AsJson, say, show, show_question
from fivefold.cli.risk import Risk
from fivefold.requests.across import is_asked, priced, refuse_of_one
from fivefold.requests.machines import load_machine
from fivefold.requests.search import ALIKE, MOST_SHOWN, admitted, found_layouts, limited, walk
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.where import Where
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.results.search_result import SearchResult


Goal = Annotated[
    Literal["time", "cost", "memory", "energy", "robust"],
    typer.Option(help="The best has least of it; robust: loses least if network, kernels, experts or a rank differ."),
]
Within = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Layouts so near to the best are alike; the simplest is proposed.", show_default="0.02"
    ),
]
Front = Annotated[int, typer.Option(min=1, max=MOST_SHOWN, help="Memory limits for the front of memory against time.")]
Measure = Annotated[
    int, typer.Option(min=0, help="Also train so many of the best for a few steps each, on this computer.")
]
Two = Annotated[bool, typer.Option("--2d", help="Also tensor parallelism in two dimensions, which is not run.")]
Memory = Annotated[str | None, typer.Option("--memory", help="Plan for GPUs of so much memory, such as 72GiB.")]
Keep = Annotated[
    str | None, typer.Option("--keep", help="Change one thing at a time from this layout: what helps most?")
]

WRITABLE = 200  # layouts of a ranking, one of which the stack's config can say
WriteBest = Annotated[
    Path | None, typer.Option("--write", help="Write the best as the config of --stack: file or folder.")
]


@takes_nouns
def search(
    model: Model,
    machine: Machine,
    job: Job,
    others: Others = None,
    by: Goal = "time",
    top: Annotated[int, typer.Option(min=1, max=MOST_SHOWN, help="How many layouts to show.")] = 10,
    also: Annotated[list[str] | None, typer.Option(help="Another precision to try, such as fp8.")] = None,
    where: Annotated[str, typer.Option(help="Only such layouts: 'tp<=8 cp=1 zero<=1 ac=none,selective'.")] = "",
    memory: Memory = None,
    risk: Risk = FITS_RISK,
    keep: Keep = None,
    within: Within = None,
    exact: Annotated[bool, typer.Option("--exact", help="The ranking alone, without a proposal.")] = False,
    front: Front = 1,
    chart: Annotated[Path | None, typer.Option(help="Draw the front (.svg or .html).")] = None,
    measure: Measure = 0,
    two: Two = False,
    tokens: Tokens = None,
    price: Prices = None,
    deadline: Deadline = None,
    ranks: Ranks = None,
    assume: Assume = None,
    write: WriteBest = None,
    json: AsJson = False,
) -> None:
    """The best of all legal layouts that fit, and why the others lost; or one run on several machines."""
    only, near = admitted(where), None if exact else ALIKE if within is None else within
    if is_asked(by, others, tokens, deadline, ranks, assume):
        refuse_of_one(keep=keep, also=also, front=front > 1, chart=chart, measure=measure, write=write, **{"2d": two})
        machines = [limited(each, memory) for each in (machine, *map(load_machine, others or []))]
        show_offers(
            model, machines, job, by=by, where=only, within=near or 0.0, tokens=tokens, prices=price or [],
            deadline=deadline, ranks=ranks, assume=assume or [], risk=risk, json=json,
        )  # fmt: skip
        return
    machine = _wanted(machine, price or [], memory=memory, by=by)
    if keep is not None:
        show_walk(model, machine, job, start=keep, by=by, where=only, risk=risk, top=top, json=json)
        return
    asked = {"by": by, "levels": front, "within": near, "where": only, "two_dimensional": two, "risk": risk}
    most = _to_write(top, model, machine, job) if write else top
    found = found_layouts(model, machine, job, also=also or [], measure=measure, top=most, **asked)
    show_found(found.replace(best=found.best[:top]), model, machine, job, json=json)
    if write:
        write_best(ranking(found), model=model, machine=machine, job=job, path=write)
    if chart:
        draw_front(found, chart, of=f"{model.name} on {machine.ranks} {machine.name}")
    say_if_stopped(found)


def _to_write(top: int, model: Model, machine: Machine, job: Job) -> int:
    """How many layouts to look for; ``Mistake`` if the config of the job's stack has no words for model or job."""
    refuse_untold(model, machine, job)
    return max(top, WRITABLE)


def _wanted(machine: Machine, price: Sequence[str], *, memory: str | None, by: str) -> Machine:
    """The machine with what options say of it; one without a price is named where layouts are ranked by cost."""
    (machine,) = priced([machine], price)
    if by == "cost" and machine.dollars_per_rank_hour is None:
        name = machine.name.split()[0]
        say(f"{machine.name} has no price: ranked by GPU-hours; for dollars give --price {name}=2.2/h")
    return limited(machine, memory)


def say_if_stopped(found: SearchResult) -> None:
    """End with the exit code of what Ctrl-C ended, if it ended the search."""
    if found.stopped:
        say(f"stopped: the best when {found.tried:,} layouts were decided; others may be better")
        raise typer.Exit(130)


def show_found(found: SearchResult, model: Model, machine: Machine, job: Job, *, json: bool) -> None:
    """The page of a search, or its data."""
    from fivefold.rendering import search as page

    if not json:
        show_question(model, machine, job)
    show(found.model_dump_json(indent=2) if json else page.page(found))


def ranking(found: SearchResult) -> list[str]:
    """Layouts in the order of preference: the proposal, then the fastest first."""
    chosen = [found.proposal.layout] if found.proposal else []
    return [*chosen, *(each.step.layout for each in found.best)]


def show_walk(
    model: Model, machine: Machine, job: Job, *, start: str, by: str, where: Where, risk: float, top: int, json: bool
) -> None:  # fmt: skip
    """One change at a time from the layout ``start``."""
    from fivefold.rendering import search as page

    found = walk(model, machine, job, start=start, by=by, where=where, risk=risk)
    if not json:
        show_question(model, machine, job)
    show(found.model_dump_json(indent=2) if json else page.walk(found, top=top))


def draw_front(found: SearchResult, path: Path, *, of: str) -> None:
    """The front of memory against time, as a picture."""
    from fivefold.rendering import search as page
    from fivefold.rendering.charts import save

    save(page.front_chart(found, subtitle=of), path)
    say(f"drew {path}")
