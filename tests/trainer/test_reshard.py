"""A run that changes its layout at every checkpoint is the run of one process, and loses not a bit on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.job import Job, LearningRate, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.trainer.build import Built, build
from fivefold.trainer.checkpoint.checkpoint import RunProgress, find_latest, load, save
from fivefold.trainer.checkpoint.full_weights import gather_full
from fivefold.trainer.engine import Engine
from tests.selection import mark_share

MODEL = Model(
    name="odd",
    layers=3,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=48,
    vocab=83,
    tied_embeddings=True,
    moe=MoE(experts=4, topk=2, ffn=20, shared_experts=1, dense_layers=1, score="sigmoid", balance="free"),
)
JOB = Job(sequence=16, global_batch=4, precision=get_recipe("fp32"), steps=20, learning_rate=LearningRate(peak=1e-2))
CHAIN = [
    "dp2 zero3 mbs1 ep2",
    "tp2 mbs2",
    "dp2 tp2 etp2 ep2 zero1 mbs1",
    "pp2 dualpipe mbs1",
    "cp2 ep2 zero2 mbs2",
    "mbs4",
]
Bits = dict[str, list[Tensor]]
Fork = Callable[..., list[Any]]


def bits(built: Built) -> Bits:
    """Return the full weights and moments, on the first rank."""
    result: Bits = {}
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        rows = [
            s.weight if kind == "weight" else built.optimizer.state[s.weight][kind] if s.rows else s.weight
            for s in built.shards
        ]
        for name, whole in gather_full(built, rows).items():
            result.setdefault(name, []).append(whole)
    return result


def leg(directory: Path, layout: Layout, first: int, steps: int = 1) -> tuple[Bits, Bits, list[float], list[Tensor]]:
    """Take up what is there, train some steps, save: the bits that were found and those that were left."""
    built = build(model=MODEL, layout=layout, job=JOB, device=torch.device("cpu"))
    result: Bits = {}
    if path := find_latest(directory):
        assert load(path, built=built, model=MODEL, job=JOB).step == first
        result = bits(built)
    engine, losses = Engine(built, model=MODEL, layout=layout, job=JOB), []
    for step in range(first, first + steps):
        tokens = torch.randint(0, MODEL.vocab, (4, 17), generator=torch.Generator().manual_seed(step))
        micro = layout.micro_batches(JOB)
        losses.append(engine.step(tokens.view(micro, layout.dp, layout.mbs, 17)[:, built.ranks["dp"].rank]).loss)
        engine.zero_grad()
    progress = RunProgress(step=first + steps, samples=0, tokens=0)
    save(directory, built=built, progress=progress, model=MODEL, layout=layout, job=JOB)
    biases = [built.module.blocks[layer].get_submodule("moe").get_buffer("bias") for layer in (1, 2)]
    return result, bits(built), losses, biases


@pytest.mark.parametrize(
    "chain", mark_share(4, [CHAIN[:2], CHAIN[::2], CHAIN, CHAIN[::-1]]), ids=["two", "half", "forwards", "backwards"]
)
def test_every_layout_resumes_from_any_other(forked: Fork, tmp_path: Path, chain: list[str]) -> None:
    changing = list[float]()
    left: Bits = {}
    for number, text in enumerate(chain):
        layout = Layout.parse(text)
        result, now, losses, _ = forked(layout.world, leg, tmp_path / "changing", layout, number)[0]
        assert result.keys() == left.keys()
        assert all(torch.equal(a, b) for name in left for a, b in zip(left[name], result[name], strict=True))
        left = now
        changing += losses
    *_, alone, biases = forked(1, leg, tmp_path / "alone", Layout.parse("mbs4"), 0, len(chain))[0]
    assert changing == pytest.approx(alone, rel=2e-5)
    assert any(bias.any() for bias in biases)
