"""Traces of real runs, recorded here by torch.profiler on CPU: a plain DDP loop and our own engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from tests.processes import run_forked

STEPS = 3
WORK = ("aten", "inductor", "torch.distributed.ddp.reducer")  # namespaces of operators that compute
MODEL = Model(name="small", layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=128)


def job(sequences: int = 8) -> Job:
    return Job(sequence=64, global_batch=sequences, precision=get_recipe("fp32"))


def ddp_traces(folder: Path, ranks: int = 2) -> list[Path]:
    """Of a torch loop with DistributedDataParallel, in which rank 1 has more to do."""
    return _record(ranks, folder, _ddp)


def engine_traces(folder: Path, layout: str = "dp2 zero2 mbs2") -> list[Path]:
    """Of our own engine under a layout."""
    return _record(Layout.parse(layout).world, folder, _engine, layout)


def _record(ranks: int, folder: Path, function: Callable[..., None], *arguments: Any) -> list[Path]:
    paths = [folder / f"rank{rank}.json" for rank in range(ranks)]
    run_forked(ranks, function, str(folder), *arguments)
    return paths


def _profile(folder: str, step: Callable[[], None]) -> None:
    for _ in range(2):
        step()
    path = f"{folder}/rank{dist.get_rank()}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(path),
    ) as profiler:
        for _ in range(STEPS + 1):
            dist.barrier()
            step()
            profiler.step()


def _ddp(folder: str) -> None:
    rank = dist.get_rank()
    layers = [torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.LayerNorm(96), torch.nn.GELU()) for _ in range(3)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = 64 if rank == 0 else 256

    def step() -> None:
        model(torch.ones(rows, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    _profile(folder, step)


def _engine(folder: str, text: str) -> None:
    layout = Layout.parse(text)
    built = build(model=MODEL, layout=layout, job=job(), device=torch.device("cpu"))
    engine = Engine(built, model=MODEL, layout=layout, job=job())
    generator = torch.Generator().manual_seed(1)
    shape = (layout.micro_batches(job()), layout.mbs, job().sequence + 1)
    tokens = torch.randint(MODEL.vocab, shape, generator=generator)

    def step() -> None:
        engine.step(tokens)
        engine.zero_grad()

    _profile(folder, step)


def convert_to_gpu(path: Path) -> str:
    """A CPU trace as Kineto would write it of a GPU: each thread's outermost operators as kernels of a stream.

    Read anew here, by a stack of what is open on each thread; operators of autograd and c10d are no kernels.
    """
    trace = json.loads(path.read_text(encoding="utf-8"))
    kernels = []
    for event in select_outermost(trace["traceEvents"]):
        message = event["name"].startswith("gloo:")
        name = f"ncclDevKernel_{event['name'][5:]}" if message else f"kernel {event['name']}"
        kernels.append((event["ts"], event["dur"], name, event["tid"] % 1000 + (1000 if message else 0)))
    events: list[dict[str, Any]] = []
    for number, (ts, dur, name, stream) in enumerate(kernels, start=1):
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": ts, "dur": 0.0}
        events.append({**call, "args": {"correlation": number}})
        args = {"correlation": number, "stream": stream, "device": 0, "External id": number}
        events.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": args}
        )
    rank = trace["distributedInfo"]["rank"]
    info = json.dumps({"backend": "nccl", "rank": rank, "world_size": 2})
    return f'{{"distributedInfo": {info},\n"traceEvents": {json.dumps(events)}}}'


def select_outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators that compute and lie in no other such one of their thread, and gloo's messages."""
    results: list[dict[str, Any]] = []
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].partition("::")[0] in WORK:
            threads.setdefault(event["tid"], []).append(event)
        elif event.get("cat") == "user_annotation" and event["name"].startswith("gloo:"):
            results.append(event)
    for thread in threads.values():
        open_until: list[float] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            if not open_until:
                results.append(event)
            open_until.append(event["ts"] + event["dur"])
    return results
