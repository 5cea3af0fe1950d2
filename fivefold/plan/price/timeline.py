"""The step of one rank laid out in time: spans of compute, messages and the update.

Today's engine waits for every message where it is issued, so nothing overlaps and the spans follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import span as span_of
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.plan.count.ops import Op
from fivefold.plan.count.traffic import messages
from fivefold.plan.count.work import operations
from fivefold.plan.price import network
from fivefold.plan.price.compute import Prices
from fivefold.step import StageMemory, Time


class Span(NamedTuple):
    """``name`` keeps the rank busy for ``seconds``; ``kind`` is compute, an axis, or optimizer."""

    name: str
    kind: str
    seconds: float


class Priced(NamedTuple):
    """An operation with the seconds of one forward and one backward."""

    op: Op
    forward: float
    backward: float


Unit = tuple[int, list[Priced]]  # how often the unit occurs, and its operations


def priced(model: Model, *, prices: Prices, layout: Layout, job: Job) -> list[Unit]:
    """Every distinct unit of a micro-batch with the prices of its operations."""
    return [
        (times, [Priced(op, *prices.operation(op, heads=model.heads)) for op in ops])
        for times, ops in operations(model, job, sequences=layout.mbs)
    ]


def play(model: Model, work: list[Unit], *, prices: Prices, layout: Layout, job: Job, memory: StageMemory) -> Time:
    """The time of one step, and what it is bound by."""
    spans = list(_spans(model, work, prices=prices, layout=layout, job=job, memory=memory))
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.kind] = totals.get(span.kind, 0.0) + span.seconds
    exposed = {kind: total for kind, total in totals.items() if kind not in ("compute", "optimizer")}
    longest = max(spans, key=lambda span: span.seconds)
    return Time(
        step_seconds=sum(totals.values()),
        compute_seconds=totals["compute"],
        exposed_seconds=exposed,
        optimizer_seconds=totals["optimizer"],
        bound_by=longest.name,
    )


def _spans(
    model: Model, work: list[Unit], *, prices: Prices, layout: Layout, job: Job, memory: StageMemory
) -> Iterator[Span]:
    micro_batches = layout.micro_batches(job)
    by_kind: dict[str, float] = {}
    for times, unit in work:
        for op, forward, backward in unit:
            by_kind[op.kind] = by_kind.get(op.kind, 0.0) + times * micro_batches * (forward + backward)
    for kind, seconds in by_kind.items():
        yield Span(kind, "compute", seconds)
    recipe = job.precision
    summed = micro_batches * model.parameters * (recipe.gradients_bytes + 2 * recipe.summed_bytes)
    yield Span("gradient sums", "compute", prices.moving(summed, kernel="add"))
    for message in messages(model, layout=layout, job=job):
        each = network.seconds(message, machine=prices.machine, span=span_of(layout, message.axis))
        yield Span(f"{message.axis} {message.collective}", message.axis, message.times * each)
    yield Span("optimizer", "optimizer", _update(prices, job, memory))


def _update(prices: Prices, job: Job, memory: StageMemory) -> float:
    """AdamW reads and writes weight and moments and reads the gradient; clipping reads it twice and writes it once."""
    recipe = job.precision
    numel = memory.optimizer_bytes // max(1, sum(recipe.moments_bytes))
    update = numel * (2 * recipe.updated_bytes + 2 * sum(recipe.moments_bytes) + recipe.updated_bytes)
    clip = numel * 3 * recipe.updated_bytes if job.optimizer.clip else 0
    cast = numel * (recipe.updated_bytes + recipe.weights_bytes) if recipe.master_bytes else 0
    return prices.moving(update, kernel="adamw") + prices.moving(clip + cast, kernel="add")
