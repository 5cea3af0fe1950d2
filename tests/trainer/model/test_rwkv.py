"""The averages of RWKV-4 in groups of chunks against transformers, token after token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from fivefold.model.mixers.chunk_groups import GPU_TEMPORARY_BYTES
from fivefold.trainer.model.mixers.rwkv import average

SEQUENCES, CHANNELS = 2, 6


def draw_inputs(tokens: int, *, scale: float) -> list[Tensor]:
    """Keys and values [R, I], logarithms of decays from slow to fast, and factors of the token itself [I]."""
    generator = torch.Generator().manual_seed(tokens)
    keys, values = (
        torch.randn(SEQUENCES * tokens, CHANNELS, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    decay = torch.linspace(-6, 3, CHANNELS, dtype=torch.float64)
    first = torch.randn(CHANNELS, generator=generator, dtype=torch.float64)
    return [x.requires_grad_() for x in (keys * scale, values, decay, first)]


@pytest.mark.parametrize("temporary_bytes", [1, GPU_TEMPORARY_BYTES], ids=["a chunk at once", "all at once"])
@pytest.mark.parametrize(("tokens", "scale"), [(2, 1.0), (64, 1.0), (150, 1.0), (200, 60.0)])
def test_averages_and_gradients_are_those_of_transformers(tokens: int, scale: float, temporary_bytes: int) -> None:
    """Keys of a scale of 60 would overflow or vanish as e^k."""
    inputs = [x.detach().requires_grad_() for x in draw_inputs(tokens, scale=scale)]
    out = average(*inputs, tokens, temporary_bytes)
    keys, values, decay, first = (x.detach().requires_grad_() for x in inputs)
    shape = (SEQUENCES, tokens, CHANNELS)
    # theirs are in fp32; so are the keys, which decide most
    wanted, _ = rwkv_linear_attention_cpu(decay, first, keys.view(shape), values.view(shape))
    torch.testing.assert_close(out, wanted.flatten(0, 1), rtol=1e-4, atol=1e-4)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    ours = torch.autograd.grad(out, inputs, gradient)
    theirs = torch.autograd.grad(wanted.flatten(0, 1), (keys, values, decay, first), gradient)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))
