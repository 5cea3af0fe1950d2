"""A low-rank adapter (LoRA) of the token embedding, as peft adapts it, in two operations on the ids.

    low = A[:, ids]ᵀ   [R, rank]              (``lower``)
    x   = W[ids] + s · low Bᵀ   [R, D]         (``raise_``: saves low)

    backward   dlow = s · g B   ·   dB = s · gᵀ low   ·   dA[:, id] = Σ dlow of the rows with that id

W is frozen. A has a column for each token; it begins as zeros, and B as a normal distribution, as in peft. The input,
ids, has no dropout. See ``lora.py`` for adapters of linear layers, such as the output projection.
Source: huggingface/peft@0.21.2:src/peft/tuners/lora/layer.py, Embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.adapter import EMBEDDING, Adapter
from fivefold.trainer.model.linear import accumulate_grad


class AdaptedTable(nn.Embedding):
    """An embedding table with the factors of its adapter."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_scale: float


def attach_to_table(table: nn.Embedding, adapter: Adapter) -> None:
    """Add the adapter's factors, not initialized, to the table of the token embedding."""
    resolved, (tokens, width) = adapter.resolve_target(EMBEDDING), table.weight.shape
    table.__class__ = AdaptedTable
    assert isinstance(table, AdaptedTable)
    table.lora_a = nn.Parameter(torch.empty(resolved.rank, tokens))
    table.lora_b = nn.Parameter(torch.empty(width, resolved.rank))
    table.lora_scale = resolved.scale


def lower(ids: Tensor, table: AdaptedTable) -> Tensor:
    """Return low = A[:, ids]ᵀ [R, rank]."""
    return _LowerIds.apply(ids, table.lora_a)


def raise_(low: Tensor, ids: Tensor, table: AdaptedTable) -> Tensor:
    """Return the rows [R, D] of the table, with the update."""
    return _RaiseIds.apply(low, ids, table)


class _LowerIds(torch.autograd.Function):
    """Columns of A. Its gradient is accumulated here."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, factor_a: nn.Parameter) -> Tensor:
        ctx.factor_a = factor_a
        ctx.save_for_backward(ids)
        return factor_a.index_select(1, ids).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        (ids,) = ctx.saved_tensors
        total = torch.zeros_like(ctx.factor_a).index_add_(1, ids, gradient.t())
        accumulate_grad(ctx.factor_a, total)
        return None, None


class _RaiseIds(torch.autograd.Function):
    """Frozen rows, to which the product with B is added in place."""

    @staticmethod
    def forward(ctx: Any, low: Tensor, ids: Tensor, table: AdaptedTable) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(low)
        return F.embedding(ids, table.weight).addmm_(low, table.lora_b.t(), alpha=table.lora_scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (low,) = ctx.saved_tensors
        table: AdaptedTable = ctx.table
        accumulate_grad(table.lora_b, (gradient.t() @ low).mul_(table.lora_scale))
        return (gradient @ table.lora_b).mul_(table.lora_scale), None, None
