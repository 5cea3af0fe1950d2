"""The probability that a layout runs out of memory, and the largest predicted peak that a limit on it allows.

    runs out  <=>  peak x R + unreclaimable x (reserved - peak) + driver > capacity

R: measured / predicted peak of comparable published runs (``errors.py``). Before it fails, PyTorch's allocator frees
cached segments that are entirely free (c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks); free blocks inside
other segments are lost. Driver: the CUDA context and NCCL. On a CPU the peak must fit as predicted: the probability is
0 or 1. Sources and calibration: docs/explanation/how-a-step-costs/memory-risk.md.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from math import exp, log

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.memory.allocator import PUBLISHED, AllocatorTotals, bound_driver_bytes, count_driver_bytes
from fivefold.planner.time.errors import RunClass, find_quantile, read, run_class, weigh_ratios
from fivefold.units import MIB

RECOMPUTATIONS = ("none", "selective", "full")  # values of ``Layout.ac``: one for each class of ``RunClass.recomputed``


class MemoryRisk:
    """Probabilities of running out of memory, for layouts of one model, machine and job."""

    def __init__(self, *, model: Model, machine: Machine, job: Job) -> None:
        self.model, self.machine, self.job = model, machine, job
        self.capacity_bytes = machine.chip.memory_bytes

    def probability(
        self, layout: Layout, *, peak_bytes: int, totals: AllocatorTotals | None, lost: float = PUBLISHED.unreclaimable
    ) -> float:
        """Return the probability of running out of memory, given a predicted peak and the allocator's totals.

        ``totals``: None on a CPU. ``lost``: share of the fragmentation that cannot be avoided.
        """
        available = self._count_room(totals, peak_bytes, layout, lost)
        if available <= 0:
            return 1.0
        ratios, levels = self._choose_distribution(layout)
        return 1 - _find_level(log(available / peak_bytes), ratios, levels)

    def find_peak_limit(self, layout: Layout, *, peak_bytes: int, totals: AllocatorTotals | None, risk: float) -> int:
        """Return the largest predicted peak with a risk of at most ``risk``, with the layout's fragmentation."""
        return int(
            max(0.0, self._count_room(totals, peak_bytes, layout, PUBLISHED.unreclaimable))
            / self._find_ratio(layout, risk)
        )

    def excess_bytes(self, layout: Layout, *, peak_bytes: int, totals: AllocatorTotals | None) -> int:
        """Return by how much the predicted peak, with fragmentation and driver, exceeds the capacity; 0: it fits."""
        return max(0, int(peak_bytes - self._count_room(totals, peak_bytes, layout, PUBLISHED.unreclaimable)))

    def largest_peak(self, world: int, *, risk: float) -> int:
        """Return an upper bound of the predicted peak of layouts over ``world`` ranks whose risk is at most ``risk``.

        It assumes no fragmentation, the fewest communicators, and the class of error that allows the largest peak.
        """
        layouts = [Layout(dp=world, ac=ac) for ac in RECOMPUTATIONS]
        capacity = self.capacity_bytes - (bound_driver_bytes(self.machine, world) if self._is_on_gpu else 0)
        return int(max(0.0, capacity / min(self._find_ratio(kind, risk) for kind in layouts))) + MIB  # for rounding

    @property
    def _is_on_gpu(self) -> bool:
        return self.machine.has_gpus

    def _count_room(self, totals: AllocatorTotals | None, peak_bytes: int, layout: Layout, lost: float) -> float:
        """Return the bytes that are left for the peak."""
        if totals is None:
            return self.capacity_bytes
        fragments = max(0, totals.reserved_bytes - peak_bytes)
        return self.capacity_bytes - count_driver_bytes(self.machine, layout) - lost * fragments

    def _find_ratio(self, layout: Layout, risk: float) -> float:
        """Return the ratio of measured to predicted peak that comparable runs exceed with probability ``risk``."""
        return exp(find_quantile(self._choose_points(layout), 1 - risk))

    def _choose_points(self, layout: Layout) -> tuple[tuple[float, float], ...]:
        kind = run_class(model=self.model, machine=self.machine, layout=layout, job=self.job)
        return _list_points(kind) if self._is_on_gpu else _build_exact_distribution()

    def _choose_distribution(self, layout: Layout) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return _accumulate_weights(self._choose_points(layout))


def _build_exact_distribution() -> tuple[tuple[float, float], ...]:
    """Return the distribution of a peak that is exactly as predicted."""
    return ((0.0, 1.0),)


@lru_cache(maxsize=256)
def _list_points(of: RunClass) -> tuple[tuple[float, float], ...]:
    """Return (ln ratio, weight) of all published peaks, in order, weighted for runs of the class ``of``."""
    cells = read("peak")
    return tuple(sorted(weigh_ratios(of, cells))) if cells else _build_exact_distribution()


@lru_cache(maxsize=256)
def _accumulate_weights(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the values of ``points`` and the level of each, as in ``quantile``."""
    total_weight = sum(weight for _, weight in points)
    weight_below = 0.0
    levels = []
    for _, weight in points:
        levels.append((weight_below + weight / 2) / total_weight)
        weight_below += weight
    return tuple(value for value, _ in points), tuple(levels)


def _find_level(value: float, values: tuple[float, ...], levels: tuple[float, ...]) -> float:
    """Return the share of the distribution up to ``value``: the inverse of ``quantile``."""
    index = bisect_right(values, value)
    if index == 0:
        return 0.0
    if index == len(values):
        return 1.0
    low, high = values[index - 1], values[index]
    return levels[index - 1] + (levels[index] - levels[index - 1]) * (value - low) / (high - low)
