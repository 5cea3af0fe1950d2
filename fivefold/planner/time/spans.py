"""The spans (start, end) of one step per pipeline rank: the schedule simulated with the timeline's seconds.

    actions of the schedule | exposed reductions and gathers of data parallelism | update

The last end is the step time of ``Planner.estimate``. On a calibrated computer, spans are longer by the same factor, so
that they include the host and the waits, which occur all over the step (``step_overhead.py``). A long step is drawn as
a shorter one with the same warm-up and cool-down: the omitted rounds in the middle all take the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.order import Task
from fivefold.layout.schedule.simulation import simulate_schedule
from fivefold.layout.spec import Layout
from fivefold.planner.counts.memory.peak import RankMemory, count_rank_memory
from fivefold.planner.time.action_time import estimate_action_costs
from fivefold.planner.time.stage_time import ActionCost, estimate_stage_seconds
from fivefold.planner.time.steady_state import build_step_table
from fivefold.planner.time.timeline import price_step_end
from fivefold.results.spans import REFERENCE, Span

if TYPE_CHECKING:
    from fivefold.planner.predict import Planner

Rows = tuple[tuple[Span, ...], ...]


def count_simulated(layout: Layout, *, micro_batches: int, limit: int | None) -> int:
    """Return the number of micro-batches that ``build_spans`` simulates.

    It is all, or about ``limit``, but at least two rounds of pp.
    """
    if limit is None or micro_batches <= limit:
        return micro_batches
    rest = micro_batches % layout.pp  # only full rounds may be omitted
    return min(micro_batches, rest + layout.pp * max(2, (limit - rest) // layout.pp))


def build_spans(planner: Planner, layout: Layout, *, limit: int | None = None) -> Rows:
    """Return each pipeline rank's spans in order of time, for ``count_simulated`` micro-batches; no ``limit``: all."""
    count = count_simulated(layout, micro_batches=layout.micro_batches(planner.job), limit=limit)
    ranks = count_rank_memory(planner.counts, layout)
    rows = _build_rows(planner, layout, ranks, count=count)
    step_time = planner.estimate(layout, ranks=ranks).step_time
    overhead = step_time.overhead
    if not overhead:
        return rows
    factor = step_time.seconds / (step_time.seconds - overhead)
    return tuple(tuple(_scale_span(span, factor) for span in row) for row in rows)


def _scale_span(span: Span, factor: float) -> Span:
    return span._replace(start=factor * span.start, end=factor * span.end, messages=factor * span.messages)


def _build_rows(planner: Planner, layout: Layout, ranks: list[RankMemory], *, count: int) -> Rows:
    """Return the spans of each pipeline rank without the overhead of a calibrated computer."""
    if layout.pp == 1:
        builder = _SpanBuilder(planner, layout, (Task("F", 0, -1), Task("BW", 0, -1)))
        return (builder.build_without_pipeline(count, ranks[0]),)
    table = build_step_table(layout.schedule, layout.pp, layout.v, planner.job.has_reference, count)
    builder = _SpanBuilder(planner, layout, table.order.tasks)
    hop_delay, seconds = builder.stages.p2p_delay, builder.seconds
    simulated = simulate_schedule(table, seconds=seconds.__getitem__, hop_seconds=lambda *_: hop_delay, queues=True)
    rows = []
    for rank_stages, row, rank in zip(table.rank_stages, simulated.spans, ranks, strict=True):
        actions = [builder.span(action, start, end, count=count) for action, start, end in row]
        rows.append(builder.append_end(actions, rank_stages, rank))
    return tuple(rows)


class _SpanBuilder:
    """The spans of one layout's actions, from their seconds."""

    def __init__(self, planner: Planner, layout: Layout, tasks: Sequence[Task]) -> None:
        self.units, self.layout = planner.units, layout
        self.stages = estimate_stage_seconds(planner.units, layout)
        costs = estimate_action_costs(self.stages, tasks)
        self.seconds = {task: cost.seconds for task, cost in costs.items()}
        self.exposed = {task: _sum_exposed(cost) for task, cost in costs.items()}

    def span(self, action: Action, start: float, end: float, *, count: int) -> Span:
        """Return the span of one action of the schedule, with its exposed seconds and their axes.

        From micro-batch ``count`` on, the actions are the forwards of DPO's reference.
        """
        prefix = ""
        if action.micro_batch >= count:
            prefix, action = REFERENCE, action._replace(micro_batch=action.micro_batch - count)
        exposed = self.exposed[Task(action.kind, action.stage, action.backward_stage)]
        return Span(action.kind, f"{prefix}{action}", start, end, *exposed, *action[1:])

    def build_without_pipeline(self, count: int, rank: RankMemory) -> tuple[Span, ...]:
        """Return the row of a layout without a pipeline: F and BW of one micro-batch after another."""
        row: list[Span] = []
        end = 0.0
        passes = [(task, micro_batch) for micro_batch in range(count) for task in self.seconds]
        if self.units.job.has_reference:
            forward = next(task for task in self.seconds if task.kind == "F")
            passes = [*((forward, count + micro_batch) for micro_batch in range(count)), *passes]
        for task, micro_batch in passes:
            start, end = end, end + self.seconds[task]
            row.append(self.span(Action(task.kind, 0, micro_batch), start, end, count=count))
        return self.append_end(row, (0,), rank)

    def append_end(self, row: list[Span], chunks: tuple[int, ...], rank: RankMemory) -> tuple[Span, ...]:
        """Return ``row`` with its end: overlapped reductions lengthen the last action.

        Exposed ones and the update follow it.
        """
        units = self.stages.unit_seconds[chunks[0]]
        ends, small_seconds, update, _ = price_step_end(self.units, self.layout, rank, chunks, units)
        row[-1] = row[-1]._replace(end=row[-1].end + ends.slowdown)
        start = row[-1].end
        reduce_end = start + ends.exposed + sum(small_seconds.values())
        gathers_weights = self.layout.zero in (1, 2) and self.layout.shards > 1  # gathers of the updated weights
        name = "reduce gradients, gather weights" if gathers_weights else "reduce gradients"
        reduce = (
            [Span("reduce", name, start, reduce_end, reduce_end - start, tuple({"dp": 0, **small_seconds}))]
            if reduce_end > start
            else []
        )
        return (*row, *reduce, Span("update", "update", reduce_end, reduce_end + update))


def _sum_exposed(cost: ActionCost) -> tuple[float, tuple[str, ...]]:
    """Return the exposed seconds of an action, and their axes."""
    return sum(cost.exposed.values()), tuple(axis for axis, seconds in cost.exposed.items() if seconds)
