"""The scan of a Gated DeltaNet against its recurrence, token by token in fp64, with the gradients of all its inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.gated_delta_net import GatedDeltaNet
from fivefold.planner.counts.operations.mixers.gated_delta_net import scan_flops
from fivefold.trainer.model.mixers.gated_delta_net import scan
from tests.trainer.model.recurrence import check_recurrence

SEQUENCES, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 6, 5
SHAPE = GatedDeltaNet(key_heads=KEY_HEADS, value_heads=VALUE_HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)


def recur(
    q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, tokens: int, *, doubles: bool
) -> Tensor:
    """S ← γ S; S ← S + β k (v − S k)ᵀ; o = q S, as in arXiv:2412.06464, equation 10."""
    repeats = VALUE_HEADS // KEY_HEADS
    q, k = (x.view(-1, tokens, KEY_HEADS, KEY_DIM) for x in (q, k))
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 2) for x in (q, k))
    v, beta = v.view(-1, tokens, VALUE_HEADS, VALUE_DIM), b.sigmoid().view(-1, tokens, VALUE_HEADS, 1)
    beta = 2 * beta if doubles else beta
    decay = torch.exp(-a_log.exp() * torch.nn.functional.softplus(a + dt_bias)).view(-1, tokens, VALUE_HEADS, 1)
    state, outs = q.new_zeros(len(v), VALUE_HEADS, KEY_DIM, VALUE_DIM), []
    for t in range(tokens):
        state = state * decay[:, t, :, None]
        error = beta[:, t] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * error[:, :, None]
        outs.append((q[:, t, :, None] @ state)[:, :, 0] * KEY_DIM**-0.5)
    return torch.stack(outs, 1).reshape(-1, VALUE_HEADS * VALUE_DIM)


def draw(tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    sizes = (keys, keys, values, VALUE_HEADS, VALUE_HEADS)
    rows = [torch.randn(SEQUENCES * tokens, size, generator=generator, dtype=torch.float64) for size in sizes]
    factors = [torch.randn(VALUE_HEADS, generator=generator, dtype=torch.float64) for _ in range(2)]
    grad = torch.randn(SEQUENCES * tokens, values, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (*rows, *factors)], grad.to(dtype)


@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 64, 150])  # within a chunk, one, and several with a rest
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_the_scan_is_the_recurrence(tokens: int, dtype: torch.dtype, bound: float, doubles: bool) -> None:
    compare_with_recurrence(tokens, dtype, bound, doubles)


def compare_with_recurrence(
    tokens: int, dtype: torch.dtype, bound: float, doubles: bool, limit: int = GPU_TEMPORARY_BYTES
) -> None:
    (ours, grad), (exact, exact_grad) = draw(tokens, dtype), draw(tokens, torch.float64)
    out = scan(*ours, tokens, SHAPE.replace(negative_eigenvalues=doubles), temporary_bytes=limit)
    expected = recur(*exact, tokens, doubles=doubles)
    check_recurrence((out, ours, grad), (expected, exact, exact_grad), bound=bound)


@pytest.mark.parametrize(("chunks", "groups"), [(1, [64] * 4 + [44]), (2, [128] * 2 + [44]), (4, [256, 44])])
def test_groups_of_chunks_compute_the_same(chunks: int, groups: list[int]) -> None:
    limit = chunks * 4 * SEQUENCES * VALUE_HEADS * 64**2
    assert SHAPE.split_tokens(300, sequences=SEQUENCES, temporary_bytes=limit) == groups
    compare_with_recurrence(300, torch.float64, 1e-11, doubles=False, limit=limit)


def test_the_flops_of_a_scan_are_those_of_the_guide() -> None:
    """The worked example of docs/explanation/how-a-step-costs/counts.md: two chunks of 64 tokens, heads of 128 dims."""
    pairs, read, through_state = 4 * 64**2 * 256, 2 * 64**2 * 128, 2 * 64 * 128 * 128
    forward, backward = scan_flops([128], key_dim=128, value_dim=128)
    assert forward == 2 * (pairs + read + 64**3) + 5 * through_state == 21_495_808
    assert backward == 3 * 2 * (pairs + read) + 10 * 64**3 + (2 * 3 + 3 + 7) * through_state == 67_633_152
    assert scan_flops([64, 64], key_dim=128, value_dim=128) == (15_204_352, 51_118_080)
