"""Time the distinct messages of a run among ranks of this computer, between stretches of compute as long as in a step.

On a CPU, a message that is repeated in a tight loop takes a fraction of its time in a step: in a step, one rank arrives
late, and the threads that send the message must first get a core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.calibration.message_orders import MessageOrder
from fivefold.machine.spec import CollectivePoint

MIN_REPEATS, MAX_REPEATS = 10, 30  # least and most repeats of one message
REPEATS_PER_OUTLIER = 10  # one repeat in this many, the slowest, is excluded as an outlier

# torch 2.13 renamed the two single-tensor collectives.
all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class RankRing(NamedTuple):
    """The ranks that exchange a message: ``ranks`` consecutive ranks of the world, beginning with ``first``."""

    rank: int  # in the world
    first: int
    ranks: int
    group: dist.ProcessGroup | None


@contextmanager
def init_process_group(rendezvous_file: Path, *, rank: int, world: int, silence: timedelta) -> Iterator[None]:
    """Initialize a process group of the workers of this computer that really sends (gloo, or NCCL on GPUs)."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous_file}", rank=rank, world_size=world, timeout=silence
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def time_messages(
    orders: tuple[MessageOrder, ...], *, rank: int, local_ranks: int, work: Callable[[], object], device: torch.device
) -> list[CollectivePoint]:
    """Time each message on all ranks together; return equal points on every rank."""
    circles = {
        ranks: create_ring(ranks, rank=rank, local_ranks=local_ranks) for ranks in {order.ranks for order in orders}
    }
    return [time_message(order, circles[order.ranks], work=work, device=device) for order in orders]


def time_message(
    order: MessageOrder,
    among: RankRing,
    *,
    work: Callable[[], object],
    device: torch.device,
    repeats: int = MAX_REPEATS,
) -> CollectivePoint:
    """Time one message at most ``repeats`` times; every rank calls it.

    For p2p, also measure how long the message occupies a core.
    """
    if order.collective == "p2p":
        timing = time_overlapped_hop if order.both_ways else time_round_trip
        seconds, core_seconds = timing(order, among, work=work, device=device, repeats=repeats)
        return CollectivePoint(
            collective="p2p",
            ranks=order.ranks,
            bytes=order.bytes,
            seconds=seconds,
            busy_seconds=min(core_seconds, seconds),
        )
    seconds = time_message_after_work(build_message(order, among, device=device), work, repeats=repeats)
    return CollectivePoint(collective=order.collective, ranks=order.ranks, bytes=order.bytes, seconds=seconds)


def time_round_trip(
    order: MessageOrder, among: RankRing, *, work: Callable[[], object], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Time a round trip; return the seconds one way, and the seconds until the message has left its sender.

    The sender computes before it sends; the receiver waits for it. The last of an odd number of ranks does nothing.
    """
    rows = torch.zeros(max(1, order.bytes // 4), device=device)
    group_rank = among.rank - among.first
    peer = among.rank + (-1 if group_rank % 2 else 1)
    sends = group_rank % 2 == 0
    has_no_peer = (group_rank ^ 1) >= among.ranks
    one_way_seconds, sent_seconds = list[float](), list[float]()
    for _ in range(repeats if not has_no_peer else 0):
        if not sends:
            dist.recv(rows, peer, group=among.group)
            dist.send(rows, peer, group=among.group)
            continue
        work()
        start = time.perf_counter()
        dist.send(rows, peer, group=among.group)
        sent_seconds.append(time.perf_counter() - start)
        dist.recv(rows, peer, group=among.group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        one_way_seconds.append((time.perf_counter() - start) / 2)
    sums = torch.tensor(
        [
            _average_without_outliers(one_way_seconds),
            _average_without_outliers(sent_seconds),
            float(bool(one_way_seconds)),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def time_overlapped_hop(
    order: MessageOrder, among: RankRing, *, work: Callable[[], object], device: torch.device, repeats: int
) -> tuple[float, float]:
    """Time a hop of a ring: the seconds if it is waited for at once, and its delay of concurrent compute."""
    sent = torch.zeros(max(1, order.bytes // 4), device=device)
    received = torch.empty_like(sent)
    time_run = partial(time_message_after_work, work=work, repeats=repeats)
    seconds = time_run(lambda: _wait(_start_hop(sent, received, among)))

    def hop_during_work() -> None:
        works = _start_hop(sent, received, among)
        work()
        _wait(works)

    return seconds, max(0.0, time_run(hop_during_work) - time_run(work))


def create_ring(ranks: int, *, rank: int, local_ranks: int) -> RankRing:
    """Create the group of ``ranks`` neighbours that contains ``rank``; every rank calls it."""
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, local_ranks, ranks)]
    return RankRing(rank, rank - rank % ranks, ranks, groups[rank // ranks])


def build_message(order: MessageOrder, among: RankRing, *, device: torch.device) -> Callable[[], object]:
    """Return a function that sends one such message and waits for it."""
    ranks, group = among.ranks, among.group
    share = torch.zeros(max(1, order.bytes // 4 // ranks), device=device)
    full = torch.zeros(share.numel() * ranks, device=device)
    received = torch.empty_like(full)

    def gather() -> object:
        return all_gather(torch.empty_like(full), share, group=group, async_op=True).wait()

    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": gather,
        "reduce_scatter": lambda: reduce_scatter(torch.empty_like(share), full, group=group, async_op=True).wait(),
        "all_to_all": lambda: dist.all_to_all_single(received, full, group=group),
        "broadcast": lambda: dist.broadcast(full, among.first, group=group),
        "p2p": lambda: _wait(_start_hop(full, received, among)),
    }
    return runs[order.collective]


def _start_hop(sent: Tensor, received: Tensor, among: RankRing) -> list[dist.Work]:
    """Start a message to the next rank and one from the previous rank."""
    next_rank = among.first + (among.rank - among.first + 1) % among.ranks
    previous_rank = among.first + (among.rank - among.first - 1) % among.ranks
    operations = [
        dist.P2POp(dist.irecv, received, previous_rank, among.group),
        dist.P2POp(dist.isend, sent, next_rank, among.group),
    ]
    started: list[dist.Work] = dist.batch_isend_irecv(operations)
    return started


def _wait(works: list[dist.Work]) -> None:
    for message in works:
        message.wait()


def time_message_after_work(run: Callable[[], object], work: Callable[[], object], *, repeats: int) -> float:
    """Return the seconds of one message that follows ``work`` on every rank: the mean over ranks, without outliers."""
    run()
    begin, seconds = time.perf_counter(), list[float]()
    while len(seconds) < repeats and (len(seconds) < MIN_REPEATS or not _is_time_up(begin)):
        work()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    mean = torch.tensor(_average_without_outliers(seconds), dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def _average_without_outliers(seconds: list[float]) -> float:
    """Return the mean of all but the slowest few values; 0 if there are none."""
    fastest = sorted(seconds)[: len(seconds) - len(seconds) // REPEATS_PER_OUTLIER]
    return statistics.fmean(fastest) if fastest else 0.0


def _is_time_up(begin: float) -> bool:
    """Return whether the repeats of the slowest rank have used up their time; every rank calls it."""
    longest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest) > 0.3


def make_work(seconds: float) -> Callable[[], object]:
    """Return a function of matmuls and passes over memory that takes about ``seconds``, the same work on each call."""
    x = torch.ones(512, 256)
    weight = torch.ones(256, 512)
    row = torch.ones(2**18)

    def run_once() -> None:
        x @ weight
        row.mul_(1.0)

    run_once()
    begin = time.perf_counter()
    for _ in range(5):
        run_once()
    once_seconds = torch.tensor((time.perf_counter() - begin) / 5, dtype=torch.float64)
    dist.all_reduce(once_seconds, dist.ReduceOp.MAX)
    times = max(1, round(seconds / float(once_seconds)))

    def run_work() -> None:
        for _ in range(times):
            run_once()

    return run_work
