"""Chooses which steps of a run are traced, and keeps their record: every other one of the steps after the metered one.

    step      0   1   2 metered   3 timed   4 traced   5 timed   6 traced   7 timed   8 traced   9 timed …

So the steps that are timed are untraced, and what tracing costs can be read off their neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fivefold.results.spans import RankTrace, Span
from fivefold.trainer.data.prefetch import Prefetcher
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.clock import HostClock, Offset, StreamClock, host_group, offset
from fivefold.trainer.measure.recorder import Marks, Recorder
from fivefold.trainer.measure.regions import Regions

ALWAYS = 3  # steps that are traced in every run


class Tracer:
    """Traces steps of one rank. ``steps``: how many, at most."""

    def __init__(self, engine: Engine, *, data: Prefetcher | None, steps: int = ALWAYS) -> None:
        ranks = engine.built.ranks
        self.engine, self.data, self.ranks, self.most = engine, data, ranks, steps
        clock = StreamClock() if ranks.device.type == "cuda" else HostClock()
        self.recorder = Recorder(clock, interleaver=ranks.interleaver)
        self.offset = Offset(0.0, 0.0)
        self.group: dist.ProcessGroup | None = None  # over which clocks are compared
        self.steps: list[Marks] = []
        self.regions: Regions | None = None
        self.evaluations: list[Span] = []

    def wants(self, timed: int, *, last: bool) -> bool:
        """Whether to trace the next step; ``timed``: steps since the metered one; ``last``: none follows. Only a step
        of the whole batch after another such: then the engine's schedule stays.
        """
        whole = self.engine.sequences == self.engine.job.global_batch
        return whole and len(self.steps) < self.most and (timed % 2 == 1 or (last and not self.steps))

    @contextmanager
    def traced(self, step: int) -> Iterator[None]:
        """Trace what is done within as ``step``."""
        recorder = self.recorder
        if self.regions is None or self.regions.pipeline is not self.engine.pipeline:
            self.regions = Regions(recorder, engine=self.engine, data=self.data)
        if not self.steps:
            self.offset = self._ask()
        recorder.clock.begin()
        with self.regions.reported():
            recorder.begin(recorder.label("step", f"step {step}"))
            yield
            recorder.end()
        self.steps.append(recorder.cut(step))

    def close(self, *, good: bool) -> float:
        """Seconds of the step just traced, which is forgotten unless it was a ``good`` one."""
        seconds = self.steps[-1].seconds
        if not good:
            del self.steps[-1]
        return seconds

    @contextmanager
    def evaluated(self, step: int) -> Iterator[None]:
        """Note an evaluation after ``step`` steps."""
        start = time.perf_counter()
        yield
        self.evaluations.append(Span("evaluate", f"evaluation after step {step}", start, time.perf_counter()))

    def _ask(self) -> Offset:
        """Compare clocks with rank 0, then let all ranks go on together."""
        rank, world = self.ranks.rank, self.ranks.world
        if world == 1:
            return Offset(0.0, 0.0)
        if not self.steps:
            self.group = host_group()
        found = offset(rank=rank, world=world, group=self.group)
        dist.barrier(group=self.group)
        return found

    def trace(self) -> RankTrace:
        """All that was traced, with what the clocks have moved since as part of their error; every rank calls it."""
        ranks, found = self.ranks, self.offset
        later = self._ask() if self.steps else found
        error = max(found.error, later.error) + abs(later.seconds - found.seconds)
        moved = [span._replace(start=span.start + found.seconds, end=span.end + found.seconds)
                 for span in self.evaluations]  # fmt: skip
        steps = tuple(self.recorder.read(marks, offset=found.seconds) for marks in self.steps)
        return RankTrace(
            ranks.rank, ranks.world, ranks["pp"].rank, found.seconds, error, steps, tuple(moved)
        )  # fmt: skip
