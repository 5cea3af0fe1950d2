"""Seconds of units that were measured in the trainer's own step (``calibrate --for``). They replace all curves.

    key = the unit's computation / the sharding of its weights     the same key is made when it is measured and here

If a unit was not measured under its sharding, a measurement under another sharding is used. A unit that was never
measured takes the curves' time, multiplied by the ratio of the measured units to their curves: kernels run slower in a
step, with cold caches and the host's work between them, than one kernel repeated by itself.
"""

from __future__ import annotations

import hashlib
import statistics

from fivefold.layout.spec import Layout
from fivefold.machine.spec import Calibration, Machine, UnitPoint, UpdatePoint
from fivefold.planner.counts.counts import Counts, UnitGroup, get_group_degrees
from fivefold.planner.counts.operations.local_shapes import get_local_degrees

# Properties of a stack that change the work of a unit but not its list of operations.
FACTS = ("attention", "loss", "kernels", "compile", "linears", "wgrad_accumulation")


class Profiled:
    """The measured units of ``machine`` for one model and job."""

    def __init__(self, counts: Counts, machine: Machine) -> None:
        self.counts, self.machine = counts, machine
        self.calibration = machine.calibration or Calibration(date="", torch="", cores=1)
        self._hashes: dict[object, str] = {}
        self._update_hashes: dict[tuple[str, ...], str] = {}  # by the states kept in host memory
        self._units_by_ranks: dict[int, dict[str, UnitPoint]] = {}
        self._updates_by_ranks: dict[int, dict[str, UpdatePoint]] = {}
        self._measured_over_curve: dict[int, float] = {}

    def unit(self, layout: Layout, run: UnitGroup) -> UnitPoint | None:
        """Return the measurement of a unit, under this sharding or another one; None if there is none."""
        points = self._list_units(count_ranks_per_host(layout, self.machine))
        if not points:
            return None
        key = self.make_unit_key(layout, run)
        return points.get(key) or points.get(key.partition("/")[0])

    def update(self, layout: Layout) -> UpdatePoint | None:
        """Return the measurement of a step outside forward and backward, under this sharding; None if there is none."""
        ranks = count_ranks_per_host(layout, self.machine)
        if ranks not in self._updates_by_ranks:
            self._updates_by_ranks[ranks] = {p.key: p for p in self.calibration.updates if p.ranks == ranks}
        return self._updates_by_ranks[ranks].get(self.update_key(layout)) if self._updates_by_ranks[ranks] else None

    def ratio_to_curves(self, layout: Layout) -> float:
        """Return the median of measured seconds relative to the curves; 1 if no unit was measured."""
        ranks = count_ranks_per_host(layout, self.machine)
        if ranks not in self._measured_over_curve:
            ratios = [p.over_curves for p in self._list_units(ranks).values() if p.label.startswith("block")]
            self._measured_over_curve[ranks] = statistics.median(ratios) if ratios else 1.0
        return self._measured_over_curve[ranks]

    def make_unit_key(self, layout: Layout, run: UnitGroup) -> str:
        """Return ``compute/held``: a hash of the unit's operations and number formats, and its sharding in words."""
        part = get_group_degrees(get_local_degrees(layout), run)
        job = self.counts.job
        if (part, run.name) not in self._hashes:
            model = self.counts.model.model_dump(exclude={"name", "layers"})
            facts = [getattr(job.stack, name) for name in FACTS]
            ops = self.counts.unit(part, run.name).ops
            self._hashes[part, run.name] = _hash((ops, model, job.precision.model_dump(), facts, job.documents))
        suffix = " split" if layout.pipeline.splits_backward else ""
        return f"{self._hashes[part, run.name]}/{describe_sharding(layout)}{suffix}"

    def update_key(self, layout: Layout) -> str:
        """Return the key of the optimizer's update, in the form of ``make_unit_key``."""
        job = self.counts.job
        offloaded = tuple(sorted(layout.list_offloaded(job), reverse=True))
        if offloaded not in self._update_hashes:
            self._update_hashes[offloaded] = _hash((job.optimizer.model_dump(), job.precision.model_dump(), offloaded))
        return f"{self._update_hashes[offloaded]}/{describe_sharding(layout)}"

    def _list_units(self, ranks: int) -> dict[str, UnitPoint]:
        if ranks not in self._units_by_ranks:
            points_by_key: dict[str, UnitPoint] = {}
            for point in self.calibration.units:
                if point.ranks == ranks:
                    points_by_key[point.key] = points_by_key[point.key.partition("/")[0]] = point
            self._units_by_ranks[ranks] = points_by_key
        return self._units_by_ranks[ranks]


def describe_sharding(layout: Layout) -> str:
    """Return a key for how a layout shards weights and gradients: what a rank copies, adds and casts depends on it."""
    replicas = layout.dp * layout.cp
    return f"zero{layout.zero} {layout.shards} of {replicas}" if replicas > 1 else "alone"


def count_ranks_per_host(layout: Layout, machine: Machine) -> int:
    """Return the number of ranks that share a computer; 1 on GPUs, because each rank has its own."""
    return 1 if machine.has_gpus else min(layout.world, machine.ranks_per_node)


def _hash(facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
