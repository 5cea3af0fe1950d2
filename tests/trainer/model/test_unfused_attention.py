"""Unfused attention is flash attention, but for what it keeps; 34 + 5NT/D bytes are what a step keeps of a layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fivefold.trainer.model import unfused_attention
from fivefold.trainer.model.attention_mask import AttentionMask
from fivefold.trainer.model.flash_attention import Flash
from fivefold.trainer.model.unfused_attention import Unfused
from tests.trainer.model.test_flash_attention import DOCUMENTS, B, N, S, check_close, draw_inputs, qkv


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dims", [(8, 8), (12, 8)], ids=["equal", "latent"])
def test_unfused_attention_equals_flash_attention(
    dims: tuple[int, int], window: int | None, documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfused_attention, "ROWS", 4)
    rule, results = AttentionMask(0.3, window), []
    gradient = draw_inputs(B, S, N, dims[1], seed=4)
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    for core in (Flash(rule), Unfused(rule)):
        inputs = [x.requires_grad_() for x in qkv(dims=dims)]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = core(*inputs, documents)
        out.backward(gradient)
        results.append([out.detach(), *(x.grad for x in inputs if x.grad is not None)])
    for one, other in zip(*results, strict=True):
        check_close(one, other.double())
    assert sum(kept.values()) == 4 * (sum(x.numel() for x in inputs) + B * N * S * S)  # the output is not kept
