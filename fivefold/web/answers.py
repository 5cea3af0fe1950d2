"""Computes the answers as records, one function per command: ``/api`` sends them as JSON, the pages draw them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.layout.spec import Layout
from fivefold.machine.catalog import is_counted
from fivefold.machine.datacenter import apply_assumptions
from fivefold.machine.spec import Machine
from fivefold.planner.predict import get_planner, predict
from fivefold.planner.time.memory_over_time import list_levels
from fivefold.planner.time.spans import Rows, build_spans, count_simulated
from fivefold.rendering.pipeline import describe_window
from fivefold.requests.answers import RunLimits, find_answers, read_noise_scale
from fivefold.requests.offers import apply_prices, list_offers, price_and_limit
from fivefold.requests.search import search_layouts, walk
from fivefold.results.run_estimate import Offers, RunEstimate
from fivefold.results.search_result import Batch, Change, FineTune, Lengths, QuestionAnswer, SearchResult, Walk
from fivefold.results.spans import Level
from fivefold.step import Step
from fivefold.web.folder import ServedFolder
from fivefold.web.question import ChosenQuestion, ResolvedRequest, SearchQuestion, parse_layout

if TYPE_CHECKING:
    from fivefold.planner.search.incumbents import EvaluatedLayout

    Fitted = Callable[[EvaluatedLayout], None]

MAX_DRAWN_MICRO_BATCHES = 16  # largest number of micro-batches in a picture of a step
Report = Callable[..., None]  # called with done, total, and what is being done
Found = SearchResult | Walk | Offers
Reply = QuestionAnswer | Batch | Change | FineTune | Lengths | RunEstimate  # to ask


class StepOverTime(NamedTuple):
    """A step over time: the pipeline's spans, and the memory of one rank."""

    rows: Rows
    levels: tuple[Level, ...]
    rank: int
    drawn: str


def step(resolved: ResolvedRequest, layout: Layout) -> Step:
    """Predict one step: the data of ``fivefold predict --json``."""
    return predict(model=resolved.model, machine=resolved.machine, layout=layout, job=resolved.job)


def predict_over_time(resolved: ResolvedRequest, layout: Layout, *, rank: int) -> StepOverTime:
    """Predict the step over time; ``rank``: the pipeline rank whose memory is drawn."""
    step_planner = get_planner(resolved.model, resolved.machine, resolved.job)
    limit = _choose_drawn_limit(layout)
    rows = build_spans(step_planner, layout, limit=limit)
    memory_levels = list_levels(step_planner, layout, rank=rank, limit=limit, rows=rows)
    drawn = describe_window(_count_drawn(resolved, layout), layout.micro_batches(resolved.job))
    return StepOverTime(rows, memory_levels, rank, drawn)


def _count_drawn(resolved: ResolvedRequest, layout: Layout) -> int:
    return count_simulated(layout, micro_batches=layout.micro_batches(resolved.job), limit=_choose_drawn_limit(layout))


def _choose_drawn_limit(layout: Layout) -> int:
    return max(2, MAX_DRAWN_MICRO_BATCHES // layout.v)


def answer_question(question: ChosenQuestion, resolved: ResolvedRequest, *, folder: ServedFolder) -> list[Any]:
    """Answer a question: the data of ``fivefold ask --json``."""
    (machine,) = apply_prices([resolved.machine], question.price)
    return find_answers(
        question.question,
        resolved.model,
        machine,
        parse_layout(question.layout, machine) if question.layout else None,
        job=resolved.job,
        tokens=question.tokens,
        site=apply_assumptions(question.assume),
        limits=RunLimits.parse(question.deadline, question.budget),
        noise=read_noise_scale(question.noise, find=folder.path),
        risk=question.risk,
        counted=is_counted(question.machine),
        stated=resolved.stated,
    )


def search(
    question: SearchQuestion,
    resolved: ResolvedRequest,
    *,
    machine: Callable[[str], Machine],
    report: Report,
    done: Callable[[str], None],
    fitted: Fitted | None = None,
) -> Found:
    """Return what ``fivefold search --json`` prints: a comparison of machines, changes (``keep``) or a search.

    ``machine``: resolves a machine's name; ``done`` is called with each machine whose layouts are searched, ``fitted``
    with every evaluated layout of one machine that fits.
    """
    if question.compares_machines:
        machines = [resolved.machine, *map(machine, question.machines)]
        return list_offers(question, resolved.model, machines, resolved.job, done=done)
    chosen = price_and_limit(question, resolved.machine)
    if question.keep:
        return walk(question, resolved.model, chosen, resolved.job)
    return search_layouts(question, resolved.model, chosen, resolved.job, report=report, fitted=fitted)
