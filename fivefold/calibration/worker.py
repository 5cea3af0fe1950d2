"""Worker process of ``calibrate``: measure kernels, messages and small training steps together with the other ranks.

    python -m fivefold.calibration.worker ORDER.json

One start serves every number of concurrent processes. A round measures every kernel and then one step of every run, so
that a change of the computer's speed meets both; the result is the median over rounds. Compute on a CPU is timed
by the processor time of the thread, which other programs do not lengthen; messages are timed by the clock. The output
of rank 0, one line each, is for each number of processes ``Facts``, ``CalibrationProgress`` at every measurement, and
at the end every ``MeasuredPoint`` and the ``RankProfile`` of every rank and run.
"""

from __future__ import annotations

import math
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.calibration import fit_machine
from fivefold.calibration.kernels import KERNELS
from fivefold.calibration.message_orders import MessageOrder
from fivefold.calibration.messages import RankRing, build_message, make_work, time_message
from fivefold.calibration.null_process_group import init_null_process_group
from fivefold.calibration.orders import RankProfile, RoundOrder, WorkerOrder
from fivefold.calibration.other_programs import ProcessorTime, count_cores_of_others
from fivefold.calibration.points import (
    AttentionPointShape,
    CalibrationProgress,
    Facts,
    Kind,
    MeasuredPoint,
    Points,
    choose_default_points,
)
from fivefold.calibration.processes import carry_out
from fivefold.calibration.step_clock import WARMUP_STEPS, ClockedStep, build_step, summarize_steps
from fivefold.calibration.step_grid import GridRun, list_grid_runs, select_fitting_runs
from fivefold.calibration.unit_clock import MeasuredUnitSeconds
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.machine.spec import (
    BUSY_CORES,
    AttentionPoint,
    Calibration,
    Collective,
    CollectivePoint,
    KernelPoint,
    MatmulPoint,
)
from fivefold.trainer.host import count_memory_bytes
from fivefold.trainer.parallel.mesh import ProcessGroups
from fivefold.units import Dtype

Point = MatmulPoint | AttentionPoint | KernelPoint | CollectivePoint
Measure = Callable[[], Point]

TORCH: dict[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


WORK_SECONDS = 6e-3  # compute between two messages on a CPU: about that of one layer of a small model


LONG_SECONDS = 0.1  # products that would take longer are left out: without instructions for bf16 they take seconds
PROBE = (256, 256, 256)  # the matmul that tells how long the other products of its dtype take
EMULATED_RATIO = 6.0  # a dtype whose products take this many times as long as in fp32 has no instructions
EMULATED_SIZES = (64, 256, 1024)  # products of such a dtype: their rate hardly depends on the shape
REPEATED_SECONDS = 0.01  # a point that takes longer is measured only in the first round
MIN_STEPS = 3  # measured steps of a run, one in each round
GPU_STEPS = 5  # the same on a GPU, where a run is measured at once
KEPT_ROUNDS = 2  # rounds of steps that count, however much other programs disturb them
MAX_DISTURBED_ROUNDS = 6  # rounds of steps, if fewer than ``MIN_STEPS`` were undisturbed
KERNEL_ROUNDS = 2  # rounds of steps for each round of kernels
MIN_RUNS = 3  # a run that would take more than the budget over this number is left out
PATIENCE_SECONDS = 3600.0  # a worker waits for the others this long; the parent ends all much earlier


class WorkerContext(NamedTuple):
    """The rank, number of ranks and device of a worker, and the seconds for the repeats of one point."""

    rank: int
    ranks: int
    device: torch.device
    seconds: float

    def clock(self, run: Callable[[], object]) -> float:
        """Return the seconds of one ``run``, the median of repeats that begin at a barrier.

        On a CPU it is the mean over ranks, like the measured units of a step; on GPUs it is the maximum, because the
        other ranks wait for the slowest.
        """
        self._time(run, times=1)  # warm up
        once = self.max_over_ranks(self._time(run, times=1))
        times = min(1000, math.ceil(min(2e-3, self.seconds) / once))
        repeats = max(1, min(15, int(self.seconds / (times * once))))
        seconds = [once] if times * repeats == 1 else [self._time(run, times=times) for _ in range(repeats)]
        own_seconds = statistics.median(seconds)
        return self.max_over_ranks(own_seconds) if self.device.type == "cuda" else self.mean_over_ranks(own_seconds)

    def _time(self, run: Callable[[], object], *, times: int) -> float:
        self.max_over_ranks(0.0)  # a barrier
        now = time.perf_counter if self.device.type == "cuda" else time.thread_time
        start = now()
        for _ in range(times):
            run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (now() - start) / times

    def mean_over_ranks(self, seconds: float) -> float:
        """Return the mean of ``seconds`` of all ranks, on every rank (an all-reduce)."""
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value)
        return float(value) / self.ranks

    def count_cores_of_others(self, begin: ProcessorTime | None) -> float:
        """Return the cores that programs other than the ranks have used since ``begin``, on every rank."""
        end = ProcessorTime.read()
        own_seconds = self.ranks * self.mean_over_ranks(end.own - begin.own if begin and end else 0.0)
        cores = count_cores_of_others(begin, end and begin and end._replace(own=begin.own + own_seconds))
        return self.max_over_ranks(cores or 0.0)

    def max_over_ranks(self, seconds: float) -> float:
        """Return the largest ``seconds`` of all ranks, on every rank (an all-reduce); also serves as a barrier."""
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)


def make_noise(context: WorkerContext, *shape: int, dtype: Dtype) -> Tensor:
    """Return normal numbers, repeated with a prime period: drawing all of them would take longer than the matmuls."""
    count = math.prod(shape)
    samples = torch.randn(8191, device=context.device).to(TORCH[dtype])
    return samples.repeat(count // 8191 + 1)[:count].view(shape).clone()


def time_matmul(context: WorkerContext, shape: tuple[int, int, int], dtype: Dtype) -> MatmulPoint:
    """Time ``(m, k) @ (k, n)``, with the second matrix transposed as a linear layer stores its weight."""
    m, n, k = shape
    a = make_noise(context, m, k, dtype=dtype)
    b = make_noise(context, n, k, dtype=dtype).t()
    return MatmulPoint(dtype=dtype, ranks=context.ranks, m=m, n=n, k=k, seconds=context.clock(lambda: a @ b))


def time_attention(context: WorkerContext, shape: AttentionPointShape, dtype: Dtype) -> AttentionPoint:
    """Time forward and backward of causal attention; q, k and v are laid out token by token, as in the model."""
    size = (shape.sequences, shape.tokens, shape.heads, shape.head_dim)
    q, k, v = (make_noise(context, *size, dtype=dtype).requires_grad_() for _ in range(3))
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    run = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
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


def time_kernel(context: WorkerContext, name: str, size_bytes: int, dtype: Dtype) -> KernelPoint:
    """Time one of ``KERNELS`` on a tensor of ``size_bytes``."""
    x = torch.ones(size_bytes // TORCH[dtype].itemsize, dtype=TORCH[dtype], device=context.device)
    work = KERNELS[name](x)
    seconds = context.clock(work.run)
    return KernelPoint(kernel=name, dtype=dtype, ranks=context.ranks, moved_bytes=work.moved_bytes, seconds=seconds)


def time_collective(context: WorkerContext, name: Collective, size_bytes: int, *, repeats: int) -> CollectivePoint:
    """Time a collective in fp32 on a full tensor of ``size_bytes``, rounded down to equal shares; p2p: one way."""
    share = max(1, size_bytes // 4 // context.ranks)
    order = MessageOrder(collective=name, ranks=context.ranks, bytes=4 * share * context.ranks)
    ring = RankRing(context.rank, 0, context.ranks, dist.group.WORLD)
    if context.device.type == "cpu" or name == "p2p":
        work = make_work(WORK_SECONDS)
        return time_message(order, ring, work=work, device=context.device, repeats=repeats)
    seconds = context.clock(build_message(order, ring, device=context.device))
    return CollectivePoint(collective=name, ranks=context.ranks, bytes=order.bytes, seconds=seconds)


COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
KINDS: dict[type[Point], Kind] = {
    MatmulPoint: "matmuls",
    AttentionPoint: "attentions",
    KernelPoint: "kernels",
    CollectivePoint: "collectives",
}


def list_message_jobs(context: WorkerContext, points: Points) -> Iterator[Measure]:
    """Yield every measurement of a message, in the same order on every rank."""
    for operation in COLLECTIVES if context.ranks > 1 else ():
        for size in points.collective_bytes:
            yield partial(time_collective, context, operation, size, repeats=points.message_repeats)


def list_kernel_jobs(context: WorkerContext, points: Points, rates: Mapping[Dtype, ProductRate]) -> Iterator[Measure]:
    """Yield every measurement of a kernel, in the same order on every rank."""
    for dtype in points.dtypes:
        largest_product, is_emulated = rates[dtype]
        for matrices in points.matmuls:
            if math.prod(matrices) <= largest_product and not (is_emulated and set(matrices) - {*EMULATED_SIZES}):
                yield partial(time_matmul, context, matrices, dtype)
        for shape in points.attentions:
            if shape.sequences * shape.heads * shape.head_dim * shape.tokens**2 <= largest_product:
                yield partial(time_attention, context, shape, dtype)
        for name in KERNELS:
            for size in points.kernel_bytes:
                yield partial(time_kernel, context, name, size, dtype)


class ProductRate(NamedTuple):
    """The largest m·n·k that takes about ``LONG_SECONDS`` on a CPU, but at least that of ``PROBE``.

    ``is_emulated``: the CPU has no instructions for the dtype.
    """

    largest_product: float
    is_emulated: bool


def probe_products(context: WorkerContext, dtypes: Sequence[Dtype]) -> dict[Dtype, ProductRate]:
    """Return the rate of products by dtype."""
    if context.device.type != "cpu":
        return dict.fromkeys(dtypes, ProductRate(math.inf, False))
    seconds = {dtype: time_matmul(context, PROBE, dtype).seconds for dtype in dtypes}
    return {
        dtype: ProductRate(
            math.prod(PROBE) * max(1.0, LONG_SECONDS / seconds[dtype]),
            seconds[dtype] > EMULATED_RATIO * min(seconds.values()),
        )
        for dtype in dtypes
    }


def get_seconds(point: Point) -> float:
    """Return the seconds of a point; of attention, forward plus backward."""
    return point.forward_seconds + point.backward_seconds if isinstance(point, AttentionPoint) else point.seconds


class Curves:
    """The points of repeated kernels and messages: measured round by round, with the median of each as the result."""

    def __init__(self, todo: Sequence[Measure]) -> None:
        self.todo = todo
        self._results: list[list[Point]] = [[] for _ in todo]

    def measure_round(self, note: Callable[[Kind], None]) -> None:
        """Measure every point once more, but not those that take long; ``note`` is called with the kind of each."""
        for results, measure in zip(self._results, self.todo, strict=True):
            if not results or get_seconds(results[0]) < REPEATED_SECONDS:
                results.append(measure())
            note(KINDS[type(results[0])])

    def list_medians(self) -> list[tuple[Point, float | None]]:
        """Return the median of each point, and by what fraction the second fastest round is slower than the fastest.

        The latter is None for a point that was measured once.
        """
        sorted_results = [sorted(results, key=get_seconds) for results in self._results]
        return [(results[(len(results) - 1) // 2], _spread(results)) for results in sorted_results]


def _spread(points: list[Point]) -> float | None:
    return get_seconds(points[1]) / get_seconds(points[0]) - 1 if len(points) > 1 else None


class Budget:
    """The seconds that are left for runs, of which each needs its warm-up and ``MIN_STEPS`` steps.

    Steps are expected to take as much longer than predicted as those of the run before.
    """

    def __init__(self, seconds: float, *, now: Callable[[], float]) -> None:
        self.now, self._end, self._longest = now, now() + seconds, seconds / MIN_RUNS
        self._slowdown: dict[Dtype, float] = {}
        self._promised = 0.0  # seconds of steps to come of the runs that were accepted

    def overrun(self, dtype: Dtype, step_seconds: float) -> float:
        """Return by how many seconds a run would probably be too long, or end too late.

        The first run of each dtype is made if any time is left, as its prediction may be far too long.
        """
        overdue = self.now() + self._promised - self._end
        slowdown = self._slowdown.get(dtype)
        if slowdown is None:
            return overdue
        expected_seconds = (WARMUP_STEPS + MIN_STEPS) * slowdown * step_seconds
        return max(expected_seconds - self._longest, overdue + expected_seconds)

    def note(self, dtype: Dtype, step_seconds: float, *, measured_seconds: float) -> None:
        """Record the seconds of a step of a run that was accepted."""
        self._slowdown[dtype] = measured_seconds / step_seconds
        self._promised += MIN_STEPS * measured_seconds


def count_quiet_rounds(others: Sequence[float]) -> int:
    """Return the number of rounds in which other programs used few of the cores; ``others``: how many in each."""
    return sum(cores <= BUSY_CORES for cores in others)


def select_quiet_rounds(others: Sequence[float]) -> list[int]:
    """Return the rounds that count: those in which other programs used few of the cores, or the quietest.

    ``others``: the cores that they used in each round. ``KEPT_ROUNDS`` rounds count in any case.
    """
    quietest = sorted(range(len(others)), key=others.__getitem__)
    return quietest[: max(KEPT_ROUNDS, count_quiet_rounds(others))]


def limit_step_seconds(step_seconds: float, *, left_seconds: float) -> float:
    """Return the seconds for steps, which end with those left for all points; at least half of ``step_seconds``."""
    return max(step_seconds / 2, min(step_seconds, left_seconds))


def build_runs(
    context: WorkerContext, runs: Sequence[tuple[int, GridRun, float]], budget: Budget, *, groups: ProcessGroups
) -> Iterator[tuple[int, ClockedStep]]:
    """Build and warm up the runs that fit the budget; yield the number and the step of each.

    ``runs``: number, run, and predicted seconds of a step. ``groups``: shared by all runs, as the threads of a group of
    gloo take a thousandth of a core even while they wait, and every run has up to eight groups.
    """
    sends = context.ranks > 1 and context.device.type == "cpu"
    for number, run, step_seconds in runs:
        dtype = run.job.precision.compute
        if context.max_over_ranks(budget.overrun(dtype, step_seconds)) > 0:
            continue
        rank = context.rank if sends else 0
        step = build_step(run.model, run.layout, run.job, rank=rank, device=context.device, sends=sends, groups=groups)
        step()
        for _ in range(WARMUP_STEPS - 1):
            begin = budget.now()
            if context.device.type == "cpu":
                step.trace_gaps()
            else:
                step()
        measured_seconds = context.max_over_ranks(budget.now() - begin)
        budget.note(dtype, step_seconds, measured_seconds=measured_seconds)
        yield number, step


def find_device(rank: int, ranks: int) -> tuple[torch.device, Facts]:
    """Return this rank's GPU if there are GPUs, else the CPU, with its ``Facts``."""
    if torch.cuda.is_available():
        if ranks > torch.cuda.device_count():
            raise UserError(
                f"{ranks} ranks need {ranks} GPUs, but there are {torch.cuda.device_count()}; lower --processes"
            )
        torch.cuda.set_device(rank)
        name = torch.cuda.get_device_name(rank)
        memory = torch.cuda.mem_get_info(rank)[1]
        return torch.device("cuda", rank), Facts(
            device=name, backend="nccl", memory_bytes=memory, torch=torch.__version__
        )
    return torch.device("cpu"), Facts(
        device=read_processor_name(), backend="gloo", memory_bytes=count_memory_bytes(), torch=torch.__version__
    )


def read_processor_name() -> str:
    """Return the model name of the processor, or what ``platform`` knows of it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def print_line(message: Facts | CalibrationProgress | MeasuredPoint | RankProfile, rank: int) -> None:
    """Print a message as one line, on the first rank only."""
    if rank == 0:
        print(message.model_dump_json(), flush=True)


class Measurement:
    """Everything that is measured with one number of concurrent processes, on one rank of them."""

    def __init__(self, order: WorkerOrder, part: RoundOrder, *, device: torch.device, facts: Facts) -> None:
        self.facts = facts
        self.points = points = part.points or choose_default_points(facts.backend, quick=order.quick)
        self.context = context = WorkerContext(order.rank, part.ranks, device, points.seconds_per_point)
        self.now = time.thread_time if device.type == "cpu" else time.perf_counter
        self.end = self.now() + points.budget_seconds
        on_gpu = device.type == "cuda"  # every rank has its own: one is enough
        if part.in_steps and (not on_gpu or part is order.rounds[0]):
            self.grid = list_grid_runs(1 if on_gpu else part.ranks, gpu=on_gpu, quick=order.quick)
        else:
            self.grid = []
        self.cases = [GridRun(case.model, Layout.parse(case.layout), case.job) for case in part.cases]
        self.rates = probe_products(context, points.dtypes)
        self.messages = Curves([*list_message_jobs(context, points)])
        self.kernels = Curves([*list_kernel_jobs(context, points, self.rates)])
        self._total = len(self.messages.todo) + points.rounds * (len(self.kernels.todo) + len(self.grid))
        self._done = 0

    def note(self, kind: Kind | Literal["steps"]) -> None:
        """Report that one more measurement is done."""
        self._done = min(self._done + 1, self._total)
        print_line(CalibrationProgress(kind=kind, done=self._done, total=self._total), self.context.rank)

    def list_runs(self) -> list[tuple[int, GridRun, float]]:
        """Return number, run and predicted seconds of a step of the runs that fit the memory, by the curves so far."""
        values: dict[str, list[Point]] = defaultdict(list)
        for point, _ in self.list_points():
            values[KINDS[type(point)]].append(point)
        fields = {"date": "", "torch": self.facts.torch, "cores": 1, **values}
        machine = fit_machine(Calibration.model_validate(fields), facts=self.facts, ranks=self.context.ranks)
        runs = [(number, run, plan.step_time.seconds) for number, run, plan in select_fitting_runs(self.grid, machine)]
        emulated = [run for run in runs if self.rates[run[1].job.precision.compute].is_emulated]
        return [run for run in runs if run not in emulated] + emulated[:1]  # one tells enough of a dtype that few use

    def list_points(self) -> list[tuple[Point, float | None]]:
        """Return the points, and how far their rounds differ."""
        return [*self.messages.list_medians(), *self.kernels.list_medians()]

    def measure_in_turns(self) -> None:
        """Measure messages once, and kernels and steps in turns, while the budget lasts."""
        context, steps, groups = self.context, dict[int, ClockedStep](), ProcessGroups()
        timed: dict[int, list[MeasuredUnitSeconds]] = defaultdict(list)
        others: list[float] = []  # cores that other programs used in each round of steps
        self.messages.measure_round(self.note)
        begin = self.now()
        self.kernels.measure_round(self.note)
        kernel_seconds = self.now() - begin
        if self.grid and context.device.type == "cpu":
            left_seconds = self.end - self.now() - MIN_STEPS // KERNEL_ROUNDS * kernel_seconds
            step_seconds = limit_step_seconds(self.points.step_seconds, left_seconds=left_seconds)
            cases = [(number, case, 1.0) for number, case in enumerate(self.cases, start=len(self.grid))]
            for number, step in chain(
                build_runs(context, self.list_runs(), Budget(step_seconds, now=self.now), groups=groups),
                build_runs(context, cases, Budget(math.inf, now=self.now), groups=groups),
            ):
                steps[number] = step
                self.note("steps")
        rounds = max(self.points.rounds, MIN_STEPS + 1 if steps else 0)
        for measured in count(1):
            is_last = measured >= rounds or (measured > MIN_STEPS and context.max_over_ranks(self.now() - self.end) > 0)
            if is_last and (
                measured > MAX_DISTURBED_ROUNDS or count_quiet_rounds(others) >= min(MIN_STEPS, len(steps))
            ):
                break
            round_begin = ProcessorTime.read()
            for number, step in steps.items():
                context.max_over_ranks(0.0)  # a barrier
                timed[number].append(step())
                self.note("steps")
            others.append(context.count_cores_of_others(round_begin))
            if not steps or measured % KERNEL_ROUNDS == 0:
                self.kernels.measure_round(self.note)
        for point, spread in self.list_points():
            print_line(MeasuredPoint(kind=KINDS[type(point)], point=point.model_dump(), spread=spread), context.rank)
        kept = select_quiet_rounds(others)
        for number, samples in timed.items():
            own_profile = profile_run(
                context, number, [samples[at] for at in kept], steps[number], rank=context.rank
            ).replace(cores_of_others=statistics.fmean(others[at] for at in kept))
            profiles: list[RankProfile] = [own_profile] * context.ranks
            dist.all_gather_object(profiles, own_profile)
            for profile in profiles:
                print_line(profile, context.rank)

    def measure_alone(self) -> None:
        """Measure the runs one after another on one GPU, whose memory holds one of them at a time."""
        budget = Budget(self.points.step_seconds, now=self.now)
        for number, step in build_runs(self.context, self.list_runs(), budget, groups=ProcessGroups()):
            samples = [step() for _ in range(GPU_STEPS)]
            self.note("steps")
            print_line(profile_run(self.context, number, samples, step, rank=0), self.context.rank)


def profile_run(
    context: WorkerContext, number: int, samples: list[MeasuredUnitSeconds], step: ClockedStep, *, rank: int
) -> RankProfile:
    """Return the profile of a rank in run ``number`` of the grid, of which ``samples`` are steps."""
    return RankProfile(
        run=number,
        workers=context.ranks,
        place=context.rank,
        rank=rank,
        torch=torch.__version__,
        device=str(context.device),
        timed=summarize_steps(samples),
        gaps=step.gaps,
    )


def measure(order: WorkerOrder, part: RoundOrder) -> None:
    """Measure all points and runs of ``part``; rank 0 prints the results."""
    torch.set_num_threads(part.threads)
    device, facts = find_device(order.rank, part.ranks)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if facts.backend == "nccl" else "gloo",
        init_method=f"file://{part.rendezvous_file}",
        rank=order.rank,
        world_size=part.ranks,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    print_line(facts, order.rank)
    measurement = Measurement(order, part, device=device, facts=facts)
    measurement.measure_in_turns()
    dist.destroy_process_group()
    if measurement.grid and device.type == "cuda" and order.rank == 0:
        measurement.context = measurement.context._replace(ranks=1)
        with init_null_process_group(rank=0, world=1):
            measurement.measure_alone()


def import_lazy_modules() -> None:
    """Import what torch imports in its first gradient and with its first optimizer, which take a second together.

    Every worker does so as it starts: within a round the others would wait for it.
    """
    import torch._dynamo
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def run_worker(order: WorkerOrder) -> None:
    """Measure with every number of processes in turn; a worker that is not among them waits for those that are."""
    import_lazy_modules()
    for part in order.rounds:
        if order.rank < part.ranks:
            measure(order, part)


if __name__ == "__main__":
    carry_out(lambda: run_worker(WorkerOrder.model_validate_json(Path(sys.argv[1]).read_text())))
