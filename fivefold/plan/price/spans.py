"""The spans of one step: the schedule's table played with the timeline's seconds, and the ends of data parallelism.

    actions of the table | what nothing hides of reductions and gathers | update

The last end is the step time of ``Planner.estimate``. A long step is drawn by a shorter one, whose warm-up and end are
those of the whole: the rounds left out in the middle all take the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivefold.layout.schedule import play as play_table
from fivefold.layout.schedule import schedule
from fivefold.layout.schedule.action import Action
from fivefold.layout.schedule.order import Task
from fivefold.layout.sharding import policy
from fivefold.layout.spans import Span
from fivefold.layout.spec import Layout
from fivefold.plan.count.memory import RankMemory, memory
from fivefold.plan.price.timeline import StageTime
from fivefold.plan.price.units import AXES, CONTENTION

if TYPE_CHECKING:
    from fivefold.plan.predict import Planner

Rows = tuple[tuple[Span, ...], ...]


def shown(layout: Layout, *, micro_batches: int, limit: int | None) -> int:
    """Micro-batches that ``spans`` plays: all, or some ``limit`` of them, but two rounds of the pipeline or more."""
    if limit is None or micro_batches <= limit:
        return micro_batches
    rest = micro_batches % layout.pp  # a round more or less changes nothing, part of a round does
    return min(micro_batches, rest + layout.pp * max(2, (limit - rest) // layout.pp))


def spans(planner: Planner, layout: Layout, *, limit: int | None = None) -> Rows:
    """Per pipeline rank its spans in order; of ``shown`` micro-batches, ``limit=None`` being the whole step."""
    count = shown(layout, micro_batches=layout.micro_batches(planner.job), limit=limit)
    ranks = memory(planner.counts, layout)
    player = _Player(planner, layout)
    if layout.pp == 1:
        return (player.flat(count, ranks[0]),)
    table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=count)
    played = play_table.play(table, seconds=player.seconds, hop_seconds=lambda *_: player.hop)
    rows = []
    for held, row, rank in zip(table.held, played.spans, ranks, strict=True):
        actions = [player.span(action, start, end) for action, start, end in row]
        rows.append((*actions, *player.tail(held, rank, start=actions[-1].end)))
    return tuple(rows)


class _Player:
    """A layout with the seconds of its stages."""

    def __init__(self, planner: Planner, layout: Layout) -> None:
        self.timeline, self.layout = planner.timeline, layout
        self.work = planner.counts.stage_work(layout)
        self.stages: list[StageTime] = [self.timeline._stage(layout, work) for work in self.work]
        self.ahead = [self._forward_messages(stage) for stage in range(len(self.stages))]
        self.axes = [tuple(axis for axis, seconds in stage.exposed.items() if seconds) for stage in self.stages]
        self.hop = self.sending = 0.0
        if layout.pp > 1:
            self.hop = self.timeline._hop(layout)
            blocks = "pp" not in planner.job.overlap or planner.machine.backend != "nccl"
            self.sending = self.hop if blocks else 0.0

    def _forward_messages(self, stage: int) -> float:
        """Of a forward; what is left of the stage's is the backward's."""
        seconds = 0.0
        for run, times in self.work[stage]:
            unit = self.timeline.units.unit(self.layout, run)
            seconds += times * sum(unit.forward_exposed)
            if not policy(self.layout).weights_stay:
                seconds += times * self.timeline._gathers(self.layout, run.name, unit)[0]
        return seconds

    def seconds(self, task: Task) -> float:
        """As ``Timeline.play`` has them."""
        compute, messages = self.parts(task)
        return compute + messages

    def parts(self, task: Task) -> tuple[float, float]:
        """Seconds of compute and of messages that nothing hides."""
        stage, ahead = self.stages[task.stage], self.ahead[task.stage]
        back = sum(stage.exposed.values()) - ahead
        if task.kind == "F":
            return stage.forward - ahead, ahead + self.sending
        if task.kind == "W":
            return stage.weight, 0.0
        if task.kind == "B":
            return stage.backward - back, back + self.sending
        if task.kind == "BW":
            return stage.backward + stage.weight - back, back + self.sending
        # The messages of each run beside the compute of both; of ZeRO-3's gathers that is known already.
        other = self.stages[task.backward_stage]
        apart = stage.forward + other.backward + other.weight
        talk = sum(both.exposed[axis] / 2 for both in (stage, other) for axis in AXES)
        compute = apart - talk - (stage.exposed["dp"] + other.exposed["dp"]) / 2
        return compute, max(apart - talk, talk) - compute + self.sending

    def span(self, action: Action, start: float, end: float) -> Span:
        """An action of the table."""
        messages = self.parts(Task(action.kind, action.stage, action.backward_stage))[1]
        axes = dict.fromkeys((*self.axes[action.stage], *(["pp"] if self.sending else [])))
        if action.kind == "FB":
            axes |= dict.fromkeys(self.axes[action.backward_stage])
        return Span(action.kind, str(action), start, end, messages, tuple(axes) if messages else (), *action[1:])

    def tail(self, chunks: tuple[int, ...], rank: RankMemory, *, start: float) -> list[Span]:
        """After the last action of a rank: its reductions and gathers, then the update."""
        between = start + self.timeline._ends(self.layout, chunks).exposed
        end = between + self.timeline._update(self.layout, rank)
        gathers = self.layout.zero in (1, 2) and self.layout.shards > 1  # the new weights, from where they are updated
        name = "reduce gradients, gather weights" if gathers else "reduce gradients"
        reduce = [Span("reduce", name, start, between, between - start, ("dp",))] if between > start else []
        return [*reduce, Span("update", "update", between, end)]

    def flat(self, count: int, rank: RankMemory) -> tuple[Span, ...]:
        """Without a pipeline: micro-batch after micro-batch; what is hidden of the reductions slows the last one."""
        tasks = Task("F", 0, -1), Task("BW", 0, -1)
        compute = count * sum(self.parts(task)[0] for task in tasks)
        slowed = CONTENTION * min(self.timeline._ends(self.layout, (0,)).hidden, compute)
        row: list[Span] = []
        now = 0.0
        for micro_batch in range(count):
            for task in tasks:
                start, now = now, now + self.seconds(task)
                if task.kind == "BW" and micro_batch == count - 1:
                    now += slowed
                row.append(self.span(Action(task.kind, 0, micro_batch), start, now))
        return (*row, *self.tail((0,), rank, start=now))
