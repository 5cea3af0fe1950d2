"""Draws jobs on GPUs and writes them as PyTorch's profiler would: events as in pytorch/kineto's output_json.cpp.

Hosts launch kernels and copies on streams, collectives begin on each rank when it is ready and end together. All times
are integer nanoseconds, so that another reading of the file can be held against ours to the last one.
"""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE_NAMES = (
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn",
    "nvjet_tst_192x192_64x3_2x1_v_bz_coopA_NNT",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >()",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*)",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >(Flash_fwd_params)",
    "triton_poi_fused_add_mul_0",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::Tensors>()",
)
COLLECTIVES = {  # name in the metadata, kernel
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
COMPUTE_STREAM, MESSAGE_STREAM, COPY_STREAM = 7, 20, 14
ORIGIN = 5_000_000_000  # ns
STEPS_BEGIN = 3  # number of the first ProfilerStep


class Shape(NamedTuple):
    """What is drawn from."""

    ranks: int = 2
    steps: int = 3
    operations: int = 12  # of a step
    longest: int = 4000  # ns of a kernel
    host: int = 2500  # ns that the host takes for one, at most
    latency: int = 900  # ns from a launch to its kernel, at least
    message_share: float = 0.25
    copy_share: float = 0.1
    depends_share: float = 0.5  # of operations behind a message that wait for it
    optimizer_tail: bool = True


@dataclass
class Kernel:
    """What ran on a stream, and what made it begin when it did."""

    rank: int
    step: int
    name: str
    kind: str  # compute, message, copy
    stream: int
    launch: int
    start: int
    end: int
    correlation: int
    args: dict[str, Any] = field(default_factory=dict)
    message: int = -1
    in_optimizer: bool = False
    behind: Kernel | None = None  # what ended last of what it waited for; None: its own launch
    joined: list[Kernel] = field(default_factory=list)  # of a message, the kernels of all ranks


@dataclass
class DrawnJob:
    """All kernels by rank, the hosts' steps, and the events."""

    kernels: list[list[Kernel]]
    steps: list[list[tuple[int, int]]]  # of each rank: start and end of its annotations
    optimizers: list[list[tuple[int, int]]]
    world: int


def draw(seed: int, shape: Shape | None = None) -> DrawnJob:
    """Draw a job: the same operations on every rank, of durations that differ."""
    dice, shape = random.Random(seed), shape or Shape()
    plan = [_plan_operations(dice, shape) for _ in range(shape.steps)]
    job = DrawnJob(
        [[] for _ in range(shape.ranks)],
        [[] for _ in range(shape.ranks)],
        [[] for _ in range(shape.ranks)],
        shape.ranks,
    )
    hosts = [_Host(rank, ORIGIN + dice.randrange(2000), shape) for rank in range(shape.ranks)]
    messages = 0
    for number, operations in enumerate(plan):
        begun = [host.clock for host in hosts]
        for place, what in enumerate(operations):
            last = place >= shape.operations - 2 and shape.optimizer_tail
            optimizer_from = [host.clock for host in hosts]
            made = [host.launch(dice, what, number, in_optimizer=last) for host in hosts]
            if what in COLLECTIVES:
                _meet(dice, made, messages, what, shape)
                messages += 1
            for host, kernel in zip(hosts, made, strict=True):
                job.kernels[host.rank].append(kernel)
                if last:
                    job.optimizers[host.rank].append((optimizer_from[host.rank], host.clock))
        for host, start in zip(hosts, begun, strict=True):
            host.clock += dice.randrange(1, 500)
            job.steps[host.rank].append((start, host.clock))
            host.clock += dice.randrange(0, 300)
    return job


def _plan_operations(dice: random.Random, shape: Shape) -> list[str]:
    what = []
    for place in range(shape.operations):
        roll = dice.random()
        if place >= shape.operations - 2 and shape.optimizer_tail:
            what.append("compute")
        elif roll < shape.message_share and shape.ranks > 1:
            what.append(dice.choice(sorted(COLLECTIVES)))
        elif roll < shape.message_share + shape.copy_share:
            what.append("copy")
        else:
            what.append("compute")
    return what


class _Host:
    """A rank's host: its clock, its streams, the message that later kernels may wait for."""

    def __init__(self, rank: int, clock: int, shape: Shape) -> None:
        self.rank, self.clock, self.shape = rank, clock, shape
        self.last: dict[int, Kernel] = {}
        self.correlation = 100 * rank + 1

    def launch(self, dice: random.Random, what: str, step: int, *, in_optimizer: bool) -> Kernel:
        """Launch one operation; a message's begin is known when all are ready, its end when they have met."""
        shape = self.shape
        self.clock += dice.randrange(1, shape.host) * (12 if dice.random() < 0.06 else 1)
        stream = {"compute": COMPUTE_STREAM, "copy": COPY_STREAM}.get(what, MESSAGE_STREAM)
        waits_for = [self.last.get(stream)]
        if what in COLLECTIVES:
            waits_for.append(self.last.get(COMPUTE_STREAM))
        elif dice.random() < shape.depends_share:
            waits_for.append(self.last.get(MESSAGE_STREAM))
        behind = max((item for item in waits_for if item), key=lambda item: item.end, default=None)
        ready = self.clock + shape.latency + dice.randrange(100)
        start = ready
        if behind is not None and behind.end >= ready:
            start = behind.end
        else:
            behind = None
        lasts = dice.randrange(1, shape.longest)
        name = {
            "compute": dice.choice(COMPUTE_NAMES),
            "copy": dice.choice(("Memcpy HtoD (Pinned -> Device)", "Memset (Device)")),
        }
        self.correlation += dice.randrange(1, 4)
        kernel = Kernel(
            self.rank,
            step,
            COLLECTIVES.get(what) or name[what],
            "message" if what in COLLECTIVES else what,
            stream,
            launch=self.clock,
            start=start,
            end=start + lasts,
            correlation=self.correlation,
            behind=behind,
            in_optimizer=in_optimizer,
        )
        self.clock += dice.randrange(50, 200)  # the call
        self.last[stream] = kernel
        return kernel


def _meet(dice: random.Random, made: list[Kernel], number: int, what: str, shape: Shape) -> None:
    """End a message on all ranks together, some time after the last of them began."""
    end = max(kernel.start for kernel in made) + dice.randrange(1, shape.longest)
    elements = dice.randrange(1, 1 << 20) * shape.ranks
    ranks = shape.ranks
    sizes = {
        "allreduce": (elements, elements),
        "_allgather_base": (elements // ranks, elements),
        "_reduce_scatter_base": (elements, elements // ranks),
    }[what]
    for kernel in made:
        kernel.end, kernel.message, kernel.joined = end, number, made
        kernel.args = {
            "Collective name": what,
            "In msg nelems": sizes[0],
            "Out msg nelems": sizes[1],
            "Group size": ranks,
            "dtype": "BFloat16",
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(ranks))),
        }


def events(job: DrawnJob, rank: int) -> list[dict[str, Any]]:
    """A rank's events, in the order in which Kineto writes them: by kind, not by time."""
    host, results = 4000 + rank, []
    for step, (start, end) in enumerate(job.steps[rank]):
        results.append(_event("user_annotation", f"ProfilerStep#{STEPS_BEGIN + step}", host, host, start, end))
    for start, end in job.optimizers[rank]:
        results.append(_event("user_annotation", "Optimizer.step#AdamW.step", host, host, start, end))
    for kernel in job.kernels[rank]:
        name, external = kernel.name, {"External id": kernel.correlation + 10_000}
        start = kernel.launch - 30
        operator = {"copy": "aten::copy_", "message": "record_param_comms"}.get(kernel.kind, "aten::mm")
        results.append(_event("cpu_op", operator, host, host, start, kernel.launch + 45, {**external, **kernel.args}))
        call = {"copy": "cudaMemcpyAsync"}.get(kernel.kind, "cudaLaunchKernel")
        known = {**external, "cbid": 211, "correlation": kernel.correlation}
        results.append(_event("cuda_runtime", call, host, host, kernel.launch, kernel.launch + 40, known))
        flow = {"id": kernel.correlation, "cat": "ac2g", "name": "ac2g"}
        results.append({"ph": "s", **flow, "pid": host, "tid": host, "ts": kernel.launch / 1000})
        category = "kernel" if kernel.kind != "copy" else "gpu_memcpy" if "Memcpy" in name else "gpu_memset"
        known = {
            **external,
            "device": rank,
            "context": 1,
            "stream": kernel.stream,
            "correlation": kernel.correlation,
            **kernel.args,
        }
        results.append(_event(category, name, rank, kernel.stream, kernel.start, kernel.end, known))
        results.append({"ph": "f", **flow, "pid": rank, "tid": kernel.stream, "ts": kernel.start / 1000, "bp": "e"})
    return results


def _event(
    category: str, name: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "args": args or {},
    }


def metadata(rank: int, world: int) -> dict[str, Any]:
    """The keys before the events."""
    group = {
        "pg_name": "0",
        "pg_desc": "default_pg",
        "backend_config": "cuda:nccl",
        "pg_size": world,
        "ranks": list(range(world)),
    }
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": rank, "name": "NVIDIA H100", "totalGlobalMem": 85028765696}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world, "pg_count": 1, "pg_config": [group]},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1790857026000000000,
    }


def text(found: list[dict[str, Any]], *, rank: int = 0, world: int = 1, **more: Any) -> str:
    """The file's text: metadata, then an event a line."""
    keys = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in {**metadata(rank, world), **more}.items())
    lines = ",\n".join(json.dumps(item) for item in found)
    return f'{{\n{keys}  "traceEvents": [\n{lines}\n  ],\n  "traceName": "rank{rank}.json"\n}}\n'


def write(job: DrawnJob, folder: Path, *, zipped: bool = False) -> list[Path]:
    """Write a file per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in range(job.world):
        content = text(events(job, rank), rank=rank, world=job.world).encode()
        path = folder / f"rank{rank}.json{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(content) if zipped else content)
        paths.append(path)
    return paths
