"""The probability that a layout runs out of memory, and the largest predicted peak that a limit on it allows.

    runs out  <=>  (peak + unreclaimable x (reserved - peak) + driver) x R > capacity

What the chip must hold is the driver's figure, without what the allocator can give back. R is therefore the ratio of
measured to predicted of the driver's counter (``errors.py``), whose errors contain those of tensors and of reserved
bytes. Before it fails, PyTorch's allocator frees cached segments that are entirely free
(c10/cuda/CUDACachingAllocator.cpp, release_cached_blocks); free blocks inside other segments are lost. Driver: the CUDA
context and NCCL. On a CPU the peak must fit as predicted: the probability is 0 or 1. Sources and calibration:
docs/explanation/how-a-step-costs/memory-risk.md.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from math import exp, log
from pathlib import Path

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.memory.allocator import PUBLISHED, AllocatorTotals, bound_driver_bytes, count_driver_bytes
from fivefold.planner.time.errors import TABLE, RunClass, estimate_distribution, read_comparable, run_class
from fivefold.units import MIB

QUANTILES = 200  # of the distribution of R; beyond the last of them the probability is 0
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
        needed = peak_bytes + self._count_overhead(totals, peak_bytes, layout, lost)
        return 1 - _find_level(log(self.capacity_bytes / needed), self._choose_quantiles(layout))

    def find_peak_limit(self, layout: Layout, *, peak_bytes: int, totals: AllocatorTotals | None, risk: float) -> int:
        """Return the largest predicted peak with a risk of at most ``risk``, with the layout's fragmentation."""
        overhead = self._count_overhead(totals, peak_bytes, layout, PUBLISHED.unreclaimable)
        return int(max(0.0, self.capacity_bytes / self._find_ratio(layout, risk) - overhead))

    def excess_bytes(self, layout: Layout, *, peak_bytes: int, totals: AllocatorTotals | None) -> int:
        """Return by how much the predicted peak, with fragmentation and driver, exceeds the capacity; 0: it fits."""
        overhead = self._count_overhead(totals, peak_bytes, layout, PUBLISHED.unreclaimable)
        return max(0, int(peak_bytes + overhead - self.capacity_bytes))

    def largest_peak(self, world: int, *, risk: float) -> int:
        """Return an upper bound of the predicted peak of layouts over ``world`` ranks whose risk is at most ``risk``.

        It assumes no fragmentation, the fewest communicators, and the class of error that allows the largest peak.
        """
        layouts = [Layout(dp=world, ac=ac) for ac in RECOMPUTATIONS]
        overhead = bound_driver_bytes(self.machine, world, self.job.stack) if self._is_on_gpu else 0
        smallest_ratio = min(self._find_ratio(kind, risk) for kind in layouts)
        return int(max(0.0, self.capacity_bytes / smallest_ratio - overhead)) + MIB  # for rounding

    @property
    def _is_on_gpu(self) -> bool:
        return self.machine.has_gpus

    def _count_overhead(self, totals: AllocatorTotals | None, peak_bytes: int, layout: Layout, lost: float) -> float:
        """Return the bytes that are needed in addition to the peak: fragments that stay, and the driver's."""
        if totals is None:
            return 0
        fragments = max(0, totals.reserved_bytes - peak_bytes)
        return lost * fragments + count_driver_bytes(self.machine, layout, self.job.stack)

    def _find_ratio(self, layout: Layout, risk: float) -> float:
        """Return the ratio of measured to predicted memory that comparable runs exceed with probability ``risk``."""
        return exp(_find_value(1 - risk, self._choose_quantiles(layout)))

    def _choose_quantiles(self, layout: Layout) -> tuple[float, ...]:
        kind = run_class(model=self.model, machine=self.machine, layout=layout, job=self.job)
        return list_quantiles(kind) if self._is_on_gpu else (0.0,)


@lru_cache(maxsize=256)
def list_quantiles(of: RunClass, path: Path = TABLE) -> tuple[float, ...]:
    """Return ln(measured / predicted) of the driver's bytes at evenly spaced levels, for runs of the class ``of``.

    Without published runs it is that of memory that is exactly as predicted.
    """
    distribution = estimate_distribution(of, read_comparable("driver", path))
    if distribution is None:
        return (0.0,)
    return tuple(distribution.find_quantile((index + 0.5) / QUANTILES) for index in range(QUANTILES))


def _find_value(level: float, quantiles: tuple[float, ...]) -> float:
    """Return the value at ``level``, interpolated between ``quantiles``, each in the middle of its share."""
    place = min(max(level * len(quantiles) - 0.5, 0.0), len(quantiles) - 1.0)
    below = min(int(place), max(0, len(quantiles) - 2))
    above = min(below + 1, len(quantiles) - 1)
    return quantiles[below] + (place - below) * (quantiles[above] - quantiles[below])


def _find_level(value: float, quantiles: tuple[float, ...]) -> float:
    """Return the share of the distribution up to ``value``: the inverse of ``_find_value``."""
    index = bisect_right(quantiles, value)
    if index == 0:
        return 0.0
    if index == len(quantiles):
        return 1.0
    low, high = quantiles[index - 1], quantiles[index]
    return (index - 0.5 + (value - low) / (high - low)) / len(quantiles)
