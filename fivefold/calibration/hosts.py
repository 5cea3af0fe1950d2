"""Measures several hosts under torchrun: each as one computer, all at once, then the links between them.

    torchrun --nnodes 2 --nproc-per-node 1 … -m fivefold calibrate

A collective is timed as a step meets it: its ranks come ``APART_SECONDS`` apart, in turn last, and the last one's
seconds count. Ranks that come at the same moment have both ways of an exchange at once, which no step has.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fivefold.calibration import calibrate, fit_line, fit_machine
from fivefold.calibration.messages import all_gather, reduce_scatter
from fivefold.calibration.points import Facts, Points, default_points
from fivefold.calibration.worker import COLLECTIVES
from fivefold.machine.spec import Calibration, Collective, CollectivePoint, Link, Machine
from fivefold.record import Mistake
from fivefold.trainer.process import Process

APART_SECONDS = 5e-3  # many times a message's latency
SHORT_SECONDS = 4e-3  # of a message whose last bytes are not worth a barrier's seconds, which vary by as much
LONG_SECONDS = 0.25  # larger messages are no different
BUDGET_SECONDS = 0.3  # for the repeats of one point
MOST_REPEATS = 24


class HostGroup(NamedTuple):
    """Ranks on several hosts that are timed together; ``place`` is this rank's among them."""

    ranks: int
    nodes: int
    place: int
    group: dist.ProcessGroup | None


class Timing(NamedTuple):
    """Seconds of a collective, and of them those of CPU."""

    seconds: float
    busy: float


def calibrate_hosts(
    process: Process, *, quick: bool = False, points: Points | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Machine | None:  # fmt: skip
    """Measure the hosts of ``process``'s world; every rank calls it. The machine on rank 0, None on the others.

    Raises ``Mistake`` with GPUs, and if hosts have unequal numbers of ranks.
    """
    if torch.cuda.is_available():
        raise Mistake("links between hosts are measured on CPUs only; calibrate one host and name its nic= in a file")
    local, nodes = process.local_ranks, process.world // process.local_ranks
    process.start()
    try:
        if len(set(_of_all(local))) > 1 or nodes * local != process.world:
            raise Mistake(f"hosts have {sorted(set(_of_all(local)))} ranks; calibrate needs equally many on each")
        own = (
            calibrate(ranks=(1, local), quick=quick, points=points, progress=progress)
            if process.local_rank == 0
            else None
        )
        found = [machine for machine in _of_all(own) if machine is not None]
        chosen = points or default_points("gloo", quick=False)
        links = [point for group in _groups(process) for point in _measure(group, chosen.collective_bytes)]
        return _machine(found, links, ranks=process.world, local=local) if process.rank == 0 else None
    finally:
        process.end()


def _of_all(mine: Any) -> list[Any]:
    """Every rank's value; waits for the slowest host."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _groups(process: Process) -> Iterator[HostGroup]:
    """All ranks; and where hosts have several, one of each host, all such groups side by side."""
    local, nodes = process.local_ranks, process.world // process.local_ranks
    yield HostGroup(process.world, nodes, process.rank, None)
    if local > 1:
        columns = [list(range(first, process.world, local)) for first in range(local)]
        groups = [dist.new_group(column) for column in columns]
        yield HostGroup(nodes, nodes, process.rank // local, groups[process.local_rank])


def _measure(group: HostGroup, sizes: tuple[int, ...]) -> Iterator[CollectivePoint]:
    """Every collective at every size, until one takes ``LONG_SECONDS``."""
    for name in COLLECTIVES:
        for size in sorted(sizes):
            full = torch.zeros(max(1, size // 4 // group.ranks) * group.ranks)
            timing = _timing(_run(name, full, group), group, ways=2 if name == "p2p" else 1)
            busy = min(max(timing.busy, 1e-9), timing.seconds)
            yield CollectivePoint(
                collective=name, ranks=group.ranks, nodes=group.nodes, bytes=full.nbytes, seconds=timing.seconds,
                busy_seconds=busy,
            )  # fmt: skip
            if timing.seconds > LONG_SECONDS:
                break


def _run(name: Collective, full: torch.Tensor, group: HostGroup) -> Callable[[], object]:
    """The collective on a full tensor; p2p goes there and back between neighbours, the last of an odd number idle."""
    share, other, among = full.chunk(group.ranks)[0].clone(), torch.empty_like(full), group.group

    def there_and_back() -> None:
        ranks = dist.get_process_group_ranks(among or dist.group.WORLD)
        step = group.ranks // group.nodes  # to the same place on the next host
        near = group.place // step % 2 == 0
        peer = group.place + (step if near else -step)
        if peer < group.ranks:
            for send in (near, not near):
                (dist.send if send else dist.recv)(full, ranks[peer], group=among)

    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=among),
        "all_gather": lambda: all_gather(full, share, group=among),
        "reduce_scatter": lambda: reduce_scatter(share, full, group=among),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=among),
        "p2p": there_and_back,
    }
    return runs[name]


def _timing(run: Callable[[], object], group: HostGroup, *, ways: int) -> Timing:
    """Median over repeats whose last rank changes, divided by ``ways``. The same on every rank of the group.

    There and back (``ways`` 2), those who send first and receive last are always the last to come.
    """
    step, meeting = group.ranks // group.nodes, _meeting(group)
    first = {place for place in range(group.ranks) if place // step % 2 == 0}
    lasts = [first] if ways == 2 else [{place} for place in range(group.ranks)]
    run()  # warm
    once = max(_once(run, group, last=last, meeting=meeting).seconds for last in lasts)
    repeats = int(_largest(max(3 * len(lasts), min(MOST_REPEATS, BUDGET_SECONDS / max(once, 1e-6))), group))
    turns = [_once(run, group, last=lasts[turn % len(lasts)], meeting=meeting) for turn in range(repeats)]
    seconds = statistics.mean(
        statistics.median(turn.seconds for turn in turns[place :: len(lasts)]) for place in range(len(lasts))
    )
    busy = statistics.median(turn.busy for turn in turns)
    return Timing(seconds / ways, _largest(busy, group) / ways)


def _once(run: Callable[[], object], group: HostGroup, *, last: set[int], meeting: float) -> Timing:
    """One run, to which the ranks in ``last`` come last: the slowest one's seconds of these, and this rank's of CPU.

    A rank's own seconds end when what it sends is in a buffer. So a barrier, which takes ``meeting`` s, follows: behind
    all that was sent.
    """
    dist.barrier(group=group.group)
    if group.place in last:
        time.sleep(APART_SECONDS)
    start, cpu = time.perf_counter(), time.process_time()
    run()
    own, busy = time.perf_counter() - start, time.process_time() - cpu
    dist.barrier(group=group.group)
    through = time.perf_counter() - start - meeting
    took = own if own < SHORT_SECONDS else max(own, through)
    return Timing(_largest(took if group.place in last else 0.0, group), busy)


def _meeting(group: HostGroup) -> float:
    """Seconds of a barrier at which all arrive at once."""
    taken = []
    for _ in range(9):
        start = time.perf_counter()
        dist.barrier(group=group.group)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _largest(value: float, group: HostGroup) -> float:
    """The largest value of all ranks of the group."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group.group)
    return float(found)


def _machine(found: list[Machine], links: list[CollectivePoint], *, ranks: int, local: int) -> Machine:
    """The slowest of the hosts at every point, with the links between them."""
    first, calibrations = found[0], [machine.calibration for machine in found if machine.calibration is not None]
    slowest = {
        kind: tuple(
            max(same, key=_seconds) for same in zip(*(getattr(each, kind) for each in calibrations), strict=True)
        )
        for kind in ("matmuls", "attentions", "kernels", "collectives")
    }
    calibration = calibrations[0].replace(**slowest | {"collectives": (*slowest["collectives"], *links)})
    facts = Facts(
        device=first.chip.name.partition(",")[0], backend=first.backend, torch=calibration.torch,
        memory_bytes=min(machine.chip.memory_bytes for machine in found) * (local if first.backend == "gloo" else 1),
    )  # fmt: skip
    within = Calibration.model_validate(calibration.model_dump() | {"collectives": slowest["collectives"]})
    host = fit_machine(within, facts=facts, ranks=local)
    return host.replace(
        name="hosts", ranks=ranks, ranks_per_node=local, calibration=calibration,
        links=(host.links[0], between(links, span=ranks, date=calibration.date)),
    )  # fmt: skip


def between(points: list[CollectivePoint], *, span: int, date: str) -> Link:
    """The link between hosts: a line through the messages from one to another, all ranks of a host at once."""
    messages = [point for point in points if point.collective == "p2p"]
    latency, bandwidth = fit_line([point.bytes for point in messages], [point.seconds for point in messages])
    source = f"fivefold calibrate, {date}: line through {len(messages)} message sizes between hosts"
    return Link(name="between hosts", span=span, bandwidth=bandwidth, latency_seconds=latency, source=source)


def _seconds(point: Any) -> float:
    return float(point.forward_seconds + point.backward_seconds if hasattr(point, "forward_seconds") else point.seconds)
