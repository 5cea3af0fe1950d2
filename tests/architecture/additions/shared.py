"""What the scripts of the additions share: a small model, a job on one node, the dry run and training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.dry_run import dryrun
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.catalog import resolve
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.model.spec import Model
from fivefold.planner.predict import predict
from fivefold.planner.search import search
from fivefold.results.search_result import SearchResult
from fivefold.results.step_comparison import compare
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine

TINY = build_model("tiny").replace(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256)
NODE = resolve("h100:8", local=Path())
JOB = Job(sequence=64, global_batch=16)
LAYOUT = Layout.parse("dp4 tp2 zero1 mbs1")


def run_command(*words: str) -> str:
    """Run a command in this process; return what it printed."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def search_few(**asked: Any) -> SearchResult:
    """Search the layouts without pipeline and context parallelism."""
    return search(**asked, where=Where.parse("pp=1 cp=1 order=default"))


def check_dry_run(model: Model, job: Job, layout: Layout = LAYOUT, machine: Machine = NODE) -> None:
    """Check that the trainer on fake tensors agrees with the planner in all that is exact."""
    step = dryrun(model=model, machine=machine, layout=layout, job=job).step
    assert step is not None
    predicted = predict(model=model, machine=machine, layout=layout, job=job)
    assert [row for row in compare(predicted, step) if row.is_wrong] == []


def train(model: Model, job: Job) -> list[float]:
    """Train four steps on the same tokens, on one rank in this process; return the losses."""
    layout, job = Layout.parse("dp1 mbs4"), job.replace(sequence=32, global_batch=4, precision=get_recipe("fp32"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine, losses = Engine(built, model=model, layout=layout, job=job), []
    tokens = torch.randint(model.vocab, (1, 4, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        losses.append(engine.step(tokens).loss)
        engine.zero_grad()
    dist.destroy_process_group()
    return losses
