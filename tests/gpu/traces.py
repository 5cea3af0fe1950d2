"""Traces of real steps by PyTorch's profiler: a file per case for Perfetto, and where the device's time went.

    python -m tests.gpu.traces --folder runs/traces --rows runs/traces.jsonl       a markdown table

Busy is the union of all kernels on the device; the rest of the step it waits for the host. On CPU (``--small``)
operations take the place of kernels.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.trainer import build as building
from fivefold.trainer.engine import Engine
from fivefold.trainer.process import Process
from tests.gpu.harness import LATER, is_gpu_missing, parse_options, rows_of, run_apart
from tests.gpu.test_dryrun import repeat_weight
from tests.gpu.test_speed import TINY, WARM, Case

TRACED = 2  # steps
TOP = 4  # kernels that are named
CASES = (
    Case("llama3.2-1b", "mbs4 ac=none", 4096, 16, compiled=False),
    Case("llama3.2-1b", "mbs4 ac=none", 4096, 16),
    Case("llama3.2-1b", "mbs4 ac=none", 4096, 16, "fp8"),
    Case("llama3-8b", "mbs4 ac=full", 4096, 8, "bf16-pure"),
)
KINDS = (
    ("matmul", ("gemm", "nvjet", "cutlass", "addmm", "aten::mm", "aten::bmm")),
    ("attention", ("flash", "fmha", "attention", "cudnn")),
    ("copy", ("memcpy", "memset", "aten::copy_", "direct_copy")),
)


class Kernel(NamedTuple):
    """One kernel, in microseconds."""

    name: str
    start: float
    end: float


class Row(NamedTuple):
    """One case; seconds of a step, shares of it."""

    case: str
    seconds: float
    busy: float
    kinds: dict[str, float]
    top: list[str]
    file: str


def kind_of(name: str) -> str:
    """The category of a kernel, by its name."""
    return next((kind for kind, words in KINDS if any(word in name.lower() for word in words)), "other")


def union(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one of them runs."""
    total, reached = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def sum_kernels(case: Case, kernels: Sequence[Kernel], *, seconds: float, file: str) -> Row:
    """Return a row of all kernels of ``TRACED`` steps, which took ``seconds`` in total."""
    took: dict[str, float] = {}
    kinds = dict.fromkeys([*(kind for kind, _ in KINDS), "other"], 0.0)
    for name, start, end in kernels:
        took[name] = took.get(name, 0.0) + end - start
        kinds[kind_of(name)] += (end - start) / 1e6 / seconds
    top = sorted(took, key=lambda name: -took[name])[:TOP]
    shares = [f"{name[:48]} {took[name] / 1e6 / seconds:.0%}" for name in top]
    return Row(str(case), seconds / TRACED, union(kernels) / 1e6 / seconds, kinds, shares, file)


def measure(case: Case, *, folder: Path, device: torch.device) -> dict[str, Any]:
    """In this process, which must be a fresh one: warm up, trace ``TRACED`` steps, write the trace; the row."""
    building.draw_initial_weight = repeat_weight
    model, layout, job = build_model(case.name), Layout.parse(case.layout), case.job
    built = building.build(model=model, layout=layout, job=job, device=device)
    engine = Engine(built, model=model, layout=layout, job=job)
    shape = (layout.micro_batches(job), layout.mbs, job.sequence + 1)
    tokens = torch.randint(model.vocab, shape, generator=torch.Generator().manual_seed(0))
    for _ in range(WARM):
        engine.step(tokens)
        engine.zero_grad()
    on_gpu = device.type == "cuda"
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as traced:
        for _ in range(TRACED):
            engine.step(tokens)
            engine.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
    events = list(traced.events() or [])
    path = folder / f"{'-'.join(str(case).replace('·', ' ').split())}.json"
    _save(traced, path)
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == wanted
        and (not getattr(event, "is_user_annotation", False) if on_gpu else event.name.startswith("aten::"))
    ]
    whole = [(event.time_range.start, event.time_range.end) for event in events]
    seconds = (max(end for _, end in whole) - min(start for start, _ in whole)) / 1e6
    return sum_kernels(case, kernels, seconds=seconds, file=f"{path.name}.gz")._asdict()


def _save(traced: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    traced.export_chrome_trace(str(path))
    with path.open("rb") as whole, gzip.open(f"{path}.gz", "wb") as packed:
        shutil.copyfileobj(whole, packed)
    path.unlink()


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    kinds = [*(kind for kind, _ in KINDS), "other"]
    lines = [
        f"| job | step, s | busy | {' | '.join(kinds)} | longest kernels |",
        f"|---|---|---|{'---|' * len(kinds)}---|",
    ]
    for row in rows:
        shares = " | ".join(f"{row.kinds[kind]:.0%}" for kind in kinds)
        lines.append(f"| {row.case} | {row.seconds:.3f} | {row.busy:.0%} | {shares} | {', '.join(row.top)} |")
    return "\n".join(lines)


def compare(case: Case, *, cases: Sequence[Case], folder: str, small: bool) -> Row:
    """Trace in a process of its own."""
    return Row(**run_apart("tests.gpu.traces", cases.index(case), small=small, more=["--folder", folder]))


def main() -> int:
    """Print the table of all cases, or of those whose names hold all of the words."""
    options = parse_options("traces of steps on a GPU", folder="runs/traces")
    if is_gpu_missing(small=options.small):
        return 2
    cases = TINY if options.small else CASES
    if options.measure is not None:
        print(json.dumps(measure(cases[options.measure], folder=Path(options.folder), device=Process().start())))
        Process.end()
        return 0
    rows = rows_of(
        cases,
        options,
        row=Row,
        compare=partial(compare, cases=cases, folder=options.folder, small=options.small),
        tell=lambda row: f"{row.seconds:.3f} s, {row.busy:.0%} busy",
    )
    print(markdown(rows))
    return LATER if options.left else 0


if __name__ == "__main__":
    sys.exit(main())
