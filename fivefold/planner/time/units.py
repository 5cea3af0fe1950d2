"""Seconds of the units (embedding, block, head) of one model, job and machine by layout, computed once each.

Results are cached by the unit's operations, the placement of its groups, and the number of ranks that share a
calibrated machine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from fivefold.layout.mesh import RankGroup, group
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.planner.counts.accumulation import count_accumulated_bytes
from fivefold.planner.counts.cache import Cache
from fivefold.planner.counts.counts import Counts, Name, UnitGroup, get_group_degrees
from fivefold.planner.counts.operations.local_shapes import LocalDegrees, get_local_degrees
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.time.compute import OpTime, Prices
from fivefold.planner.time.constants import PUBLISHED, Constants
from fivefold.planner.time.gather_reduce import (
    GatherReduceKey,
    GatherReduceTime,
    gather_reduce_key,
    gather_reduce_seconds,
)
from fivefold.planner.time.network import Network
from fivefold.planner.time.profiled import Profiled
from fivefold.planner.time.unit_time import AXES, UnitKernels, UnitTime, UnitTimer, build_unit_kernels

CACHED = 40_000  # values of a cache of a few numbers each
PRICED = 8_000  # operations


class OptimisticUnitTime(NamedTuple):
    """A unit's time, the seconds of its kernels, and seconds of messages by axis of ``AXES``, overlapped or not."""

    time: UnitTime
    kernels: tuple[float, float, float]  # forward, backward and weight gradient
    forward_sent: tuple[float, ...]
    backward_sent: tuple[float, ...]


class UnitTimeKey(NamedTuple):
    """The properties of a layout that the seconds of its units depend on."""

    part: LocalDegrees
    groups: tuple[RankGroup, ...]  # of ``AXES``, without those of experts if there are none
    ranks: int  # ranks that share a calibrated machine; otherwise 1
    gather_reduce: GatherReduceKey


UnitKey = tuple[LocalDegrees, Name, tuple[RankGroup, ...], int, str]  # the last: key of a unit measured within a step
WRITES, GRADIENTS = Op._fields.index("writes"), Op._fields.index("gradients")


class Units:
    """The time model of one model, job and machine: seconds of units by layout, computed once each."""

    def __init__(self, counts: Counts, machine: Machine, constants: Constants = PUBLISHED) -> None:
        self.counts, self.machine, self.job, self.constants = counts, machine, counts.job, constants
        self.network = Network(machine, constants)
        has_measured_units = machine.calibration is not None and bool(machine.calibration.units)
        self.profiled = Profiled(counts, machine) if has_measured_units else None
        self.overlaps = (
            "dp" in self.job.stack.overlap and machine.can_overlap
        )  # data parallelism's messages and compute
        # slowdown of compute per overlapped second; without NCCL, the core's busy seconds are exposed instead
        self.contention = constants.hidden_message_slowdown if machine.has_gpus else 0.0
        self._axes = AXES if counts.model.moe else AXES[: AXES.index("ep")]
        self._prices: dict[int, Prices] = {}
        self._placements: Cache[Layout, UnitTimeKey] = Cache()
        self._kernels: Cache[tuple[LocalDegrees, Name, int], list[OpTime]] = Cache()
        self._anywhere: Cache[tuple[LocalDegrees, Name, int], UnitKernels] = Cache()
        self._priced: Cache[tuple[Hashable, ...], OpTime] = Cache(PRICED)
        self._units: Cache[UnitKey, UnitTime] = Cache(CACHED)
        self._nearest: Cache[tuple[LocalDegrees, Name], OptimisticUnitTime] = Cache(CACHED)
        self._gather_reduces: Cache[tuple[GatherReduceKey, Name, bool], GatherReduceTime] = Cache(CACHED)

    def prices(self, layout: Layout) -> Prices:
        """Return the timer of operations; on a calibrated machine it depends on how many processes share it."""
        return self._get_prices(layout.world if self.machine.calibration else 1)

    def _get_prices(self, ranks: int) -> Prices:
        if ranks not in self._prices:
            self._prices[ranks] = Prices(self.machine, ranks=ranks, job=self.job, constants=self.constants)
        return self._prices[ranks]

    def _build_placement_key(self, layout: Layout) -> UnitTimeKey:
        """Return what the times of a layout's units depend on besides the unit; computed once per layout."""
        placement = self._placements.get(layout)
        if placement is None:
            placement = self._placements[layout] = UnitTimeKey(
                get_local_degrees(layout),
                tuple([group(layout, axis) for axis in self._axes]),
                layout.world if self.machine.calibration else 1,
                gather_reduce_key(self.counts, layout),
            )
        return placement

    def unit(self, layout: Layout, run: UnitGroup) -> UnitTime:
        """Return the seconds of one unit of a group."""
        place = self._build_placement_key(layout)
        part = get_group_degrees(place.part, run)
        measured = "" if self.profiled is None else self.profiled.make_unit_key(layout, run)
        key = part, run.name, find_places(run, place.groups), place.ranks, measured
        time = self._units.get(key)
        if time is None:
            time = self._build_timer(part, run, lambda axis: group(layout, axis), ranks=place.ranks).to_unit_time()
            time = self._units[key] = time if self.profiled is None else self._apply_measurement(time, layout, run)
        return time

    def gather_reduce(self, layout: Layout, name: Name) -> GatherReduceTime:
        """Return the seconds of one unit's data-parallel messages, each sent once."""
        key = self._build_placement_key(layout).gather_reduce, name, self.counts.reduces_every_micro_batch(layout, name)
        time = self._gather_reduces.get(key)
        if time is None:
            copies = self.job.stack.copies_comm_buffers and self.machine.has_gpus
            copy_seconds = self.prices(layout).memory_bound_seconds if copies else None
            time = gather_reduce_seconds(
                self.counts,
                self.network,
                layout,
                name,
                host_link_bandwidth=self.constants.host_link_share * self.constants.host_link_bandwidth,
                copy_seconds=copy_seconds,
            )
            if self.machine.calibration is None:  # else kernels were measured with them
                sums = count_accumulated_bytes(self.counts, layout, name)
                seconds = [self.prices(layout).memory_bound_seconds(n_bytes) if n_bytes else 0.0 for n_bytes in sums]
                time = time._replace(first_sum=seconds[0], later_sum=seconds[1])
            self._gather_reduces[key] = time
        return time

    def bound_adjacent_unit(self, part: LocalDegrees, run: UnitGroup) -> OptimisticUnitTime:
        """Return the seconds of one unit whose groups are of adjacent ranks: no order of the mesh makes them fewer.

        ``part``: the degrees that split a layer; ``run``: the group of equal units that it is one of.
        """
        key = get_group_degrees(part, run), run.name
        time = self._nearest.get(key)
        if time is None:
            timer = self._build_timer(key[0], run, _make_adjacent_groups(key[0]), ranks=1)
            sent_seconds = (tuple(side.values()) for side in timer.sent)
            time = self._nearest[key] = OptimisticUnitTime(timer.to_unit_time(), timer.unit.seconds, *sent_seconds)
        return time

    def with_expert_ranks(self, part: LocalDegrees, run: UnitGroup, *, ep: int) -> UnitTimer:
        """Return the timer of ``bound_adjacent_unit`` with ``ep`` ranks that exchange tokens.

        It serves any number of experts per rank of ``part``.
        """
        part = get_group_degrees(part, run)
        return self._build_timer(part, run, _make_adjacent_groups(part._replace(ep=ep)), ranks=1)

    def kernels(self, part: LocalDegrees, run: UnitGroup, *, ranks: int = 1) -> list[OpTime]:
        """Return the seconds of each operation of a unit, without recomputation; ``ranks`` share a machine."""
        part = get_group_degrees(part, run)._replace(recomputed=frozenset())
        key = part, run.name, ranks
        times = self._kernels.get(key)
        if times is None:
            ops = self.counts.list_ops(part, run.name)
            times = self._get_prices(ranks).add_gradient_sums(ops, [self._price(op, ranks=ranks) for op in ops])
            self._kernels[key] = times
        return times

    def _price(self, op: Op, *, ranks: int) -> OpTime:
        """Return the seconds of one operation, computed once for equal operations of several units."""
        key = *_list_values(op), ranks
        time = self._priced.get(key)
        if time is None:
            time = self._priced[key] = self._get_prices(ranks).operation(op)
        return time

    def _build_timer(
        self, part: LocalDegrees, run: UnitGroup, place: Callable[[str], RankGroup], *, ranks: int
    ) -> UnitTimer:
        """Return the timer of one unit; its kernels are built once for all placements of the ranks."""
        key = part, run.name, ranks
        unit = self._anywhere.get(key)
        if unit is None:
            times = self.kernels(part, run, ranks=ranks)
            ops = self.counts.list_ops(part, run.name)
            further = (0, 0) if isinstance(run.name, str) else self.job.stack.extra_kernels
            unit = self._anywhere[key] = build_unit_kernels(ops, times, self.job.stack, extra_launches=further)
        # async tensor parallelism moves the parts of a message by kernels of its own
        copies = self.job.stack.tp_buffers == "copied" and part.sp and part.sequences > 1
        copies = copies and "tp" not in self.job.stack.overlap and self.machine.has_gpus
        return UnitTimer(
            self.counts.model,
            self.machine,
            self.network,
            self.job,
            place,
            unit,
            self.constants,
            copy_seconds=self._get_prices(ranks).memory_bound_seconds if copies else None,
        )

    def _apply_measurement(self, time: UnitTime, layout: Layout, run: UnitGroup) -> UnitTime:
        """Return the time of a unit with the seconds of its kernels as measured in a step, if they were."""
        assert self.profiled is not None
        point = self.profiled.unit(layout, run)
        measured_over_curves = self.profiled.ratio_to_curves(layout)
        if point is None:
            return time._replace(
                forward=measured_over_curves * time.forward,
                backward=measured_over_curves * time.backward,
                weight=measured_over_curves * time.weight,
            )
        backward, weight = point.backward_seconds, point.weight_seconds
        if not weight:  # measured together: split in the ratio of the curves
            share = time.weight / (time.backward + time.weight) if time.weight else 0.0
            backward, weight = (1 - share) * backward, share * backward
        return time._replace(forward=point.forward_seconds, backward=backward, weight=weight)


def _make_adjacent_groups(part: LocalDegrees) -> Callable[[str], RankGroup]:
    """Return the function from an axis to its group with adjacent ranks."""
    sizes = {"tp_inner": part.tp_inner, "tp_outer": part.tp // part.tp_inner}
    return lambda axis: RankGroup(sizes[axis] if axis in sizes else int(getattr(part, axis)), 1)


def _list_values(op: Op) -> tuple[Hashable, ...]:
    """Return all values that distinguish operations."""
    tensors = tuple(op.writes.items())
    gradients = tuple((op.gradients or {}).items())
    return op[:WRITES], tensors, op[WRITES + 1 : GRADIENTS], gradients, op[GRADIENTS + 1 :]


def find_places(run: UnitGroup, places: tuple[RankGroup, ...]) -> tuple[RankGroup, ...]:
    """Return the groups of ``AXES`` in which a unit sends messages."""
    return places if run.routes else places[: AXES.index("ep")]
