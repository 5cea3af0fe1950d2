"""The answers as records, one function per verb: what ``/api`` sends as JSON is what the pages are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.catalog import is_counted
from fivefold.machine.datacenter import assumed
from fivefold.machine.spec import Machine
from fivefold.planner.predict import Planner, planner, predict
from fivefold.planner.time.memory_over_time import levels
from fivefold.planner.time.spans import Rows, shown, spans
from fivefold.rendering.pipeline import remark
from fivefold.requests.across import offers, priced, refuse_of_one
from fivefold.requests.answers import answers, noise_of
from fivefold.requests.commands import Question as AskedQuestion
from fivefold.requests.search import alike_within, limited, others, walk
from fivefold.results.search_result import SearchResult, Walk
from fivefold.results.spans import Level
from fivefold.results.whole_run import Offers
from fivefold.step import Step
from fivefold.web.folder import Folder
from fivefold.web.question import AskQuestion, Noun, SearchQuestion

DRAWN = 16  # micro-batches of a step that are drawn
Report = Callable[..., None]  # hears done, of how many, and what
Found = SearchResult | Walk | Offers


class Planned(NamedTuple):
    """A predicted step, and over time: the pipeline's spans, and the memory of one rank."""

    step: Step
    rows: Rows
    levels: tuple[Level, ...]
    rank: int
    drawn: str


def step(noun: Noun, layout: Layout) -> Step:
    """What ``fivefold predict --json`` prints."""
    return predict(model=noun.model, machine=noun.machine, layout=layout, job=noun.job)


def planned(noun: Noun, layout: Layout, *, rank: int | None = None) -> Planned:
    """The step over time; ``rank``: whose memory, by default the fullest."""
    found, using = step(noun, layout), planner(noun.model, noun.machine, noun.job)
    stages = found.memory.stages
    if rank is None or not 0 <= rank < len(stages):
        rank = max(stages, key=lambda stage: stage.peak_bytes).stage
    limit = max(2, DRAWN // layout.v)
    rows = spans(using, layout, limit=limit)
    lives = levels(using, layout, rank=rank, limit=limit, rows=rows)
    return Planned(found, rows, lives, rank, _drawn(using, layout, limit))


def _drawn(using: Planner, layout: Layout, limit: int) -> str:
    micro_batches = layout.micro_batches(using.job)
    return remark(shown(layout, micro_batches=micro_batches, limit=limit), micro_batches)


def asked(about: AskedQuestion, question: AskQuestion, noun: Noun, *, folder: Folder) -> list[Any]:
    """What ``fivefold ask --json`` prints."""
    (machine,) = priced([noun.machine], question.price)
    return answers(
        about, noun.model, machine, Layout.parse(question.layout) if question.layout else None, job=noun.job,
        tokens=question.tokens, site=assumed(question.assume),
        noise=noise_of(question.noise, find=folder.path), risk=question.risk,
        counted=is_counted(question.machine),
    )  # fmt: skip


def search(
    question: SearchQuestion, noun: Noun, *, machine: Callable[[str], Machine], report: Report,
    done: Callable[[str], None],
) -> Found:  # fmt: skip
    """What ``fivefold search --json`` prints: of layouts, of one change at a time, or of a run on several machines.

    ``machine``: the one of a name; ``done`` hears of each machine whose layouts are searched.
    """
    if question.is_of_run:
        refuse_of_one(question)
        several = (noun.machine, *map(machine, question.machines))
        return offers(
            noun.model, [limited(each, question.memory) for each in several], noun.job, by=question.by,
            where=Where.parse(question.where), within=alike_within(question) or 0.0, tokens=question.tokens,
            prices=question.price, deadline=question.deadline, ranks=question.ranks, assume=question.assume,
            risk=question.risk, done=done,
        )  # fmt: skip
    if question.keep:
        return walk(
            noun.model, _machine(question, noun), noun.job, start=question.keep, by=question.by,
            where=Where.parse(question.where), risk=question.risk,
        )  # fmt: skip
    return layouts(question, noun, report=report)


def layouts(question: SearchQuestion, noun: Noun, *, report: Report) -> SearchResult:
    """The best layouts of one machine."""
    from fivefold.job import recipe
    from fivefold.planner.search import search as run

    by: Any = question.by  # which is not energy: that is of a run
    return run(
        model=noun.model, machine=_machine(question, noun), job=noun.job, by=by, top=question.top,
        levels=question.front, within=alike_within(question), where=Where.parse(question.where),
        recipes=[recipe(name) for name in question.also], reduces=others(noun.job), two_dimensional=question.two,
        report=report, risk=question.risk,
    )  # fmt: skip


def _machine(question: SearchQuestion, noun: Noun) -> Machine:
    """The machine with the price and the memory that the question gives it."""
    return limited(priced([noun.machine], question.price)[0], question.memory)
