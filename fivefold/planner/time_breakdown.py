"""Names the parts of a predicted step's time: operations forward and backward, messages by collective, bubble, update.

The parts are those of the rank that the step waits for. "other compute" is what host launches and overlapped messages
add to operations. On a calibrated computer an operation has the seconds of the clock, without the host's until the next
one ("host in forward", "host in backward"), and the kernels that add up gradients are a part by themselves, as in the
trainer. The measured step has parts of the same names, so the difference of each is a share of the error.
"""

from __future__ import annotations

from collections import defaultdict

from fivefold.layout.mesh import make_group
from fivefold.layout.schedule.action import PASSES
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Name, get_group_degrees
from fivefold.planner.counts.operations.adapters import runs_in_reference
from fivefold.planner.counts.operations.local_shapes import LocalDegrees, get_local_degrees
from fivefold.planner.counts.traffic import count_passes, list_messages
from fivefold.planner.counts.update import list_stages
from fivefold.planner.time.profiled import count_ranks_per_host
from fivefold.planner.time.step_overhead import estimate_overhead, find_overhead
from fivefold.planner.time.timeline import StepTime
from fivefold.planner.time.units import Units


def break_down_seconds(units: Units, layout: Layout, time: StepTime) -> dict[str, float]:
    """Return the seconds by name. They add up to those of ``time``."""
    operations, ranks = _OperationTimes(units, layout), []
    for held in dict.fromkeys(map(tuple, list_stages(layout))):
        number = operations.number(held)
        ranks.append((sum(times * operations.seconds(key) for key, times in number.items()), held, number))
    busy_seconds, held, number = min(ranks, key=lambda rank: abs(rank[0] - time.compute))
    share = time.compute / busy_seconds if busy_seconds else 1.0
    if units.profiled is None:  # else the units were measured as wholes, which their operations share
        share = min(1.0, share)
    total: dict[str, float] = defaultdict(float)
    for key, times in number.items():
        for name, seconds in operations.parts(key).items():
            total[name] += share * times * seconds
    total["other compute"] = time.compute - share * busy_seconds
    total.update(_split_by_collective(units, layout, time.exposed, held=held))
    gaps = estimate_overhead(units, layout, held, work_seconds=time.compute).gaps
    host_share = time.host / sum(gaps) if time.host else 0.0
    backward = PASSES["B" if layout.pipeline.splits_backward else "BW"]
    host_seconds = {PASSES["F"]: host_share * gaps.forward, backward: host_share * gaps.backward}
    total.update({f"host in {name}": seconds for name, seconds in host_seconds.items()})
    total.update({"bubble": time.bubble, "optimizer": time.optimizer})
    return {name: seconds for name, seconds in total.items() if seconds > 0}


class _OperationTimes:
    """Seconds of the operations of each distinct unit (embedding, block, head) in one micro-batch."""

    def __init__(self, units: Units, layout: Layout) -> None:
        self.counts, self.prices = units.counts, units.prices(layout)
        self.part, self.work = get_local_degrees(layout), units.counts.stage_work(layout)
        self.passes = count_passes(layout, units.job)
        self.overhead = find_overhead(units.machine.calibration, ranks=count_ranks_per_host(layout, units.machine))
        self._parts: dict[tuple[LocalDegrees, Name], dict[str, float]] = {}

    def number(self, held: tuple[int, ...]) -> dict[tuple[LocalDegrees, Name], int]:
        """Return how often a rank that holds the stages ``held`` runs each unit."""
        runs: dict[tuple[LocalDegrees, Name], int] = defaultdict(int)
        for stage in held:
            for run, times in self.work[stage]:
                runs[get_group_degrees(self.part, run), run.name] += times * self.passes
        return runs

    def parts(self, key: tuple[LocalDegrees, Name]) -> dict[str, float]:
        """Return the seconds by operation and direction."""
        if key not in self._parts:
            seconds: dict[str, float] = defaultdict(float)
            for op in self.counts.unit(*key).ops:
                time = self.prices.operation(op)
                sums = self.prices.estimate_sums(op, time)
                forward, backward = self._read_clock(time.forward, time.backward + time.weight - sums)
                seconds[f"{op.name} forward"] += forward
                seconds[f"{op.name} reference"] += forward * runs_in_reference(op, self.counts.job)
                seconds[f"{op.name} backward"] += backward
                seconds[f"{op.name} recomputed"] += forward * op.recomputed
                seconds["gradients.sum"] += sums
            self._parts[key] = seconds
        return self._parts[key]

    def _read_clock(self, forward: float, backward: float) -> tuple[float, float]:
        """Return the clock's seconds of an operation without the host's, from processor time with them."""
        if self.overhead is None:
            return forward, backward
        ratio, gaps = 1 + self.overhead.host_share, self.overhead
        return (
            ratio * max(0.0, forward - gaps.forward_gap_seconds),
            ratio * max(0.0, backward - gaps.backward_gap_seconds),
        )

    def seconds(self, key: tuple[LocalDegrees, Name]) -> float:
        """Return the seconds of all operations."""
        return sum(self.parts(key).values())


def _split_by_collective(
    units: Units, layout: Layout, exposed: dict[str, float], *, held: tuple[int, ...]
) -> dict[str, float]:
    """Return the ``exposed`` seconds of each axis, split by collective in proportion to the seconds of its messages."""
    seconds_by_collective: dict[str, dict[str, float]] = {axis: defaultdict(float) for axis in exposed}
    for message in list_messages(units.counts, layout, chunks=held) if exposed else ():
        if message.axis in exposed and message.ranks > 1:
            place = make_group(layout, message.group, message.ranks)
            seconds = units.network.seconds(message.collective, message.payload, place)
            seconds_by_collective[message.axis][message.collective] += message.times * seconds
    shares_by_name: dict[str, float] = {}
    for axis, axis_messages in seconds_by_collective.items():
        total = sum(axis_messages.values())
        shares = (
            {collective: seconds / total for collective, seconds in axis_messages.items()}
            if total
            else {"messages": 1.0}
        )
        shares_by_name |= {f"{axis} {collective}": share * exposed[axis] for collective, share in shares.items()}
    return shares_by_name
