"""The spans (start, end) of one step per pipeline rank: the schedule played with the timeline's seconds.

    actions of the schedule | exposed reductions and gathers of data parallelism | update

The last end is the step time of ``Planner.estimate``. A long step is drawn as a shorter one with the same warm-up and
cool-down: the rounds left out in the middle all take the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.layout.schedule import play as play_table
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.order import Task
from fivefold.layout.spec import Layout
from fivefold.planner.counts.memory.rank_memory import RankMemory, memory
from fivefold.results.spans import Span

if TYPE_CHECKING:
    from fivefold.planner.predict import Planner

Rows = tuple[tuple[Span, ...], ...]


def shown(layout: Layout, *, micro_batches: int, limit: int | None) -> int:
    """Number of micro-batches that ``spans`` plays: all, or about ``limit``, but at least two rounds of pp."""
    if limit is None or micro_batches <= limit:
        return micro_batches
    rest = micro_batches % layout.pp  # only whole rounds may be left out
    return min(micro_batches, rest + layout.pp * max(2, (limit - rest) // layout.pp))


def spans(planner: Planner, layout: Layout, *, limit: int | None = None) -> Rows:
    """Each pipeline rank's spans in order of time, for ``shown`` micro-batches; ``limit=None``: the whole step."""
    count = shown(layout, micro_batches=layout.micro_batches(planner.job), limit=limit)
    ranks = memory(planner.counts, layout)
    player = _Player(planner, layout)
    if layout.pp == 1:
        return (player.flat(count, ranks[0]),)
    table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=count)
    hop = player.durations.hop
    played = play_table.play(table, seconds=player.durations.seconds, hop_seconds=lambda *_: hop, queues=True)
    rows = []
    for held, row, rank in zip(table.rank_stages, played.spans, ranks, strict=True):
        actions = [player.span(action, start, end) for action, start, end in row]
        rows.append(player.finished(actions, held, rank))
    return tuple(rows)


class _Player:
    """Makes spans from the actions of one layout and their seconds."""

    def __init__(self, planner: Planner, layout: Layout) -> None:
        self.timeline, self.layout = planner.timeline, layout
        self.durations = planner.timeline.durations(layout)
        self.exposed: dict[tuple[str, int, int], tuple[float, tuple[str, ...]]] = {}  # seconds and axes, by task

    def span(self, action: Action, start: float, end: float) -> Span:
        """The span of one action of the schedule, with its exposed seconds and their axes."""
        kind, stage, _, back, _ = action
        if (kind, stage, back) not in self.exposed:
            found = self.durations.cost(Task(kind, stage, back)).exposed
            self.exposed[kind, stage, back] = sum(found.values()), tuple(axis for axis in found if found[axis])
        return Span(kind, str(action), start, end, *self.exposed[kind, stage, back], *action[1:])

    def flat(self, count: int, rank: RankMemory) -> tuple[Span, ...]:
        """The row of a layout without a pipeline: F and BW of one micro-batch after another."""
        row: list[Span] = []
        now = 0.0
        for micro_batch in range(count):
            for task in (Task("F", 0, -1), Task("BW", 0, -1)):
                start, now = now, now + self.durations.seconds(task)
                row.append(self.span(Action(task.kind, 0, micro_batch), start, now))
        return self.finished(row, (0,), rank)

    def finished(self, row: list[Span], chunks: tuple[int, ...], rank: RankMemory) -> tuple[Span, ...]:
        """``row`` with its end: hidden reductions lengthen the last action; exposed ones and the update follow it."""
        ends = self.timeline.parallel.ends(self.layout, chunks)
        row[-1] = row[-1]._replace(end=row[-1].end + ends.slowed)
        start = row[-1].end
        small = self.timeline.small_messages(self.layout, chunks)
        between = start + ends.exposed + sum(small.values())
        end = between + self.timeline.update(self.layout, rank) + self.timeline.matrix_update(self.layout, chunks)
        gathers = self.layout.zero in (1, 2) and self.layout.shards > 1  # of the updated weights
        name = "reduce gradients, gather weights" if gathers else "reduce gradients"
        reduce = (
            [Span("reduce", name, start, between, between - start, tuple({"dp": 0, **small}))]
            if between > start
            else []
        )
        return (*row, *reduce, Span("update", "update", between, end))
