"""Measure time and memory of a dry run: each job in its own process on the current machine.

python benchmarks/speed/dry_run.py        llama3-8b on 8 ranks, 70b on 512, 405b on 16,384, deepseek-v3 on 2,048
"""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import time

import torch

JOBS = (
    ("llama3-8b", "h100:8", "dp8 zero3 mbs1", 8192, 16, 8),
    ("llama3-70b", "h100:512", "tp8 dp64 zero3 mbs1", 8192, 128, 20),
    ("llama3-405b", "h100:16384", "tp8 pp16 dp128 zero1 mbs1", 8192, 2048, 60),
    ("deepseek-v3", "h800:2048", "dp128 pp16 ep64 zero1 dualpipe mbs1", 4096, 15360, 120),
)


def measure_dry_run(model: str, machine: str, layout: str, sequence: str, batch: str) -> None:
    """Run one dry run, and print what it took."""
    from fivefold.dry_run import dryrun
    from fivefold.job import Job, get_recipe
    from fivefold.layout.spec import Layout
    from fivefold.machine.catalog import resolve as machine_named
    from fivefold.model.catalog import build_model

    job = Job(sequence=int(sequence), global_batch=int(batch), precision=get_recipe("bf16"))
    begin, busy = time.perf_counter(), time.process_time()
    dry_run = dryrun(
        model=build_model(model), machine=machine_named(machine, local=None), layout=Layout.parse(layout), job=job
    )
    assert dry_run.step is not None, dry_run.findings
    usage, workers = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    busy = time.process_time() - busy + workers.ru_utime + workers.ru_stime
    held = (usage.ru_maxrss + workers.ru_maxrss) / 2**20  # with the largest worker
    print(f"{time.perf_counter() - begin:.1f} | {busy:.1f} | {held:.2f} | {dry_run.step.memory.peak_bytes / 2**30:.2f}")


def main() -> None:
    """Print a table in Markdown."""
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, Python {platform.python_version()}\n"
    )
    print("| job | seconds | CPU seconds | GiB held | limit, s | peak of a rank, GiB |\n|---|---|---|---|---|---|")
    for model, machine, layout, sequence, batch, limit in JOBS:
        command = [sys.executable, __file__, model, machine, layout, str(sequence), str(batch)]
        took = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split(" | ")
        seconds, busy, held, peak = took
        name = f"`{model} {machine} '{layout}'` seq {sequence} gbs {batch}"
        print(f"| {name} | {seconds} | {busy} | {held} | {limit} | {peak} |", flush=True)


if __name__ == "__main__":
    measure_dry_run(*sys.argv[1:]) if len(sys.argv) > 1 else main()
