"""What a search found: the best layouts as steps, the front of memory against time, and why the others lost.

Plain records, so that whoever shows them needs no planner.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.record import Record
from fivefold.step import Step

By = Literal["time", "cost", "memory"]


class Ranked(Record):
    """A step with what it costs: all its ranks for as long as it takes."""

    step: Step
    gpu_hours: NonNegativeFloat
    dollars: NonNegativeFloat | None = None  # None: the machine has no price


class Point(Record):
    """A layout than which no other that was looked at is both smaller and faster."""

    layout: str
    precision: str
    world: PositiveInt
    memory_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat


class Reason(Record):
    """Why so many layouts lost, and the one of them that came nearest."""

    cause: str
    layouts: PositiveInt
    nearest: str
    line: str


class NearMiss(Record):
    """A layout that almost fits, and what would make it fit."""

    layout: str
    needs_bytes: NonNegativeInt
    has_bytes: PositiveInt
    cause: str
    mends: tuple[str, ...]


class SearchResult(Record):
    """The answer of ``plan.search``. ``tried`` = ``evaluated`` + those that bounds excluded."""

    by: By
    best: tuple[Ranked, ...]
    front: tuple[Point, ...]
    reasons: tuple[Reason, ...]
    misses: tuple[NearMiss, ...] = ()  # where nothing fits
    tried: NonNegativeInt
    evaluated: NonNegativeInt
    seconds: NonNegativeFloat


class Answer(Record):
    """One question and its number; ``layout`` is the one with which it holds."""

    question: str
    line: str
    value: float
    layout: str | None = None
    memory_bytes: NonNegativeInt | None = None
    step_seconds: NonNegativeFloat | None = None


class Change(Record):
    """One thing done otherwise, and what it does to a step."""

    change: str
    layout: str
    fits: bool
    memory_bytes: NonNegativeInt
    step_seconds: NonNegativeFloat
    faster: float  # times as fast as before
    saved_bytes: int


class Batch(Record):
    """A global batch within the range of recent runs, over the data-parallel ranks of a layout."""

    global_batch: PositiveInt
    tokens: PositiveInt
    micro_batches: PositiveInt  # gradient accumulation of each pipeline
    steps: PositiveInt  # for the whole budget
