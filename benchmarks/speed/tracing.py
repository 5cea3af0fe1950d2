"""Measure the cost of tracing: traced and untraced steps of one run alternate, each compared with its neighbours.

    python benchmarks/speed/tracing.py --layout 'dp2 zero3 mbs2' --model tiny --steps 120

The model of the demo on this machine's cores, one thread per process. Prints the median of the ratios and its standard
error (of a median, by the quartiles).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.trainer.build import build
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.loop import STEPS_BEFORE_METERING, Loop
from fivefold.trainer.run import Run


def ratios(untraced: Sequence[float], traced: Sequence[float]) -> list[float]:
    """Return each traced step over the mean of the untraced one before it and the one after it."""
    return [step / statistics.mean(pair) for step, pair in zip(traced, pairwise(untraced), strict=False)]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--layout", default="dp2 zero3 mbs2")
    parser.add_argument("--steps", type=int, default=120)
    asked = parser.parse_args()
    layout = Layout.parse(asked.layout)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(sequence=256, global_batch=8, steps=asked.steps, precision=get_recipe("bf16"))
        run = Run(
            model=asked.model,
            folder=Path(folder),
            job=job,
            evaluate_sequences=2 * layout.dp * layout.mbs,
            evaluate_every=10**6,
            trace_steps=asked.steps,
            sample="",
        )
        (run.folder / "text").mkdir()
        for number in range(40):
            (run.folder / "text" / f"{number}.txt").write_text(f"document {number}: " + "all work, no play. " * 300)
        prepare(str(run.folder / "text"), directory=run.folder / "data", holdout=0.2)
        context = multiprocessing.get_context("fork")
        answers: Any = context.Queue()
        workers = [context.Process(target=_rank, args=(rank, run, layout, answers)) for rank in range(layout.world)]
        for worker in workers:
            worker.start()
        untraced, traced, marks = min(answers.get(timeout=600) for _ in workers)[1:]
        for worker in workers:
            worker.join()
    slowdowns = ratios(untraced, traced)
    low, _, high = statistics.quantiles(slowdowns, n=4)
    error = 1.2533 * (high - low) / 1.349 / len(slowdowns) ** 0.5
    usual = 1e3 * statistics.median(untraced)
    print(
        f"{asked.layout}: {len(slowdowns)} traced steps of {usual:.1f} ms, {marks} spans each: "
        f"{statistics.median(slowdowns) - 1:+.2%} ± {error:.2%}"
    )


def _rank(rank: int, run: Run, layout: Layout, answers: Any) -> None:
    """Train one rank, and answer with its seconds, those of each step, and the number of spans."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(run.folder / "store"), layout.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world)
    model = resolve(run.model)
    built = build(model=model, layout=layout, job=run.job, device=torch.device("cpu"))
    shards = Shards.open(run.folder / "data")
    loop = Loop(run, model=model, layout=layout, built=built, shards=shards, logs=NoLogs(), ideal_seconds=1.0)
    outcome = loop.train()
    assert outcome.step > STEPS_BEFORE_METERING
    answers.put((rank, loop.seconds, [step.seconds for step in outcome.trace.steps], len(outcome.trace.steps[0].spans)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
