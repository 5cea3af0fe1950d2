"""The core of an RG-LRU against its recurrence, token by token in fp64, with the gradients of all its inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.model.mixers.rg_lru import RGLRU, split_tokens
from fivefold.planner.counts.operations.mixers.rg_lru import count_gate_flops
from fivefold.trainer.model.kernels.activations import FUNCTIONS
from fivefold.trainer.model.mixers.rg_lru import core
from tests.trainer.model.recurrence import check_recurrence

SEQUENCES, BLOCKS, WIDTH, TAPS = 2, 3, 4, 3


def recur(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, input_weight: Tensor, input_bias: Tensor, rate_weight: Tensor,
    rate_bias: Tensor, rate: Tensor, *, tokens: int,
) -> Tensor:  # fmt: skip
    """S ← a S + √(1 − a²) i x with ln a = −8 r softplus(rate), as in arXiv:2402.19427, equations 1 to 4."""
    padded = F.pad(x.view(SEQUENCES, tokens, -1).transpose(1, 2), (TAPS - 1, 0))
    x = F.conv1d(padded, weight[:, None], bias, groups=len(weight)).transpose(1, 2)
    blocks = x.unflatten(-1, (BLOCKS, WIDTH))
    input_gate, rate_gate = (
        (torch.einsum("btni,nio->btno", blocks, gate) + offset).flatten(2).sigmoid()
        for gate, offset in ((input_weight, input_bias), (rate_weight, rate_bias))
    )
    decay = torch.exp(-8 * rate_gate * F.softplus(rate))
    states = [input_gate[:, 0] * x[:, 0]]
    for t in range(1, tokens):
        states.append(decay[:, t] * states[-1] + (1 - decay[:, t].square()).sqrt() * input_gate[:, t] * x[:, t])
    return torch.stack(states, 1).flatten(0, 1) * F.gelu(y, approximate="tanh")


def draw(tokens: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator, inner = torch.Generator().manual_seed(tokens), BLOCKS * WIDTH
    gate = [(BLOCKS, WIDTH, WIDTH), (BLOCKS, WIDTH)]
    sizes = [(SEQUENCES * tokens, inner)] * 2 + [(inner, TAPS), (inner,), *gate, *gate, (inner,)]
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    grad = torch.randn(SEQUENCES * tokens, inner, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in tensors], grad.to(dtype)


@pytest.mark.parametrize("tokens", [1, 17, 64, 150])  # within a chunk, one, and several with a rest
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_the_core_is_the_recurrence(tokens: int, dtype: torch.dtype, bound: float) -> None:
    compare_with_recurrence(tokens, dtype, bound)


def compare_with_recurrence(tokens: int, dtype: torch.dtype, bound: float, limit: int = GPU_TEMPORARY_BYTES) -> None:
    (ours, grad), (exact, exact_grad) = draw(tokens, dtype), draw(tokens, torch.float64)
    out = core(*ours, tokens, FUNCTIONS["gelu_tanh"], temporary_bytes=limit)
    expected = recur(*exact, tokens=tokens)
    check_recurrence((out, ours, grad), (expected, exact, exact_grad), bound=bound)


@pytest.mark.parametrize(("chunks", "groups"), [(1, [64, 64, 22]), (2, [128, 22])])
def test_groups_of_chunks_compute_the_same(chunks: int, groups: list[int]) -> None:
    channels = BLOCKS * WIDTH
    limit = chunks * 4 * SEQUENCES * 64 * channels
    assert split_tokens(150, sequences=SEQUENCES, channels=channels, temporary_bytes=limit) == groups
    compare_with_recurrence(150, torch.float64, 1e-11, limit)


def test_decays_of_one_have_finite_gradients() -> None:
    """The derivative of √(1 − a²) has no bound; as in transformers, its gradient is held to 1,000."""
    ours, grad = draw(5, torch.float32)
    with torch.no_grad():
        ours[-1].fill_(-1e4)  # softplus is 0, and a is 1
    out = core(*ours, 5, FUNCTIONS["gelu_tanh"])
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out, ours, grad))


def test_the_flops_of_the_gates_are_those_of_the_guide() -> None:
    """The worked example of docs/explanation/how-a-step-costs/counts.md: a layer of RecurrentGemma 2B."""
    assert count_gate_flops(RGLRU(inner=2560, blocks=10)) == 2 * (2 * 2560 * 256) == 2_621_440
