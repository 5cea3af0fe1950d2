"""The scan of Kimi delta attention against its recurrence, token by token in fp64, with all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.kimi_delta import KimiDelta
from fivefold.planner.counts.operations.mixers.kimi_delta import scan_flops
from fivefold.trainer.model.mixers.kimi_delta import scan
from tests.trainer.model.recurrence import check_recurrence

SEQUENCES, HEADS, DIM = 2, 3, 5
SHAPE = KimiDelta(heads=HEADS, dim=DIM)


def recur(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, tokens: int,
    bound: float | None,
) -> Tensor:  # fmt: skip
    """S ← diag(γ) S; S ← S + β k (v − k S); o = q S, as in arXiv:2510.26692, equation 1."""
    q, k, v, f = (x.view(-1, tokens, HEADS, DIM) for x in (q, k, v, f))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    logits, rates = f + dt_bias.view(HEADS, DIM), a_log.exp()[:, None]
    decay = (-rates * F.softplus(logits) if bound is None else bound * (rates * logits).sigmoid()).exp()
    beta = b.sigmoid().view(-1, tokens, HEADS, 1)
    state, outs = q.new_zeros(len(v), HEADS, DIM, DIM), []
    for t in range(tokens):
        state = state * decay[:, t, :, :, None]
        error = beta[:, t] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, :, :, None] * error[:, :, None]
        outs.append((q[:, t, :, None] @ state)[:, :, 0] * DIM**-0.5)
    return torch.stack(outs, 1).reshape(-1, HEADS * DIM)


def draw(tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator, inner = torch.Generator().manual_seed(tokens), HEADS * DIM
    sizes = [*[(SEQUENCES * tokens, inner)] * 4, (SEQUENCES * tokens, HEADS), (HEADS,), (inner,)]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    grad = torch.randn(SEQUENCES * tokens, inner, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in tensors], grad.to(dtype)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("tokens", [1, 17, 64, 150])  # tokens that are padded, a chunk, and several with a rest
# in fp32 the gradient of a_log is a sum of terms that cancel
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_the_scan_is_the_recurrence(tokens: int, dtype: torch.dtype, error: float, bound: float | None) -> None:
    compare_with_recurrence(tokens, dtype, error, bound)


def compare_with_recurrence(
    tokens: int, dtype: torch.dtype, error: float, bound: float | None, limit: int = GPU_TEMPORARY_BYTES
) -> None:
    (ours, grad), (exact, exact_grad) = draw(tokens, dtype), draw(tokens, torch.float64)
    out = scan(*ours, tokens, SHAPE.replace(lower_bound=bound), temporary_bytes=limit)
    expected = recur(*exact, tokens=tokens, bound=bound)
    check_recurrence((out, ours, grad), (expected, exact, exact_grad), bound=error)


def test_decays_to_zero_have_finite_outputs_and_gradients() -> None:
    """A state that is gone within a token has no logarithm that fits, and no gradient that is not a number."""
    ours, grad = draw(150, torch.float32)
    with torch.no_grad():
        ours[3].fill_(1e6)
    out = scan(*ours, 150, SHAPE)
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out, ours, grad)))


@pytest.mark.parametrize(("chunks", "groups"), [(1, [64] * 4 + [44]), (2, [128] * 2 + [44]), (4, [256, 44])])
def test_groups_of_chunks_compute_the_same(chunks: int, groups: list[int]) -> None:
    limit = chunks * 4 * SEQUENCES * HEADS * 64**2
    assert SHAPE.split_tokens(300, sequences=SEQUENCES, temporary_bytes=limit) == groups
    compare_with_recurrence(300, torch.float64, 1e-11, None, limit)


def test_the_flops_of_a_scan_are_those_of_the_guide() -> None:
    """The worked example of docs/explanation/how-a-step-costs/counts.md: two chunks of 64 tokens, heads of 128 dims."""
    pairs, triangle, through_state = 64 * 63 * 128, 2 * 64**2 * 128, 2 * 64 * 128**2
    within = 2 * (2 * pairs + 3 * triangle)
    forward, backward = scan_flops([128], dim=128)
    assert forward == within + 2 * 64**3 + 5 * through_state == 19_365_888
    assert backward == 3 * within + 10 * 64**3 + (2 * 3 + 3 + 7) * through_state == 61_243_392
    assert scan_flops([64, 64], dim=128) == (13_074_432, 44_195_840)
