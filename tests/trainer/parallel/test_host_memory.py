"""An optimizer in host memory changes where tensors are, but not a bit of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint.checkpoint import RunProgress, find_latest, load, save
from fivefold.trainer.engine import Engine
from fivefold.trainer.measure.measured_step import list_live_tensors
from fivefold.trainer.measure.meter import Meter
from fivefold.trainer.optimizers import optimizer
from fivefold.trainer.parallel import host_memory
from fivefold.update import LearningRate
from tests.selection import mark_share

DENSE = Model(name="dense", layers=2, width=24, heads=4, kv_heads=2, head_dim=6, ffn=48, vocab=83, tied_embeddings=True)
ROUTED = DENSE.replace(name="routed", tied_embeddings=False, moe=MoE(experts=4, topk=2, ffn=20))
SCALARS = 64  # bytes of the losses and counters that a rank holds
Fork = Callable[..., list[Any]]


class Ran(NamedTuple):
    losses: list[float]
    norms: list[float]
    peak_bytes: int
    host_bytes: int


def make_job(precision: str, kind: str = "adamw") -> Job:
    fields = {"kind": kind, "clip": 0.5}
    rate = LearningRate(kind="constant", peak=1e-2)
    job = Job(sequence=16, global_batch=8, precision=get_recipe(precision), steps=20, learning_rate=rate)
    return job.replace(optimizer=fields)


def train(model: Model, texts: Sequence[str], job: Job, folder: Path | None = None, *, steps: int = 3) -> list[Ran]:
    """Train under one layout after the other; with a ``folder`` each takes up what the one before has saved."""
    results = []
    for text in texts:
        layout = Layout.parse(text)
        built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
        engine, losses, norms, first = Engine(built, model=model, layout=layout, job=job), list[float](), [], 0
        if folder is not None and (path := find_latest(folder)):
            first = load(path, built=built, model=model, job=job).step
        for step in range(first, first + steps):
            tokens = torch.randint(0, 83, (8, 17), generator=torch.Generator().manual_seed(step))
            mine = tokens.view(layout.micro_batches(job), layout.dp, layout.mbs, 17)[:, built.ranks["dp"].rank]
            meter = Meter(
                [mine, engine.loads, *list_live_tensors(built)], axis=built.ranks.axis, on_host=built.host_tensors()
            )
            engine.meter = meter
            with meter:
                result = engine.step(mine)
            losses.append(result.loss)
            norms.append(result.norm)
            engine.zero_grad()
        if folder is not None:
            progress = RunProgress(step=first + steps, samples=0, tokens=0)
            save(folder, built=built, progress=progress, model=model, layout=layout, job=job)
        results.append(Ran(losses, norms, meter.peak_bytes, meter.host_peak_bytes))
    return results


CASES = [
    (DENSE, "dp2 zero1 mbs2", "bf16", "adamw"),
    (DENSE, "dp2 zero3 mbs2 ac=full", "bf16", "adamw"),
    (ROUTED, "dp2 ep2 zero2 mbs2", "fp32", "adamw"),
    (DENSE, "dp2 zero0 mbs2", "bf16-grad16", "adamw"),
    (DENSE, "dp2 zero2 mbs4", "bf16-pure", "adamw"),
    (DENSE, "pp2 mbs2", "bf16", "sgd"),
    (DENSE, "tp2 mbs2", "bf16", "adamw8bit"),
    (ROUTED, "dp2 zero3 mbs2", "fp16", "adamw"),
    (DENSE, "cp2 zero3 mbs2", "fp32", "adamw"),
]


@pytest.mark.parametrize(("model", "text", "precision", "kind"), mark_share(4, CASES))
def test_an_offloaded_optimizer_updates_the_same_bits_and_leaves_the_device_as_planned(
    forked: Fork, model: Model, text: str, precision: str, kind: str
) -> None:
    job = make_job(precision, kind)
    texts = text, f"{text} offload=optimizer"
    ranks = forked(2, train, model, texts, job)
    for stays, offloads in ranks:
        assert offloads[:2] == stays[:2]
        assert stays.host_bytes == 0
    machine = resolve("h100:2", local=Path())
    planned = Planner(model=model, machine=machine, job=job).step(Layout.parse(texts[1])).memory
    assert 2 * max(offloads.host_bytes for _, offloads in ranks) == planned.host_bytes
    assert all(offloads.peak_bytes < stays.peak_bytes for stays, offloads in ranks)


@pytest.mark.long  # its states are those of any optimizer
def test_a_run_is_resumed_with_and_without_its_optimizer_in_host_memory(forked: Fork, tmp_path: Path) -> None:
    job = make_job("bf16")
    legs = "dp2 zero1 mbs2 offload=optimizer", "dp2 zero3 mbs2", "dp2 zero2 mbs2 offload=optimizer"
    plain = [text.removesuffix(" offload=optimizer") for text in legs]
    ours, like = (
        forked(2, partial(train, steps=1), DENSE, texts, job, tmp_path / name)
        for texts, name in ((legs, "a"), (plain, "b"))
    )
    assert [[ran.losses for ran in rank] for rank in ours] == [[ran.losses for ran in rank] for rank in like]


def _update_on_meta_device(text: str, precision: str, kind: str) -> list[str]:
    """Build on the meta device, which stands for a GPU: an operation with tensors of both memories fails."""
    job, layout, device = make_job(precision, kind), Layout.parse(text), torch.device("meta")
    built = build(model=DENSE, layout=layout, job=job, device=device, draw_weights=False)
    optimizer.copy_to_host = lambda tensors: [torch.zeros_like(tensor, device="cpu") for tensor in tensors]  # type: ignore[attr-defined]
    for shard in built.shards:
        shard.gradient = torch.empty_like(shard.weight, device=device)
    optimizer.clip(built.shards, torch.ones((), device=device), largest=1.0)
    optimizer.update(built.optimizer, built.shards)
    for unit in built.units:
        unit.on_optimizer_step()
        unit.begin()
    on_device: list[Tensor] = list_live_tensors(built)
    return [str(tensor.device) for tensor in on_device] + [f"host {tensor.device}" for tensor in built.host_tensors()]


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "sgd"])
@pytest.mark.parametrize(("text", "precision"), [("zero0 mbs1", "bf16"), ("zero0 mbs1", "fp32")])
def test_no_operation_reads_both_memories(forked: Fork, text: str, precision: str, kind: str) -> None:
    (devices,) = forked(1, _update_on_meta_device, f"{text} offload=optimizer", precision, kind)
    assert set(devices) == {"meta", "host cpu"}


def test_what_is_allocated_in_host_memory_is_told_apart_on_cpu() -> None:
    device = torch.device("cpu")
    meter = Meter([], axis=str)
    with meter:
        rows = torch.zeros(10, dtype=torch.bfloat16)
        (on_host,) = host_memory.copy_to_host([torch.ones(10)])
        assert (meter.live_bytes, meter.host_live_bytes) == (20, 40)
        host_memory.copy_to_device(rows, on_host)
        more = host_memory.allocate_on_host((3,), dtype=torch.float32, device=device)
    assert (meter.live_bytes, meter.host_live_bytes, meter.host_peak_bytes) == (20, 52, 60)
    assert not host_memory.is_host_memory()
    assert more.is_cpu
    assert rows.tolist() == [1.0] * 10
