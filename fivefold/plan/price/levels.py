"""Memory over time: what ``count/memory`` finds at the moments of a step, laid along its spans.

    live = states + gradients + activations of other micro-batches + what one more has meanwhile, unit by unit

Under a pipeline the schedule's table says how many other micro-batches live at each action; ``memory`` takes the most
of them beside every chunk, so that its peak is never below the highest level. A W shows no temporaries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from fivefold.layout.schedule import play, schedule
from fivefold.layout.spans import Level, Span
from fivefold.layout.spec import Layout
from fivefold.plan.count.counts import run_part
from fivefold.plan.count.memory import Moment, over_time
from fivefold.plan.count.part import part_of
from fivefold.plan.price.spans import shown, spans

if TYPE_CHECKING:
    from fivefold.plan.predict import Planner


def levels(planner: Planner, layout: Layout, *, rank: int = 0, limit: int | None = None) -> tuple[Level, ...]:
    """Of one pipeline rank, beside its row of ``spans``."""
    row = spans(planner, layout, limit=limit)[rank]
    filler = _Filler(planner, layout, rank)
    micro_batches = shown(layout, micro_batches=layout.micro_batches(planner.job), limit=limit)
    found = filler.flat(row, micro_batches) if layout.pp == 1 else filler.piped(row, micro_batches)
    return tuple(found)


class _Point(NamedTuple):
    """A moment within a forward or a backward of one chunk: ``share`` of it is over."""

    share: float
    moment: Moment


class _Pass(NamedTuple):
    """One micro-batch through one chunk."""

    forward: tuple[_Point, ...]
    backward: tuple[_Point, ...]


class _Filler:
    """A rank with the moments of its memory."""

    def __init__(self, planner: Planner, layout: Layout, rank: int) -> None:
        self.planner, self.layout, self.rank = planner, layout, rank
        self.counts, self.part = planner.counts, part_of(layout)
        self.runs = self.counts.stage_runs(layout)
        *moments, self.update = over_time(self.counts, layout, rank=rank)
        self.moments = [list(each) for each in _split(moments)]

    def flat(self, row: tuple[Span, ...], micro_batches: int) -> Iterator[Level]:
        """The first micro-batch, the ones in the middle, which are all alike, and the last."""
        passes = [self._pass(0, moments) for moments in self.moments]
        for span in row:
            if span.kind in ("F", "BW"):
                last = span.micro_batch == micro_batches - 1
                one = passes[-1 if last else min(span.micro_batch, len(passes) - 2)]
                yield from self._along(span, one.forward if span.kind == "F" else one.backward, others=0)
        yield from self._tail(row)

    def piped(self, row: tuple[Span, ...], micro_batches: int) -> Iterator[Level]:
        """Every action over what lives beside it."""
        layout = self.layout
        table = schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=micro_batches)
        held = table.held[self.rank]
        passes = {chunk: self._pass(chunk, moments) for chunk, moments in zip(held, self.moments, strict=True)}
        kept, late = [0] * table.stages, [0] * table.stages
        for chunk in held:
            for run in self.runs[chunk]:
                profile = self.counts.profile(run_part(self.part, run), run.name)
                kept[chunk] += run.times * profile.kept_bytes
                late[chunk] += run.times * profile.weight_bytes
        alive = play.levels(table, until_backward=kept, until_weight=late)[self.rank]
        for span, level in zip(row, alive, strict=False):
            before, after = _around(span, level, kept=kept, late=late)
            yield self._level(span.start, kept=before)
            if span.kind in ("F", "FB"):
                half = span.end if span.kind == "F" else (span.start + span.end) / 2
                others = level - kept[span.stage]
                yield from self._along(span._replace(end=half), passes[span.stage].forward, others=others)
                if span.kind == "FB":
                    chunk = span.backward_stage
                    rest = level - kept[chunk]
                    yield from self._along(span._replace(start=half), passes[chunk].backward, others=rest)
            elif span.kind != "W":
                yield from self._along(span, passes[span.stage].backward, others=level - kept[span.stage])
            yield self._level(span.end, kept=after)
        yield from self._tail(row)

    def _tail(self, row: tuple[Span, ...]) -> Iterator[Level]:
        """Reductions need no more than a bucket; then the update."""
        for span in row:
            if span.kind == "reduce":
                yield from (self._level(at) for at in (span.start, span.end))
            elif span.kind == "update":
                yield from (_at(seconds, self.update, others=0) for seconds in (span.start, span.end))

    def _level(self, seconds: float, *, kept: int = 0) -> Level:
        """Between actions."""
        return Level(seconds, self.update.states_bytes, self.update.gradients_bytes, kept, 0, 0, 0)

    def _along(self, span: Span, points: tuple[_Point, ...], *, others: int) -> Iterator[Level]:
        for share, moment in points:
            yield _at(span.start + share * (span.end - span.start), moment, others=others)

    def _pass(self, chunk: int, moments: list[Moment]) -> _Pass:
        """The moments of a micro-batch with their places: by the seconds of the units before them."""
        shares = self._shares(chunk)
        forward: list[_Point] = []
        backward: list[_Point] = []
        for moment, backwards in zip(moments, _phases(moments), strict=True):
            share = shares[_match(moment)[1]]
            if backwards:
                backward.append(_Point(1 - share, moment))
            else:
                forward.append(_Point(share, moment))
        return _Pass(tuple(forward), tuple(backward))

    def _shares(self, chunk: int) -> dict[str, float]:
        """How much of the forward is over in the middle of a unit, by its name: of the first and last of each run."""
        runs = self.runs[chunk]
        seconds = [self.planner.timeline.units.unit(self.layout, run).forward for run in runs]
        whole = sum(each * run.times for each, run in zip(seconds, runs, strict=True))
        found: dict[str, float] = {}
        now = 0.0
        for run, each in zip(runs, seconds, strict=True):
            for before in (0, run.times - 1):
                found[run.called(last=before > 0)] = (now + (before + 0.5) * each) / whole
            now += run.times * each
        return found


def _at(seconds: float, moment: Moment, *, others: int) -> Level:
    """A moment, beside ``others`` bytes of other micro-batches."""
    return Level(
        seconds, moment.states_bytes, moment.gradients_bytes, moment.activations_bytes - moment.kept_bytes + others,
        moment.gathers_bytes, moment.logits_bytes, moment.temporary_bytes, moment.cause,
    )  # fmt: skip


def _around(span: Span, level: int, *, kept: list[int], late: list[int]) -> tuple[int, int]:
    """Activations on a rank before an action and after it; ``level`` while it runs."""
    if span.kind == "F":
        return level - kept[span.stage], level
    if span.kind == "FB":
        return level - kept[span.stage], level - kept[span.backward_stage]
    if span.kind == "W":
        return level, level - late[span.stage]
    return level, level - kept[span.stage] + (late[span.stage] if span.kind == "B" else 0)


_CAUSE = re.compile(r"(embed|head|block \d+) (gather|forward|backward|reduce)")


def _match(moment: Moment) -> re.Match[str]:
    found = _CAUSE.match(moment.cause)
    assert found is not None
    return found


def _phases(moments: list[Moment]) -> list[bool]:
    """Whether each belongs to the backward; a gather belongs to what comes next."""
    found: list[bool] = []
    backwards = True
    for moment in reversed(moments):
        phase = _match(moment)[2]
        backwards = backwards if phase == "gather" else phase != "forward"
        found.append(backwards)
    return found[::-1]


def _split(moments: list[Moment]) -> Iterator[list[Moment]]:
    """By micro-batch or chunk: where a forward follows a backward."""
    cuts = [i + 1 for i, (first, second) in enumerate(pairwise(_phases(moments))) if first and not second]
    for start, end in pairwise((0, *cuts, len(moments))):
        yield moments[start:end]
