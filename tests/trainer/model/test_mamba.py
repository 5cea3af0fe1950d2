"""The core of a Mamba against its recurrence, token by token in fp64, with the gradients of all its inputs."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.mamba import Mamba
from fivefold.planner.counts.operations.mixers.mamba import scan_flops
from fivefold.trainer.model.mixers.mamba import core
from tests.trainer.model.recurrence import check_recurrence

SEQUENCES, EPSILON = 2, 1e-2
SHAPE = Mamba(inner=10, state=6, rank=3, taps=3)


def recur(
    xz: Tensor, weight: Tensor, bias: Tensor, select: Tensor, step: Tensor, step_bias: Tensor, a_log: Tensor, d: Tensor,
    *norms: Tensor, shape: Mamba, tokens: int,
) -> Tensor:  # fmt: skip
    """S ← exp(−e^a_log Δ) S + Δ B x; y = C · S + d x, as in arXiv:2312.00752, algorithm 2."""
    x, z = xz.view(SEQUENCES, tokens, -1).chunk(2, dim=-1)
    padded = F.pad(x.transpose(1, 2), (shape.taps - 1, 0))
    x = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    parts = list((x @ select.T).split(shape.selected_widths, dim=-1))
    if shape.norms != "none":
        parts = [part * (part.square().mean(-1, keepdim=True) + EPSILON).rsqrt() for part in parts]
    if shape.norms == "weighted":
        parts = [part * norm for part, norm in zip(parts, norms, strict=True)]
    dt, b, c = parts
    delta = F.softplus(dt @ step.T + step_bias)
    state, outs = x.new_zeros(SEQUENCES, shape.inner, shape.state), []
    for t in range(tokens):
        decay = torch.exp(-a_log.exp() * delta[:, t, :, None])
        state = decay * state + (delta[:, t] * x[:, t])[..., None] * b[:, t, None]
        outs.append((state @ c[:, t, :, None])[..., 0] + d * x[:, t])
    return (torch.stack(outs, 1) * F.silu(z)).flatten(0, 1)


def draw(tokens: int, norms: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    inner, rank, state = SHAPE.inner, SHAPE.rank, SHAPE.state
    sizes = [(SEQUENCES * tokens, 2 * inner), (inner, SHAPE.taps), (inner,), (rank + 2 * state, inner)]
    sizes += [(inner, rank), (inner,), (inner, state), (inner,)]
    sizes += [(rank,), (state,), (state,)] if norms == "weighted" else []
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    grad = torch.randn(SEQUENCES * tokens, inner, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in tensors], grad.to(dtype)


@pytest.mark.parametrize("norms", ["none", "unit", "weighted"])
@pytest.mark.parametrize("tokens", [1, 16, 37])  # within a chunk, one, and several with a rest
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_the_core_is_the_recurrence(
    norms: Literal["none", "unit", "weighted"], tokens: int, dtype: torch.dtype, bound: float
) -> None:
    compare_with_recurrence(norms, tokens, dtype, bound)


def compare_with_recurrence(
    norms: Literal["none", "unit", "weighted"],
    tokens: int,
    dtype: torch.dtype,
    bound: float,
    limit: int = GPU_TEMPORARY_BYTES,
) -> None:
    shape = SHAPE.replace(norms=norms)
    (ours, grad), (exact, exact_grad) = draw(tokens, norms, dtype), draw(tokens, norms, torch.float64)
    out = core(*ours, *[None] * (3 * (norms != "weighted")), shape, tokens, EPSILON, temporary_bytes=limit)
    expected = recur(*exact, shape=shape, tokens=tokens)
    check_recurrence((out, ours, grad), (expected, exact, exact_grad), bound=bound)


@pytest.mark.parametrize(("chunks", "groups"), [(1, [16] * 6 + [11]), (2, [32] * 3 + [11]), (4, [64, 32, 11])])
def test_groups_of_chunks_compute_the_same(chunks: int, groups: list[int]) -> None:
    limit = chunks * 4 * SEQUENCES * 16 * SHAPE.inner * SHAPE.state
    assert SHAPE.split_tokens(107, sequences=SEQUENCES, temporary_bytes=limit) == groups
    compare_with_recurrence("none", 107, torch.float64, 1e-11, limit)


def test_the_flops_of_a_core_are_those_of_the_guide() -> None:
    """The worked example of docs/explanation/how-a-step-costs/counts.md: a layer of Jamba."""
    forward, backward = scan_flops(Mamba(inner=8192, rank=256))
    assert forward == 2 * 8192 * (256 + 16 + 16) + 2 * 256 * 8192 == 8_912_896
    assert backward == 2 * forward + 2 * 256 * 8192 == 22_020_096
