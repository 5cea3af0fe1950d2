"""The core of a Mamba-2 against its recurrence, token by token in fp64, with the gradients of all its inputs."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.planner.counts.operations.mixers.mamba2 import scan_flops
from fivefold.trainer.model.mixers.mamba2 import core
from tests.trainer.model.recurrence import check_recurrence

SEQUENCES, EPSILON = 2, 1e-5
SHAPE = Mamba2(heads=4, head_dim=5, state=6, groups=2, taps=3, chunk=16, min_step=0.2, max_step=1.5)


def recur(
    projected: Tensor, weight: Tensor, bias: Tensor, a_log: Tensor, dt_bias: Tensor, d: Tensor, norm: Tensor,
    shape: Mamba2, tokens: int,
) -> Tensor:  # fmt: skip
    """S ← exp(−e^a_log Δ) S + Δ B xᵀ; o = Sᵀ C + d x, as in arXiv:2405.21060, equation 1."""
    inner, each = shape.inner_width, shape.groups * shape.state
    z, xbc, dt = projected.view(SEQUENCES, tokens, -1).split((inner, shape.conv_width, shape.heads), dim=-1)
    padded = F.pad(xbc.transpose(1, 2), (shape.taps - 1, 0))
    xbc = F.silu(F.conv1d(padded, weight[:, None], bias, groups=len(weight))).transpose(1, 2)
    x, b, c = xbc.split((inner, each, each), dim=-1)
    x = x.unflatten(-1, (shape.heads, -1))
    b, c = (part.unflatten(-1, (shape.groups, -1)).repeat_interleave(shape.heads // shape.groups, 2) for part in (b, c))
    step = F.softplus(dt + dt_bias).clamp(shape.min_step, shape.max_step)
    state, outs = x.new_zeros(SEQUENCES, shape.heads, shape.state, shape.head_dim), []
    for t in range(tokens):
        state = state * torch.exp(-a_log.exp() * step[:, t])[..., None, None]
        state = state + (b[:, t] * step[:, t, :, None])[..., None] * x[:, t, :, None]
        outs.append((c[:, t, :, None] @ state)[:, :, 0] + d[:, None] * x[:, t])
    o, gates = torch.stack(outs, 1).flatten(2), F.silu(z)
    if shape.norm == "none":
        return (o * gates).flatten(0, 1)
    normed = o if shape.norm == "before_gate" else o * gates
    groups = normed.unflatten(-1, (shape.groups, -1))
    y = (groups * (groups.square().mean(-1, keepdim=True) + EPSILON).rsqrt()).flatten(2) * norm
    return (y * gates if shape.norm == "before_gate" else y).flatten(0, 1)


def draw(tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    sizes = [(SEQUENCES * tokens, SHAPE.projected_width), (SHAPE.conv_width, SHAPE.taps), (SHAPE.conv_width,)]
    sizes += [(SHAPE.heads,)] * 3 + [(SHAPE.inner_width,)]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    grad = torch.randn(SEQUENCES * tokens, SHAPE.inner_width, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in tensors], grad.to(dtype)


@pytest.mark.parametrize("norm", ["after_gate", "before_gate", "none"])
@pytest.mark.parametrize("tokens", [1, 16, 37])  # within a chunk, one, and several with a rest
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_the_core_is_the_recurrence(
    norm: Literal["after_gate", "before_gate", "none"], tokens: int, dtype: torch.dtype, bound: float
) -> None:
    compare_with_recurrence(norm, tokens, dtype, bound)


def compare_with_recurrence(
    norm: Literal["after_gate", "before_gate", "none"],
    tokens: int,
    dtype: torch.dtype,
    bound: float,
    limit: int = GPU_TEMPORARY_BYTES,
) -> None:
    shape = SHAPE.replace(norm=norm)
    (ours, grad), (exact, exact_grad) = draw(tokens, dtype), draw(tokens, torch.float64)
    if norm == "none":
        ours, exact = ours[:-1], exact[:-1]
    out = core(*ours, *[None] * (norm == "none"), shape, tokens, EPSILON, temporary_bytes=limit)
    expected = recur(*exact, *[torch.empty(0)] * (norm == "none"), shape, tokens)
    check_recurrence((out, ours, grad), (expected, exact, exact_grad), bound=bound)


@pytest.mark.parametrize(("chunks", "groups"), [(1, [16] * 6 + [11]), (2, [32] * 3 + [11]), (4, [64, 32, 11])])
def test_groups_of_chunks_compute_the_same(chunks: int, groups: list[int]) -> None:
    limit = chunks * 4 * SEQUENCES * SHAPE.heads * SHAPE.chunk**2
    assert SHAPE.split_tokens(107, sequences=SEQUENCES, temporary_bytes=limit) == groups
    compare_with_recurrence("after_gate", 107, torch.float64, 1e-11, limit)


def test_the_flops_of_a_scan_are_those_of_the_guide() -> None:
    """The worked example of docs/explanation/how-a-step-costs/counts.md: two chunks of 256 tokens, in one group."""
    net = Mamba2(heads=128, head_dim=64, state=128, groups=1)
    forward, backward = scan_flops([512], net)
    through_state, handed_on = 2 * 512 * 128 * 8192, 2 * 2**2 * 128 * 8192
    assert forward == 2 * 2 * 256**2 * (128 + 8192) + 2 * through_state + handed_on == 4_336_910_336
    assert backward == 3 * forward == 13_010_731_008
