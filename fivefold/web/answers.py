"""The answers as records, one function per verb: what ``/api`` sends as JSON is what the pages are drawn from."""

from __future__ import annotations

from typing import NamedTuple

from fivefold.layout.spans import Level
from fivefold.layout.spec import Layout
from fivefold.plan.predict import Planner, planner, predict
from fivefold.plan.price.memory_over_time import levels
from fivefold.plan.price.spans import Rows, shown, spans
from fivefold.show.pipeline import remark
from fivefold.step import Step
from fivefold.web.question import Noun

DRAWN = 16  # micro-batches of a step that are drawn


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
