"""The scan of lightning attention against its recurrence, token by token in fp64, with the gradients of its input."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.lightning import Lightning
from fivefold.planner.counts.operations.mixers.lightning import scan_flops
from fivefold.trainer.model.mixers.lightning import scan
from tests.trainer.model.recurrence import check_recurrence

SEQUENCES, SHAPE = 2, Lightning(heads=3, dim=4, chunk=16)
RATES = SHAPE.list_decay_rates(1, layers=4)


def recur(qkv: Tensor, *, tokens: int) -> Tensor:
    """S ← γ S + k vᵀ and o = Sᵀ q, as in arXiv:2501.08313, equation 7."""
    q, k, v = qkv.view(SEQUENCES, tokens, SHAPE.heads, 3, SHAPE.dim).unbind(3)
    decay = torch.exp(-torch.tensor(RATES, dtype=qkv.dtype))[:, None, None]
    state, outs = torch.zeros((), dtype=qkv.dtype), []
    for t in range(tokens):
        state = decay * state + k[:, t, :, :, None] * v[:, t, :, None]
        outs.append((q[:, t, :, None] @ state).flatten(1))
    return torch.stack(outs, 1).flatten(0, 1)


@pytest.mark.parametrize("tokens", [1, 11, 16, 50])  # within a chunk, one, and several with a rest
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_the_scan_is_the_recurrence(tokens: int, dtype: torch.dtype, bound: float) -> None:
    compare_with_recurrence(tokens, dtype, bound)


def compare_with_recurrence(tokens: int, dtype: torch.dtype, bound: float, limit: int = GPU_TEMPORARY_BYTES) -> None:
    generator = torch.Generator().manual_seed(tokens)
    exact = torch.randn(SEQUENCES * tokens, 3 * SHAPE.inner_width, generator=generator, dtype=torch.float64)
    exact_grad = torch.randn(SEQUENCES * tokens, SHAPE.inner_width, generator=generator, dtype=torch.float64)
    ours, exact = exact.to(dtype).requires_grad_(), exact.requires_grad_()
    out, expected = scan(ours, RATES, tokens, SHAPE, temporary_bytes=limit), recur(exact, tokens=tokens)
    check_recurrence((out, [ours], exact_grad.to(dtype)), (expected, [exact], exact_grad), bound=bound)


def test_decay_rates_decrease_with_head_and_layer_index() -> None:
    rates = [SHAPE.list_decay_rates(layer, layers=4) for layer in range(4)]
    assert [pytest.approx(rate) for rate in rates[0]] == [(1 + 1e-5) * 2 ** (-8 * head / 3) for head in (1, 2, 3)]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize(("chunks", "groups"), [(1, [16] * 6 + [11]), (2, [32] * 3 + [11]), (4, [64, 32, 11])])
def test_groups_of_chunks_compute_the_same(chunks: int, groups: list[int]) -> None:
    limit = chunks * 4 * SEQUENCES * SHAPE.heads * SHAPE.chunk**2
    assert SHAPE.split_tokens(107, sequences=SEQUENCES, temporary_bytes=limit) == groups
    compare_with_recurrence(107, torch.float64, 1e-11, limit)


def test_lightning_flops_of_two_chunks_equal_the_sum_of_their_products() -> None:
    """Pairs of tokens, then the state, made and read by both; the states between them have no gradient of decays."""
    pairs, state, handed_on = 4 * 16 * 16 * 4, 2 * 2 * 16 * 4 * 4, 2 * 2**2 * 4 * 4
    products = 2 * pairs + 2 * state
    assert scan_flops([32], dim=4, size=16) == (products + handed_on, 3 * products + 2 * handed_on)
    one = pairs + state // 2  # in two groups: made in the first chunk, read in the second; made again
    assert scan_flops([16, 16], dim=4, size=16) == (2 * one, 6 * one + state // 2)
