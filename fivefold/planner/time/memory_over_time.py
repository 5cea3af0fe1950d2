"""Memory over time of one rank: the live bytes that ``planner/counts/memory`` counts, placed along the spans.

    live = states + gradients + activations of other micro-batches + those of the running pass, unit by unit

The moments of a running unit are placed at the middle of its time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fivefold.layout.spec import Layout
from fivefold.planner.counts.memory.peak import PassMoments, PeakMoment, iterate_pass_moments, list_live_bytes
from fivefold.planner.time.spans import Rows, build_spans, count_simulated
from fivefold.results.spans import REFERENCE, Level, Span

if TYPE_CHECKING:
    from fivefold.planner.predict import Planner


def list_levels(
    planner: Planner, layout: Layout, *, rank: int = 0, limit: int | None = None, rows: Rows | None = None
) -> tuple[Level, ...]:
    """Return the live bytes by part at times of the step, for one pipeline rank.

    Times are those of the rank's row of ``spans``; pass ``rows`` if the spans are known already.
    """
    spans = (build_spans(planner, layout, limit=limit) if rows is None else rows)[rank]
    row = tuple(span for span in spans if not span.name.startswith(REFERENCE))
    filler = _Filler(planner, layout, rank)
    micro_batches = count_simulated(layout, micro_batches=layout.micro_batches(planner.job), limit=limit)
    levels_of_spans = tuple(
        filler.fill_without_pipeline(row, micro_batches) if layout.pp == 1 else filler.fill_pipeline(row, micro_batches)
    )
    first = levels_of_spans[0]  # before a rank's first action, its states and gradients are already allocated
    idle_level = Level(0.0, first.states_bytes, first.gradients_bytes, 0, 0, 0, 0)
    return (idle_level, *levels_of_spans) if first.seconds > 0 else levels_of_spans


class _Filler:
    """The memory levels along the spans of one rank."""

    def __init__(self, planner: Planner, layout: Layout, rank: int) -> None:
        self.planner, self.layout, self.rank = planner, layout, rank
        self.counts = planner.counts
        self.runs = self.counts.list_stage_groups(layout)
        self.shares: dict[int, dict[str, float]] = {}
        self.update = list_live_bytes(self.counts, layout, rank=rank)[-1]

    def fill_without_pipeline(self, row: tuple[Span, ...], micro_batches: int) -> Iterator[Level]:
        """Yield the levels without a pipeline.

        ``iterate_pass_moments`` has the first micro-batch, one for all in the middle, and the last.
        """
        pass_list = list(iterate_pass_moments(self.counts, self.layout))
        for span in row:
            if span.kind in ("F", "BW"):
                last = span.micro_batch == micro_batches - 1
                forward_index = len(pass_list) - 2 if last else min(2 * span.micro_batch, len(pass_list) - 4)
                yield from self._fill_pass(span, span.stage, pass_list[forward_index + (span.kind == "BW")])
        yield from self._fill_tail(row)

    def fill_pipeline(self, row: tuple[Span, ...], micro_batches: int) -> Iterator[Level]:
        """Yield the levels with a pipeline: each action on top of what other micro-batches hold at that time."""
        pass_iterator = iterate_pass_moments(self.counts, self.layout, rank=self.rank, micro_batches=micro_batches)
        for span in row:
            if span.kind == "FB":
                middle = (span.start + span.end) / 2
                yield from self._fill_pass(span._replace(end=middle), span.stage, next(pass_iterator))
                yield from self._fill_pass(span._replace(start=middle), span.backward_stage, next(pass_iterator))
            elif span.kind not in ("reduce", "update"):
                yield from self._fill_pass(span, span.stage, next(pass_iterator))
        yield from self._fill_tail(row)

    def _fill_tail(self, row: tuple[Span, ...]) -> Iterator[Level]:
        """Yield the levels after the last pass: reductions, which need no more than a bucket, and the update."""
        for span in row:
            if span.kind == "reduce":
                yield from (self._build_level(seconds_of_end) for seconds_of_end in (span.start, span.end))
            elif span.kind == "update":
                yield from (_make_level(seconds, self.update) for seconds in (span.start, span.end))

    def _build_level(self, seconds: float) -> Level:
        """Return a level with states and gradients only, as after the last pass."""
        return Level(seconds, self.update.states_bytes, self.update.gradients_bytes, 0, 0, 0, 0)

    def _fill_pass(self, span: Span, stage: int, pass_moments: PassMoments) -> Iterator[Level]:
        """Yield the levels of one pass: each moment at the middle of its unit.

        A backward counts units from the last one.
        """
        if stage not in self.shares:
            self.shares[stage] = self._compute_shares(stage)
        (kept_before, kept_after, moments), shares = pass_moments, self.shares[stage]
        forward = _match(moments[-1])[2] == "forward"
        yield _make_end_level(span.start, moments[0], kept=kept_before)
        for moment in moments:
            share = shares[_match(moment)[1]]
            yield _make_level(span.start + (share if forward else 1 - share) * (span.end - span.start), moment)
        yield _make_end_level(span.end, moments[-1], kept=kept_after)

    def _compute_shares(self, chunk: int) -> dict[str, float]:
        """Return the share of the stage's forward seconds at the middle of each unit, by its name."""
        runs = self.runs[chunk]
        seconds = [self.planner.units.unit(self.layout, run).forward for run in runs]
        total_seconds = sum(unit_seconds * run.times for unit_seconds, run in zip(seconds, runs, strict=True))
        shares: dict[str, float] = {}
        now = 0.0
        for run, unit_seconds in zip(runs, seconds, strict=True):
            for index in range(run.times):
                shares[run.name_unit(index)] = (now + (index + 0.5) * unit_seconds) / total_seconds
            now += run.times * unit_seconds
        return shares


def _make_level(seconds: float, moment: PeakMoment) -> Level:
    """Return the bytes of each category at one time."""
    return Level(
        seconds,
        moment.states_bytes,
        moment.gradients_bytes,
        moment.activations_bytes,
        moment.gathers_bytes,
        moment.logits_bytes,
        moment.temporary_bytes,
        moment.cause,
    )


def _make_end_level(seconds: float, moment: PeakMoment, *, kept: int) -> Level:
    """Return the level at the start or end of a pass.

    It has the states of the nearest ``moment``, and ``kept`` bytes of activations.
    """
    return Level(seconds, moment.states_bytes, moment.gradients_bytes, kept, 0, 0, 0)


_CAUSE = re.compile(r"(embed|head|block \d+) (gather|forward|backward|weights|reduce)")


def _match(moment: PeakMoment) -> re.Match[str]:
    match = _CAUSE.match(moment.cause)
    assert match is not None
    return match
