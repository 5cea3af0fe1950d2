"""Seconds of the units (embedding, block, head) of one model, job and machine by layout, computed once each.

by what the unit computes, where its groups lie, and how many ranks share a calibrated machine
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import Group, group
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.plan.count.counts import Cache, Counts, Name, Run, run_part
from fivefold.plan.count.operations.part import Part, part_of
from fivefold.plan.price.compute import OpTime, Prices
from fivefold.plan.price.network import Network
from fivefold.plan.price.profiled import Profiled
from fivefold.plan.price.unit_time import AXES, UnitTime, UnitTimer

CACHED = 40_000  # values of a cache of a few numbers each


class Nearest(NamedTuple):
    """A unit's time, the seconds of its kernels, and seconds of messages by axis of ``AXES``, hidden or not."""

    time: UnitTime
    kernels: tuple[float, float, float]  # forward, backward and weight gradient
    forward_sent: tuple[float, ...]
    backward_sent: tuple[float, ...]


class Units:
    """Seconds of the units of one model, job and machine by layout, computed once each."""

    def __init__(self, counts: Counts, machine: Machine, *, like: Units | None = None, job: Job | None = None) -> None:
        """``job``: if other messages overlap than under ``counts``; ``like``: units of equal operations and machine."""
        self.counts, self.machine, self.job = counts, machine, job or counts.job
        self.network: Network = like.network if like else Network(machine)
        known = machine.calibration is not None and bool(machine.calibration.units)
        self.profiled = Profiled(counts, machine) if known else None
        self._prices: dict[int, Prices] = like._prices if like else {}
        self._kernels: Cache[tuple[Part, Name, int], list[OpTime]] = like._kernels if like else Cache()
        self._units: Cache[tuple[object, ...], UnitTime] = Cache(CACHED)
        self._nearest: Cache[tuple[Part, Name], Nearest] = Cache(CACHED)
        self._layout, self._part = Layout(), part_of(Layout())
        self._places: tuple[Group, ...] = ()
        self._ranks = 1

    @cached_property
    def apart(self) -> Units:
        """The same units with no message hidden, to know how long each message takes; they have no compute."""
        stack = self.job.stack
        job = self.job.replace(overlap=(), async_tp=stack.async_tp and "tp" not in stack.overlap)
        return Units(self.counts, self.machine, like=self, job=job)

    def prices(self, layout: Layout) -> Prices:
        """Costs of operations; on a calibrated machine they depend on how many processes share it."""
        return self._prices_of(layout.world if self.machine.calibration else 1)

    def _prices_of(self, ranks: int) -> Prices:
        if ranks not in self._prices:
            self._prices[ranks] = Prices(self.machine, ranks=ranks, job=self.counts.job)
        return self._prices[ranks]

    def unit(self, layout: Layout, run: Run) -> UnitTime:
        """Seconds of one unit of a run."""
        if layout is not self._layout:  # callers ask for all units of one layout in a row
            self._ranks = layout.world if self.machine.calibration else 1
            self._layout, self._part = layout, part_of(layout)
            self._places = tuple(group(layout, axis) for axis in AXES)
        part = run_part(self._part, run)
        key: tuple[object, ...] = (part, run.name, places_of(run, self._places), self._ranks)
        if self.profiled is not None:
            key = *key, self.profiled.unit_key(layout, run)
        found = self._units.get(key)
        if found is None:
            found = self._time(part, run, lambda axis: group(layout, axis), ranks=self._ranks)
            found = self._units[key] = found if self.profiled is None else self._as_measured(found, layout, run)
        return found

    def nearest(self, part: Part, run: Run) -> Nearest:
        """``unit``, were the ranks of each group next to one another: no order of the mesh makes it faster."""
        key = run_part(part, run), run.name
        found = self._nearest.get(key)
        if found is None:
            timer = self._timer(key[0], run, _nearest(key[0]), ranks=1)
            sent = tuple(timer.forward_sent.values()), tuple(timer.backward_sent.values())
            found = self._nearest[key] = Nearest(timer.read(), timer.kernels(), *sent)
        return found

    def kernels(self, part: Part, run: Run, *, ranks: int = 1) -> list[OpTime]:
        """Seconds of each operation of a unit, whatever is recomputed of it; ``ranks`` share a calibrated machine."""
        part = run_part(part, run)._replace(recomputed=frozenset())
        key = part, run.name, ranks
        found = self._kernels.get(key)
        if found is None:
            prices, heads = self._prices_of(ranks), self.counts.local(part).heads
            found = [prices.operation(op, heads=heads) for op in self.counts.unit(part, run.name).ops]
            self._kernels[key] = found
        return found

    def _time(self, part: Part, run: Run, place: Callable[[str], Group], *, ranks: int) -> UnitTime:
        timer = self._timer(part, run, place, ranks=ranks)
        return timer.read() if self.job is self.counts.job else timer.messages()

    def _timer(self, part: Part, run: Run, place: Callable[[str], Group], *, ranks: int) -> UnitTimer:
        times = self.kernels(part, run, ranks=ranks)
        ops = self.counts.unit(part, run.name).ops
        further = (0, 0) if isinstance(run.name, str) else self.job.stack.further_kernels
        timer = UnitTimer(
            self.counts.model, self.machine, self.network, self.job, place, ops, times, further=further
        )  # fmt: skip
        for index, op in enumerate(ops):
            if op.message is not None:
                timer.add(index)
        return timer

    def _as_measured(self, time: UnitTime, layout: Layout, run: Run) -> UnitTime:
        """The time of a unit with the seconds of its kernels as measured in a step, where they were."""
        assert self.profiled is not None
        point, over = self.profiled.unit(layout, run), self.profiled.over_curves(layout)
        if point is None:
            return time._replace(forward=over * time.forward, backward=over * time.backward, weight=over * time.weight)
        backward, weight = point.backward_seconds, point.weight_seconds
        if not weight:  # measured together: shared as the curves say
            share = time.weight / (time.backward + time.weight) if time.weight else 0.0
            backward, weight = (1 - share) * backward, share * backward
        return time._replace(forward=point.forward_seconds, backward=backward, weight=weight)


def _nearest(part: Part) -> Callable[[str], Group]:
    """The group of each axis, were its ranks next to one another."""
    sizes = {"tp_inner": part.tp_inner, "tp_outer": part.tp // part.tp_inner}
    return lambda axis: Group(sizes[axis] if axis in sizes else int(getattr(part, axis)), 1)


def places_of(run: Run, places: tuple[Group, ...]) -> tuple[Group, ...]:
    """Of the groups of ``AXES`` those in which a unit may send messages."""
    return places if run.routes else places[: AXES.index("ep")]
