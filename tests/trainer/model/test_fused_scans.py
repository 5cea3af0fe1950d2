"""Scans by flash-linear-attention's kernels, for which recurrences token by token stand in.

``tests/third_party/test_fused_scans.py`` runs the kernels themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.dry_run import dryrun
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.model.mixers.lightning import Lightning
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.stack.spec import FUSED_SCANS
from fivefold.trainer.build import build
from fivefold.trainer.engine import Engine
from fivefold.trainer.model.kernels.choice import check_kernels

Fork = Callable[..., list[Any]]
MODEL = Model(
    name="scans",
    layers=4,
    width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=50,
    vocab=83,
    mixers=FUSED_SCANS,
    gated_delta_net=GatedDeltaNet(key_heads=2, value_heads=4, key_dim=6, value_dim=10),
    kimi_delta=KimiDelta(heads=2, dim=6),
    lightning=Lightning(heads=2, dim=6),
    mamba2=Mamba2(heads=4, head_dim=6, state=6, groups=2, chunk=16),
)
JOB = Job(sequence=70, global_batch=2, precision="fp32", steps=9)
LAYOUT = Layout.parse("dp1 mbs2")


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, use_qk_l2norm_in_kernel: bool
) -> tuple[Tensor, None]:
    """S ← (S − β k (kᵀ S)) e^g + β k vᵀ; o = Sᵀ q / √dim; q and k [B, T, heads, dim], g with or without dims."""
    assert use_qk_l2norm_in_kernel
    repeats = v.shape[2] // k.shape[2]
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(repeats, 2) for x in (q, k))
    decay = (g if g.dim() == 4 else g[..., None]).exp()
    state, outs = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, :, None]
        missing = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * missing[:, :, None]
        outs.append((q[:, t, :, None] @ state)[:, :, 0] * k.shape[3] ** -0.5)
    return torch.stack(outs, 1), None


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, g_gamma: Tensor | None = None, scale: float
) -> tuple[Tensor, None]:
    """S ← S e^g + k vᵀ; o = Sᵀ q · scale; the decay is of each token, or ``g_gamma`` of each head."""
    state, outs = v.new_zeros(*v.shape[::2], k.shape[3], v.shape[3]), []
    for t in range(v.shape[1]):
        decay = g_gamma.expand(v.shape[0], -1) if g is None else g[:, t]  # type: ignore[union-attr]
        state = state * decay.exp()[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append((q[:, t, :, None] @ state)[:, :, 0] * scale)
    return torch.stack(outs, 1), None


KERNELS: dict[str, dict[str, Any]] = {
    "fla": {},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": delta_rule},
    "fla.ops.kda": {"chunk_kda": delta_rule},
    "fla.ops.simple_gla": {"chunk_simple_gla": simple_gla},
}


def train(fused: bool) -> tuple[int, list[Tensor]]:
    """Train a step with the recurrences in place of the kernels.

    Return how many scans are fused, and the loss with the gradient of each parameter.
    """
    job = JOB.replace(fused_scans=fused)
    with patch.dict(sys.modules):
        for name, functions in KERNELS.items():
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__dict__.update(functions)
        built = build(model=MODEL, layout=LAYOUT, job=job, device=torch.device("cpu"))
        engine = Engine(built, model=MODEL, layout=LAYOUT, job=job)
        drawn = torch.Generator().manual_seed(0)
        done = engine.step(torch.randint(MODEL.vocab, (1, 2, JOB.sequence + 1), generator=drawn))
    fused_scans = sum(getattr(module, "fuses_scan", False) for module in built.module.modules())
    return fused_scans, [torch.tensor(done.loss), *(weight.grad for weight in built.module.parameters())]


def test_a_step_with_fused_scans_is_the_step_with_operations(forked: Fork) -> None:
    ((fused_scans, ours),), ((_, theirs),) = (forked(1, train, fused) for fused in (True, False))
    assert fused_scans == len(FUSED_SCANS)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_fused_scans_are_planned_shorter_with_the_same_saved_tensors() -> None:
    """Their launches do not grow with the number of chunks, so that they save more the longer the sequences are."""
    machine, savings = resolve("h100:1", local=Path()), []
    for sequence in (4096, 16384):
        steps = [
            Planner(model=MODEL, machine=machine, job=Job(sequence=sequence, global_batch=1, fused_scans=fused)).step(
                Layout.parse("dp1 mbs1")
            )
            for fused in (True, False)
        ]
        fused, operations = steps
        assert fused.memory.stages[0].activations_bytes == operations.memory.stages[0].activations_bytes
        savings.append(operations.time.step_seconds - fused.time.step_seconds)
    assert savings[1] > savings[0] > 0


def test_fused_scans_are_rejected_where_their_kernels_cannot_run() -> None:
    with pytest.raises(UserError, match="fused_scans=true cannot run: "):
        check_kernels(JOB.replace(fused_scans=True))
    with pytest.raises(UserError, match="leave it out here"):
        dryrun(model=MODEL, machine=resolve("h100:1", local=Path()), layout=LAYOUT, job=JOB.replace(fused_scans=True))
