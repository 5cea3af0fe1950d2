"""Measure several hosts under torchrun: each as one computer, all at the same time, then the links between them.

    torchrun --nnodes 2 --nproc-per-node 1 … -m fivefold calibrate

A collective is timed as it occurs in a training step, where ranks do not arrive together: in each repeat another rank
starts ``APART_SECONDS`` after the rest, and the seconds of this last rank count. Ranks that start at the same moment
would use both directions of an exchange at once, which does not happen in a step.
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
from fivefold.calibration.points import Facts, Points, choose_default_points
from fivefold.calibration.worker import COLLECTIVES
from fivefold.errors import UserError
from fivefold.machine.spec import Calibration, Collective, CollectivePoint, Link, Machine
from fivefold.trainer.process import Process

APART_SECONDS = 5e-3  # delay of the last rank: many times the latency of a message
SHORT_SECONDS = 4e-3  # below this the barrier is not counted: its seconds vary by as much as it would add
LONG_SECONDS = 0.25  # larger messages have the same bandwidth and are not measured
BUDGET_SECONDS = 0.3  # for the repeats of one point
MAX_REPEATS = 24


class HostGroup(NamedTuple):
    """A group of ranks on several hosts that are timed together; ``place`` is the index of this rank in the group."""

    ranks: int
    nodes: int
    place: int
    group: dist.ProcessGroup | None


class Timing(NamedTuple):
    """The seconds of a collective, and the CPU seconds that it takes of them (``busy``)."""

    seconds: float
    busy: float


def calibrate_hosts(process: Process, *, quick: bool = False, points: Points | None = None) -> Machine | None:
    """Measure the hosts of ``process``'s world; return the machine on rank 0, None on the other ranks.

    Every rank calls it. Raises ``UserError`` if there are GPUs, or if hosts have unequal numbers of ranks.
    """
    if torch.cuda.is_available():
        raise UserError(
            "links between hosts are measured on CPUs only; calibrate one host, and give its network card by nic= in a "
            "machine file"
        )
    local, nodes = process.local_ranks, process.world // process.local_ranks
    process.start()
    try:
        if len(set(_gather_values(local))) > 1 or nodes * local != process.world:
            raise UserError(
                f"hosts have {sorted(set(_gather_values(local)))}; calibrate needs the same number of ranks on every "
                "host"
            )
        host_machine = (
            calibrate(ranks=(1, local), quick=quick, points=points, in_steps=False) if process.local_rank == 0 else None
        )
        machines = [machine for machine in _gather_values(host_machine) if machine is not None]
        chosen = points or choose_default_points("gloo", quick=False)
        links = [point for group in _list_groups(process) for point in _measure(group, chosen.collective_bytes)]
        return _build_machine(machines, links, ranks=process.world, local=local) if process.rank == 0 else None
    finally:
        process.end()


def _gather_values(local_value: Any) -> list[Any]:
    """Return the value of every rank, once the slowest host has sent its own."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, local_value)
    return values


def _list_groups(process: Process) -> Iterator[HostGroup]:
    """Yield all ranks; and, where hosts have several ranks, groups of one rank of each host, which run concurrently."""
    local, nodes = process.local_ranks, process.world // process.local_ranks
    yield HostGroup(process.world, nodes, process.rank, None)
    if local > 1:
        columns = [list(range(first, process.world, local)) for first in range(local)]
        groups = [dist.new_group(column) for column in columns]
        yield HostGroup(nodes, nodes, process.rank // local, groups[process.local_rank])


def _measure(group: HostGroup, sizes: tuple[int, ...]) -> Iterator[CollectivePoint]:
    """Yield a point for every collective and size; larger sizes are skipped once one takes ``LONG_SECONDS``."""
    for name in COLLECTIVES:
        for size in sorted(sizes):
            full = torch.zeros(max(1, size // 4 // group.ranks) * group.ranks)
            timing = _time_message(_run(name, full, group), group, ways=2 if name == "p2p" else 1)
            cpu_seconds = min(max(timing.busy, 1e-9), timing.seconds)
            yield CollectivePoint(
                collective=name,
                ranks=group.ranks,
                nodes=group.nodes,
                bytes=full.nbytes,
                seconds=timing.seconds,
                busy_seconds=cpu_seconds,
            )
            if timing.seconds > LONG_SECONDS:
                break


def _run(name: Collective, full: torch.Tensor, group: HostGroup) -> Callable[[], object]:
    """Return a function that runs the collective on a full tensor.

    A p2p message goes there and back between neighbours; the last of an odd number of ranks is idle.
    """
    share = full.chunk(group.ranks)[0].clone()
    received = torch.empty_like(full)
    process_group = group.group

    def run_round_trip() -> None:
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        step = group.ranks // group.nodes  # distance to the same local rank on the next host
        near = group.place // step % 2 == 0
        peer = group.place + (step if near else -step)
        if peer < group.ranks:
            for send in (near, not near):
                (dist.send if send else dist.recv)(full, ranks[peer], group=process_group)

    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=process_group),
        "all_gather": lambda: all_gather(full, share, group=process_group),
        "reduce_scatter": lambda: reduce_scatter(share, full, group=process_group),
        "all_to_all": lambda: dist.all_to_all_single(received, full, group=process_group),
        "p2p": run_round_trip,
    }
    return runs[name]


def _time_message(run: Callable[[], object], group: HostGroup, *, ways: int) -> Timing:
    """Return the median time over repeats in which another rank comes last each time, divided by ``ways``.

    The result is equal on every rank of the group. In a round trip (``ways`` = 2), the ranks that send first and
    receive last are always the last to arrive.
    """
    step, barrier_seconds = group.ranks // group.nodes, _time_barrier(group)
    first = {index for index in range(group.ranks) if index // step % 2 == 0}
    lasts = [first] if ways == 2 else [{index} for index in range(group.ranks)]
    run()  # warm
    once = max(_time_once(run, group, last=last, barrier_seconds=barrier_seconds).seconds for last in lasts)
    repeats = int(_reduce_max(max(3 * len(lasts), min(MAX_REPEATS, BUDGET_SECONDS / max(once, 1e-6))), group))
    turns = [
        _time_once(run, group, last=lasts[round_ % len(lasts)], barrier_seconds=barrier_seconds)
        for round_ in range(repeats)
    ]
    seconds = statistics.mean(
        statistics.median(round_.seconds for round_ in turns[index :: len(lasts)]) for index in range(len(lasts))
    )
    cpu_seconds = statistics.median(round_.busy for round_ in turns)
    return Timing(seconds / ways, _reduce_max(cpu_seconds, group) / ways)


def _time_once(run: Callable[[], object], group: HostGroup, *, last: set[int], barrier_seconds: float) -> Timing:
    """Time one run for which the ranks in ``last`` arrive last.

    Returns the seconds of the slowest of these ranks, and the CPU seconds of this rank. A rank's own call returns as
    soon as what it sends is in a buffer; so a barrier follows, which takes ``barrier_seconds``.
    """
    dist.barrier(group=group.group)
    if group.place in last:
        time.sleep(APART_SECONDS)
    start, cpu_start = time.perf_counter(), time.process_time()
    run()
    own_seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    dist.barrier(group=group.group)
    barrier_end_seconds = time.perf_counter() - start - barrier_seconds
    run_seconds = own_seconds if own_seconds < SHORT_SECONDS else max(own_seconds, barrier_end_seconds)
    return Timing(_reduce_max(run_seconds if group.place in last else 0.0, group), cpu_seconds)


def _time_barrier(group: HostGroup) -> float:
    """Return the seconds of a barrier at which all ranks arrive at the same time."""
    barrier_times = []
    for _ in range(9):
        start = time.perf_counter()
        dist.barrier(group=group.group)
        barrier_times.append(time.perf_counter() - start)
    return statistics.median(barrier_times)


def _reduce_max(value: float, group: HostGroup) -> float:
    """Return the largest value of all ranks of the group."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.group)
    return float(largest)


def _build_machine(machines: list[Machine], links: list[CollectivePoint], *, ranks: int, local: int) -> Machine:
    """Return a machine that is as slow as the slowest host at every point, with the links between the hosts."""
    first = machines[0]
    calibrations = [machine.calibration for machine in machines if machine.calibration is not None]
    slowest = {
        kind: tuple(
            max(host_points, key=_get_seconds)
            for host_points in zip(*(getattr(host_calibration, kind) for host_calibration in calibrations), strict=True)
        )
        for kind in ("matmuls", "attentions", "kernels", "collectives")
    }
    others = [calibration.cores_of_others for calibration in calibrations if calibration.cores_of_others is not None]
    calibration = calibrations[0].replace(
        **slowest | {"collectives": (*slowest["collectives"], *links)}, cores_of_others=max(others, default=None)
    )
    facts = Facts(
        device=first.chip.name.partition(",")[0],
        backend=first.backend,
        torch=calibration.torch,
        # of a host: ranks on CPU share it
        memory_bytes=min(machine.chip.memory_bytes for machine in machines) * (1 if first.has_gpus else local),
    )
    host_only = Calibration.model_validate(calibration.model_dump() | {"collectives": slowest["collectives"]})
    host = fit_machine(host_only, facts=facts, ranks=local)
    return host.replace(
        name="hosts",
        ranks=ranks,
        ranks_per_node=local,
        calibration=calibration,
        links=(host.links[0], fit_host_link(links, span=ranks, date=calibration.date)),
    )


def fit_host_link(points: list[CollectivePoint], *, span: int, date: str) -> Link:
    """Fit the link between hosts: a line through the p2p messages, which all ranks of a host send at the same time."""
    messages = [point for point in points if point.collective == "p2p"]
    latency, bandwidth = fit_line([point.bytes for point in messages], [point.seconds for point in messages])
    source = f"fivefold calibrate, {date}: line through {len(messages)} message sizes between hosts"
    return Link(name="between hosts", span=span, bandwidth=bandwidth, latency_seconds=latency, source=source)


def _get_seconds(point: Any) -> float:
    return float(point.forward_seconds + point.backward_seconds if hasattr(point, "forward_seconds") else point.seconds)
