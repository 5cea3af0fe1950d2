"""What lives gathered, and beside gradients, where messages join weights of several units (DeepSpeed).

    ZeRO-1, -2   a bucket (two where reductions overlap) from a backward's first gradient to its end; this rank's
                 gradients from the first reduction on; a copy of the bucket while it is all-reduced
    ZeRO-3       gathered weights as ``planner/counts/parameter_prefetch.py`` plays them; a copy of the bucket while
                 it is reduced

Source: deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/zero/stage_1_and_2.py, setup_buckets, copy_grads_in_partition
and allreduce_bucket; deepspeed/runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from fivefold.layout.sharding import policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.live_bytes import LiveBytes
from fivefold.planner.counts.memory.stage import RunMemory
from fivefold.planner.counts.parameter_prefetch import Fetches, fetches


class Joined:
    """Changes the moments of a pass by what joined messages hold."""

    def __init__(self, counts: Counts, layout: Layout) -> None:
        recipe, stack = counts.job.precision, counts.job.stack
        self.counts, self.layout, keeps = counts, layout, policy(layout, counts.job)
        self.wide, self.width = recipe.wide_bytes, recipe.summed_bytes
        self.bucket = stack.reduce_bucket * self.width if layout.shards > 1 else 0
        self.by_weights = stack.fetch == "weights" and not keeps.weights_stay
        self._played: dict[int, Fetches | None] = {}  # by stage
        self.uneven = self.by_weights or self.bucket > 0
        self.shards_come = self.bucket > 0 and keeps.weights_stay and not keeps.gradients_stay  # ZeRO-2

    def changed(
        self, found: Iterable[LiveBytes], units: Sequence[RunMemory], *, stage: int, backward: bool
    ) -> Iterator[LiveBytes]:
        """The moments of a pass through a stage."""
        if not (self.by_weights or (self.bucket and backward)):
            yield from found
            return
        first = [0, *accumulate(unit.run.times for unit in units)]
        if self.by_weights and stage not in self._played:
            self._played[stage] = fetches(self.counts, self.layout, chunk=stage)
        played = self._played.get(stage)
        for at in found:
            if len(at.cause) > 2:
                place, index, phase, *_ = at.cause
                if played is not None:
                    if phase == "gather":
                        continue
                    live = (played.backward if backward else played.forward)[first[place] + index]
                    at = at._replace(gathers=live * self.wide)
                if backward:
                    at = self._reducing(at, units, place, index, ends=phase == "reduce")
            yield at

    def _reducing(self, at: LiveBytes, units: Sequence[RunMemory], place: int, index: int, *, ends: bool) -> LiveBytes:
        """A moment of a backward: the bucket's copy at the end of a unit within which it is full, shards from then."""
        unit, last = units[place], place == 0
        before = sum(each.run.times * each.state.sums for each in units[place + 1 :])
        before += (unit.run.times - index - 1) * unit.state.sums
        full = before + unit.state.sums * ends
        reduced = full > self.bucket or (ends and last)
        held = sum(each.run.times * each.state.reduced for each in units) if self.shards_come and reduced else 0
        copy = min(self.bucket, full) if ends and reduced else 0
        return at._replace(gradients=at.gradients + held + copy)
