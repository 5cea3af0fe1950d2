"""Chooses the steps of a run that are traced, every other step after the metered one, and keeps their record.

    step      0   1   2 metered   3 timed   4 traced   5 timed   6 traced   7 timed   8 traced   9 timed …

The timed steps are untraced, and a comparison with their neighbours gives the cost of tracing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fivefold.results.spans import RankTrace, Span
from fivefold.trainer.data.prefetch import Prefetcher
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.clock import HostClock, Offset, StreamClock, create_host_group, measure_offset
from fivefold.trainer.measure.recorder import Marks, SpanRecorder
from fivefold.trainer.measure.regions import Regions

ALWAYS_TRACED_STEPS = 3  # steps that are traced in every run


class Tracer:
    """A tracer of the steps of one rank. ``steps``: maximum number of traced steps."""

    def __init__(self, engine: Engine, *, data: Prefetcher | None, steps: int = ALWAYS_TRACED_STEPS) -> None:
        ranks = engine.built.ranks
        self.engine, self.data, self.ranks, self.most = engine, data, ranks, steps
        clock = StreamClock() if ranks.device.type == "cuda" else HostClock()
        self.recorder = SpanRecorder(clock, interleaver=ranks.interleaver)
        self.offset = Offset(0.0, 0.0)
        self.group: dist.ProcessGroup | None = None  # process group over which clocks are compared
        self.steps: list[Marks] = []
        self.regions: Regions | None = None
        self.evaluations: list[Span] = []

    def can_trace(self, timed: int, *, last: bool) -> bool:
        """Return whether to trace the next step.

        ``timed``: steps since the metered one; ``last``: none follows. Only a step of the full batch after another such
        is traced: then the trainer's schedule does not change.
        """
        is_full_batch = self.engine.sequences == self.engine.job.global_batch
        return is_full_batch and len(self.steps) < self.most and (timed % 2 == 1 or (last and not self.steps))

    @contextmanager
    def trace_step(self, step: int) -> Iterator[None]:
        """Trace the body of the context as ``step``."""
        recorder = self.recorder
        if self.regions is None or self.regions.pipeline is not self.engine.pipeline:
            self.regions = Regions(recorder, engine=self.engine, data=self.data)
        if not self.steps:
            self.offset = self._compare_clocks()
        recorder.clock.begin()
        with self.regions.report():
            recorder.begin(recorder.label("step", f"step {step}"))
            yield
            recorder.end()
        self.steps.append(recorder.take_marks(step))

    def close(self, *, good: bool) -> float:
        """Return the seconds of the step just traced, whose record is dropped unless the step was ``good``."""
        seconds = self.steps[-1].seconds
        if not good:
            del self.steps[-1]
        return seconds

    @contextmanager
    def record_evaluation(self, step: int) -> Iterator[None]:
        """Record the body of the context as an evaluation after ``step`` steps."""
        start = time.perf_counter()
        yield
        self.evaluations.append(Span("evaluate", f"evaluation after step {step}", start, time.perf_counter()))

    def _compare_clocks(self) -> Offset:
        """Return the offset to the clock of rank 0; all ranks then go on together."""
        rank, world = self.ranks.rank, self.ranks.world
        if world == 1:
            return Offset(0.0, 0.0)
        if not self.steps:
            self.group = create_host_group()
        measured = measure_offset(rank=rank, world=world, group=self.group)
        dist.barrier(group=self.group)
        return measured

    def trace(self) -> RankTrace:
        """Return all traced steps; the drift of the clocks since the start is part of their error.

        Every rank calls it.
        """
        ranks, first = self.ranks, self.offset
        last = self._compare_clocks() if self.steps else first
        error = max(first.error, last.error) + abs(last.seconds - first.seconds)
        evaluations = [
            span._replace(start=span.start + first.seconds, end=span.end + first.seconds) for span in self.evaluations
        ]
        steps = tuple(self.recorder.read(marks, offset=first.seconds) for marks in self.steps)
        return RankTrace(ranks.rank, ranks.world, ranks["pp"].rank, first.seconds, error, steps, tuple(evaluations))
