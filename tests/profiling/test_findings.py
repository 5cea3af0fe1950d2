"""What is planted in a run is named: a rank that sleeps, a slow message, a stalled loader, a stage that is too slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.profiling.attribution import RankBreakdown, rank_times, split, summarize_rank
from fivefold.profiling.findings import list_findings
from fivefold.results.spans import RankTrace
from fivefold.step import Time
from fivefold.trainer.build import build
from fivefold.trainer.data.prepare import prepare
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.logs.run_log import NoLogs
from fivefold.trainer.loop import Loop
from fivefold.trainer.run import Run

MODEL = Model(name="small", layers=2, width=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=256)
PAUSE = 0.06  # seconds
USUAL = PAUSE / 4  # of a message, on a computer that does other work
READING = 0.3  # of a batch, which is read during the step before
PLANNED = Time(step_seconds=1.0, compute_seconds=1.0)  # without a bubble


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").mkdir()
    for number in range(20):
        (folder / "text" / f"{number}.txt").write_text(f"document {number}: " + "no play. " * 60)
    prepare(str(folder / "text"), directory=folder / "data", holdout=0.2)
    job = Job(sequence=16, global_batch=4, steps=5, precision=get_recipe("fp32"))
    return Run(folder=folder, job=job, evaluate_sequences=4)


def trace_run(run: Run, text: str, folder: Path, plant: Callable[[Loop], None] | None) -> RankTrace:
    layout = Layout.parse(text)
    built = build(model=MODEL, layout=layout, job=run.job, device=torch.device("cpu"))
    shards = Shards.open(run.folder / "data")
    run = run.replace(folder=folder)
    loop = Loop(run, model=MODEL, layout=layout, built=built, shards=shards, logs=NoLogs(), ideal_seconds=1.0)
    if plant is not None:
        plant(loop)
    return loop.train().trace


def sleeps(module: nn.Module) -> None:
    """Make its forward sleep."""
    module.register_forward_pre_hook(lambda *_: time.sleep(PAUSE))


def slow_down_rank(loop: Loop) -> None:
    if loop.built.ranks.rank == 1:
        sleeps(loop.built.module.blocks[0].get_submodule("norm1"))


def slow_down_stage(loop: Loop) -> None:
    if loop.built.ranks.rank == 1:
        sleeps(loop.built.module.blocks[1].get_submodule("norm2"))


def slow_down_loader(loop: Loop) -> None:
    inner = loop.prefetcher.read

    def read(position: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        time.sleep(READING)
        return inner(position)

    loop.prefetcher.read = read


class Slow:
    """A message that takes ``PAUSE`` longer."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def is_completed(self) -> bool:
        return False

    def wait(self) -> bool:
        time.sleep(PAUSE)
        return self.work.wait()


def slow_down_link(loop: Loop) -> None:
    inner = dist.all_reduce

    def all_reduce(x: torch.Tensor, **options: Any) -> Any:
        work = inner(x, **options)
        return Slow(work) if work is not None and x.numel() > 1000 else work

    dist.all_reduce = all_reduce


def train_with_fault(
    forked: Any, run: Run, text: str, folder: Path, plant: Callable[[Loop], None]
) -> tuple[str, list[RankBreakdown]]:
    result = forked(2, trace_run, run, text, folder, plant)
    times = rank_times([summarize_rank(trace) for trace in result])
    (line,) = list_findings(times, predicted=PLANNED, expected=lambda message: USUAL)
    return line, times


def test_a_rank_that_is_slow_in_its_forward_is_reported(forked: Any, run: Run, tmp_path: Path) -> None:
    line, times = train_with_fault(forked, run, "dp2 mbs2", tmp_path, slow_down_rank)
    assert line.startswith("straggler: rank 1 works ")
    assert line.endswith("most is in norm1 forward of F")
    assert times[0].bubble > 0.8 * PAUSE
    assert times[1].bubble < 0.5 * PAUSE
    assert split(times, step_seconds=1.0).bubble_seconds * times[1].step < 0.5 * PAUSE  # of the rank that waits least


def test_a_slow_pipeline_stage_is_reported(forked: Any, run: Run, tmp_path: Path) -> None:
    line, _ = train_with_fault(forked, run, "pp2 mbs1", tmp_path, slow_down_stage)
    assert line.startswith("bubble: rank 0 waits ")
    assert "planned 0.0 µs: stage 1 works" in line
    assert line.endswith("most of it is in norm2 forward of F; give it fewer layers")


def test_a_slow_data_loader_is_reported(forked: Any, run: Run, tmp_path: Path) -> None:
    line, times = train_with_fault(forked, run, "dp2 mbs2", tmp_path, slow_down_loader)
    assert line.startswith("stalled loader: rank ")
    assert line.endswith(" of each step for its batch, 1 more ranks likewise")
    assert split(times, step_seconds=times[0].step).data_seconds > 0.3 * READING


def test_a_slow_message_is_reported(forked: Any, run: Run, tmp_path: Path) -> None:
    line, times = train_with_fault(forked, run, "dp2 mbs2", tmp_path, slow_down_link)
    assert line.startswith("slow link: dp all_reduce of ")
    assert "among ranks 0, 1 travels" in line
    assert "the machine takes 15.0 ms; it costs" in line
    assert split(times, step_seconds=times[0].step).exposed_seconds["dp"] > 0.8 * PAUSE
