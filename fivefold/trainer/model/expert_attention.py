"""Attention whose queries and output each token's experts make (JetMoE, arXiv:2404.07413), on rows [R, D].

    x → router → top-k → copies by expert → q of each expert → one query for each key head and expert → core
      → rows by expert · weight → out of each expert → Σ over copies + bias;   x → k, v, of which all experts read one

Every rank has all experts of attention, so no row is sent. Source: transformers 5.23, ``JetMoeAttention``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.model.spec import Model
from fivefold.trainer.model.attention import Heads, SelfAttention, split_heads
from fivefold.trainer.model.experts import GroupedLinear
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.lora import project
from fivefold.trainer.model.moe import add_bias, combine_copies, copy_rows
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs
from fivefold.trainer.model.router import ExpertRouting
from fivefold.trainer.model.routing import Permutation


class ExpertAttention(SelfAttention):
    """Grouped attention with k queries for each key head, each of an expert that the token's router chose."""

    def __init__(self, model: Model, *, layer: int = 0) -> None:
        super().__init__(model, layer=layer)
        assert model.moe is not None
        columns = self.shape.kv_heads * self.shape.head_dim
        self.routing = ExpertRouting(model, layer=layer)
        self.experts = GroupedLinear(
            {"q": (columns, model.width), "out": (model.width, columns)}, experts=model.moe.experts
        )
        self.k, self.v = (Linear(model.width, columns, bias=False) for _ in range(2))
        self.bias_out = nn.Parameter(torch.empty(model.width)) if model.out_bias else None

    def forward(self, x_RD: Tensor, rows: RowInputs) -> Tensor:
        """Apply attention: [R, D] → [R, D]."""
        out, (share, permutation, offsets), _ = self._attend_rows(x_RD, rows)
        out = self.run("attention.out.gather", _collect_heads, out, share, permutation, self.shape.kv_heads)
        (out,) = self.run("attention.experts.out", self.experts.multiply, out, offsets, "out")
        out_RD: Tensor = self.run("attention.combine", combine_copies, out, permutation, self.kernels)
        if self.bias_out is not None:
            out_RD = self.run("attention.bias", add_bias, out_RD, self.bias_out)
        return out_RD

    def _compute_heads(self, x_RD: Tensor, rows: RowInputs) -> tuple[Heads, tuple[Tensor, Permutation, Tensor]]:
        """Compute q, k and v [B, T, heads, H], rotated; and the copies' weights, their order and the experts' ends."""
        logits = self.run("attention.router", self.routing.router, x_RD)
        weights, chosen = self.run("attention.topk", self.routing.choose_experts, logits, rows.keys)
        permutation = self.routing.permute(chosen)
        del logits, chosen
        copies, share = self.run("attention.gather", copy_rows, x_RD, weights, permutation, self.kernels)
        del weights
        offsets = permutation.counts.cumsum(0, dtype=torch.int32)
        (q,) = self.run("attention.experts.q", self.experts.multiply, copies, offsets, "q")
        del copies
        q = self.run("attention.scatter", _spread_heads, q, permutation, self.shape.kv_heads)
        k, v = project(self.run, "attention.qkv", x_RD, self.k, self.v, keys_B=rows.keys)
        q, k, v = (split_heads(x, rows.tokens, self.shape.head_dim) for x in (q, k, v))
        if self.rotates:
            tables = rows.rotary(sliding=self.has_sliding_rope)
            q = self.run("rope.q", self.kernels.rotate_first, q, *tables)
            k = self.run("rope.k", self.kernels.rotate_first, k, *tables)
        return (q, k, v), (share, permutation, offsets)


def _spread(rows: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
    """Order rows by expert [n, K · H] by token and key head: [R, K · k · H]."""
    places = permutation.places.view(len(permutation.starts), 1, -1)
    heads = torch.arange(kv_heads, device=rows.device)[:, None]
    return rows.unflatten(1, (kv_heads, -1))[places, heads].flatten(1)


def _collect(rows: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
    """Order rows [R, K · k · H] by expert: [n, K · H], the inverse of ``_spread``."""
    topk = len(permutation.order) // len(rows)
    heads = torch.arange(kv_heads, device=rows.device)
    chosen = (permutation.order % topk)[:, None]
    return rows.view(len(rows), kv_heads, topk, -1)[permutation.tokens[:, None], heads, chosen].flatten(1)


class _SpreadHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
        ctx.permutation, ctx.kv_heads = permutation, kv_heads
        return _spread(rows, permutation, kv_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _collect(gradient, ctx.permutation, ctx.kv_heads), None, None


class _CollectHeads(torch.autograd.Function):
    """Order rows by expert and multiply them by their routing weights; saves rows and weights."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
        ctx.permutation, ctx.kv_heads = permutation, kv_heads
        ctx.save_for_backward(rows, share)
        return _collect(rows, permutation, kv_heads).mul_(share[:, None].to(rows.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, share = ctx.saved_tensors
        products = _collect(rows, ctx.permutation, ctx.kv_heads).mul_(gradient)
        share_gradient = products.sum(-1, dtype=share.dtype)
        del products
        weighted = gradient * share[:, None].to(gradient.dtype)
        return _spread(weighted, ctx.permutation, ctx.kv_heads), share_gradient, None, None


@exclude_from_graphs
def _spread_heads(rows: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
    return _SpreadHeads.apply(rows, permutation, kv_heads)


@exclude_from_graphs
def _collect_heads(rows: Tensor, share: Tensor, permutation: Permutation, kv_heads: int) -> Tensor:
    return _CollectHeads.apply(rows, share, permutation, kv_heads)
