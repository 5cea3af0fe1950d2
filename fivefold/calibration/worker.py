"""Worker process of ``calibrate``: measure all points together with the other ranks; rank 0 prints the results.

    python -m fivefold.calibration.worker '{"rank": 0, "ranks": 2, ...}'

Every repeat begins at a barrier and runs long enough to time. The result is the fastest of the repeats, as disturbances
only slow down, on the slowest rank (a training step waits for it), in the best round. The output, one line each, is
``Facts``, ``CalibrationProgress`` at every point, and at the end every ``MeasuredPoint``.
"""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.calibration.kernels import KERNELS
from fivefold.calibration.messages import MessageOrder, RankRing, make_work, message_of, time_message
from fivefold.calibration.points import (
    AttentionPointShape,
    CalibrationProgress,
    Facts,
    Kind,
    MeasuredPoint,
    Points,
    WorkerOrder,
    default_points,
)
from fivefold.calibration.processes import carry_out
from fivefold.machine.spec import AttentionPoint, Collective, CollectivePoint, KernelPoint, MatmulPoint
from fivefold.record import UserError
from fivefold.trainer.host import memory_bytes
from fivefold.units import Dtype

Point = MatmulPoint | AttentionPoint | KernelPoint | CollectivePoint

TORCH: dict[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


WORK_SECONDS = 6e-3  # compute between two messages on a CPU: about that of one layer of a small model


LONG_SECONDS = 0.1  # products that would take longer are left out: without instructions for bf16 they take seconds
PROBE = (256, 256, 256)  # the matmul that tells how long the other products of its dtype take
MAX_ROUND_SPREAD = 0.2  # a point whose two best rounds are further apart is measured once more
MAX_BUDGET_RATIO = 1.3  # most time, as a multiple of the budget, including these repetitions


class WorkerContext(NamedTuple):
    """The rank, number of ranks and device of a worker, and the seconds for the repeats of one point."""

    rank: int
    ranks: int
    device: torch.device
    seconds: float

    def clock(self, run: Callable[[], object]) -> float:
        """Return the seconds of one ``run``: the least of repeats that begin at a barrier, maximum over ranks."""
        once = self.max_over_ranks(self._time(run, times=1))  # warm up
        if once < 5e-3:
            once = self.max_over_ranks(self._time(run, times=1))
        times = min(1000, math.ceil(2e-3 / once))
        repeats = max(1, min(15, int(self.seconds / (times * once))))
        return self.max_over_ranks(min(self._time(run, times=times) for _ in range(repeats)))

    def _time(self, run: Callable[[], object], *, times: int) -> float:
        self.max_over_ranks(0.0)  # a barrier
        start = time.perf_counter()
        for _ in range(times):
            run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / times

    def max_over_ranks(self, seconds: float) -> float:
        """Return the largest ``seconds`` of all ranks, on every rank (an all-reduce); also serves as a barrier."""
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)


def noise(context: WorkerContext, *shape: int, dtype: Dtype) -> Tensor:
    """Return normal numbers, repeated with a prime period: drawing all of them would take longer than the matmuls."""
    count = math.prod(shape)
    samples = torch.randn(8191, device=context.device).to(TORCH[dtype])
    return samples.repeat(count // 8191 + 1)[:count].view(shape).clone()


def matmul(context: WorkerContext, shape: tuple[int, int, int], dtype: Dtype) -> MatmulPoint:
    """Time ``(m, k) @ (k, n)``."""
    m, n, k = shape
    a, b = noise(context, m, k, dtype=dtype), noise(context, k, n, dtype=dtype)
    return MatmulPoint(dtype=dtype, ranks=context.ranks, m=m, n=n, k=k, seconds=context.clock(lambda: a @ b))


def attention(context: WorkerContext, shape: AttentionPointShape, dtype: Dtype) -> AttentionPoint:
    """Time forward and backward of causal attention on q, k, v of (sequences, heads, tokens, head_dim)."""
    size = (shape.sequences, shape.heads, shape.tokens, shape.head_dim)
    q, k, v = (noise(context, *size, dtype=dtype).requires_grad_() for _ in range(3))
    run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    forward = context.clock(run)
    out = run()
    grad = torch.randn_like(out)
    backward = context.clock(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return AttentionPoint(
        dtype=dtype,
        ranks=context.ranks,
        kv_heads=shape.heads,
        forward_seconds=forward,
        backward_seconds=backward,
        **shape.model_dump(),
    )


def kernel(context: WorkerContext, name: str, size_bytes: int, dtype: Dtype) -> KernelPoint:
    """Time one of ``KERNELS`` on a tensor of ``size_bytes``."""
    x = torch.ones(size_bytes // TORCH[dtype].itemsize, dtype=TORCH[dtype], device=context.device)
    work = KERNELS[name](x)
    seconds = context.clock(work.run)
    return KernelPoint(kernel=name, dtype=dtype, ranks=context.ranks, moved_bytes=work.moved_bytes, seconds=seconds)


def collective(context: WorkerContext, name: Collective, size_bytes: int) -> CollectivePoint:
    """Time a collective in fp32 on a full tensor of ``size_bytes``, rounded down to equal shares; p2p: one way."""
    share = max(1, size_bytes // 4 // context.ranks)
    order = MessageOrder(collective=name, ranks=context.ranks, bytes=4 * share * context.ranks)
    ring = RankRing(context.rank, 0, context.ranks, dist.group.WORLD)
    if context.device.type == "cpu" or name == "p2p":
        return time_message(order, ring, work=make_work(WORK_SECONDS), device=context.device)
    seconds = context.clock(message_of(order, ring, device=context.device))
    return CollectivePoint(collective=name, ranks=context.ranks, bytes=order.bytes, seconds=seconds)


COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
KINDS: dict[type[Point], Kind] = {
    MatmulPoint: "matmuls",
    AttentionPoint: "attentions",
    KernelPoint: "kernels",
    CollectivePoint: "collectives",
}


def jobs(context: WorkerContext, points: Points) -> Iterator[Callable[[], Point]]:
    """Yield every measurement, in the same order on every rank; first the collectives, the most easily disturbed."""
    for operation in COLLECTIVES if context.ranks > 1 else ():
        for size in points.collective_bytes:
            yield partial(collective, context, operation, size)
    for dtype in points.dtypes:
        largest_product = _largest_product(context, dtype)
        for matrices in points.matmuls:
            if math.prod(matrices) <= largest_product:
                yield partial(matmul, context, matrices, dtype)
        for shape in points.attentions:
            if shape.sequences * shape.heads * shape.head_dim * shape.tokens**2 <= largest_product:
                yield partial(attention, context, shape, dtype)
        for name in KERNELS:
            for size in points.kernel_bytes:
                yield partial(kernel, context, name, size, dtype)


def _largest_product(context: WorkerContext, dtype: Dtype) -> float:
    """Return the largest m·n·k that takes about ``LONG_SECONDS`` on a CPU, but at least that of ``PROBE``."""
    if context.device.type != "cpu":
        return math.inf
    return math.prod(PROBE) * max(1.0, LONG_SECONDS / matmul(context, PROBE, dtype).seconds)


def seconds(point: Point) -> float:
    """Return the seconds of a point; of attention, forward plus backward."""
    return point.forward_seconds + point.backward_seconds if isinstance(point, AttentionPoint) else point.seconds


def best_of(
    todo: list[Callable[[], Point]], *, context: WorkerContext, points: Points
) -> list[tuple[Point, float | None]]:
    """Run all measurements once, in further rounds while the budget lasts, and noisy ones once more.

    Returns for each measurement the fastest point, and by what fraction the second fastest is slower (None if it was
    measured once).
    """
    start = time.perf_counter()
    results: list[list[Point]] = [[] for _ in todo]
    total = points.rounds * len(todo)

    def measure(index: int, done: int) -> None:
        results[index] = sorted([*results[index], todo[index]()], key=seconds)
        say(CalibrationProgress(kind=KINDS[type(results[index][0])], done=done, total=total), context.rank)

    for step in range(total):
        if step >= len(todo) and context.max_over_ranks(time.perf_counter() - start) > points.budget_seconds:
            break
        measure(step % len(todo), step + 1)
    for index, points_of_one in enumerate(results):
        spread = context.max_over_ranks(_spread(points_of_one) or 0.0)
        is_over_budget = context.max_over_ranks(time.perf_counter() - start) > MAX_BUDGET_RATIO * points.budget_seconds
        if spread > MAX_ROUND_SPREAD and not is_over_budget:
            measure(index, total)
    return [(points_of_one[0], _spread(points_of_one)) for points_of_one in results]


def _spread(points: list[Point]) -> float | None:
    return seconds(points[1]) / seconds(points[0]) - 1 if len(points) > 1 else None


def find_device(rank: int, ranks: int) -> tuple[torch.device, Facts]:
    """Return this rank's GPU if there are GPUs, else the CPU, with its ``Facts``."""
    if torch.cuda.is_available():
        if ranks > torch.cuda.device_count():
            raise UserError(
                f"{ranks} ranks need {ranks} GPUs, but there are {torch.cuda.device_count()}; lower --ranks"
            )
        torch.cuda.set_device(rank)
        name, memory = torch.cuda.get_device_name(rank), torch.cuda.mem_get_info(rank)[1]
        return torch.device("cuda", rank), Facts(
            device=name, backend="nccl", memory_bytes=memory, torch=torch.__version__
        )
    return torch.device("cpu"), Facts(
        device=processor_name(), backend="gloo", memory_bytes=memory_bytes(), torch=torch.__version__
    )


def processor_name() -> str:
    """Return the model name of the processor, or what ``platform`` knows of it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def say(message: Facts | CalibrationProgress | MeasuredPoint, rank: int) -> None:
    """Print a message as one line, on the first rank only."""
    if rank == 0:
        print(message.model_dump_json(), flush=True)


def main(order: WorkerOrder) -> None:
    """Measure all points of ``order``; rank 0 prints the results."""
    torch.set_num_threads(order.threads)
    device, facts = find_device(order.rank, order.ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if facts.backend == "nccl" else "gloo",
        init_method=f"file://{order.meeting}",
        rank=order.rank,
        world_size=order.ranks,
        timeout=timedelta(seconds=order.silence_seconds),
    )
    points = order.points or default_points(facts.backend, quick=order.quick)
    context = WorkerContext(order.rank, order.ranks, device, points.seconds_per_point)
    say(facts, order.rank)
    best = best_of(list(jobs(context, points)), context=context, points=points)
    for point, spread in best:
        say(MeasuredPoint(kind=KINDS[type(point)], point=point.model_dump(), spread=spread), order.rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    carry_out(lambda: main(WorkerOrder.model_validate_json(sys.argv[1])))
