"""Attention to compressed keys (DeepSeek-V4) on rows [R, D]: a window, and keys that each stand for several tokens.

    q = rope(norm(W_q norm(x W_down)))      kv = rope(norm(x W_kv))       one head of keys, which are the values too
    c = rope(norm(pool(x W_value, x W_gate + bias)))                      at the position of its first token
    o = rope⁻¹(core(q, kv, c))              out(out_down of each group of heads)

Rotary pairs are neighbours, among the last dims of a head; the output is rotated back, as keys are values. Equal to
transformers 5.23, ``DeepseekV4Attention``; kernels: ``compressed_core.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.spec import Model
from fivefold.trainer.model.kernels.rotary import rotate_pairs
from fivefold.trainer.model.linear import Linear, accumulate_grad, fused_linears
from fivefold.trainer.model.mixers.compressed_core import attend, choose_compressed_keys, pool
from fivefold.trainer.model.norm import RmsNorm, UnitNorm
from fivefold.trainer.model.operation import Run, call_directly, exclude_from_graphs
from fivefold.trainer.model.rotary import RowInputs

Tables = tuple[Tensor, Tensor]


class CompressedAttentionMixer(nn.Module):
    """The token mixer of a layer that attends to a window, and to compressed keys if its geometry has them."""

    def __init__(self, model: Model, *, layer: int) -> None:
        super().__init__()
        net = model.mixer(layer)
        assert isinstance(net, CompressedAttention)
        self.run: Run = call_directly
        self.net, self.table = net, model.find_compressed_table(net)
        self.q_down = Linear(model.width, net.q_rank, bias=False)
        self.q_norm = build_rms_norm(model, net.q_rank)
        self.q_up = Linear(net.q_rank, net.query_width, bias=False)
        self.head_norm = UnitNorm(epsilon=model.norm_epsilon)
        self.kv = Linear(model.width, net.head_dim, bias=False)
        self.kv_norm = build_rms_norm(model, net.head_dim)
        self.compress = None if net.rate is None else Compressor(model, net, name="mixer", dim=net.head_dim)
        self.indexer = None if net.indexer is None else CompressedIndexer(model, net)
        self.sinks = nn.Parameter(torch.empty(net.heads))
        out_features = net.query_width // net.out_groups
        self.out_down = Linear(out_features, net.projected_width, bias=False, is_low_precision=False)
        self.out = Linear(net.projected_width, model.width, bias=False)

    def forward(self, h_RD: Tensor, rows: RowInputs) -> Tensor:
        """Mix the tokens of each sequence: [R, D] → [R, D]."""
        net, run, tokens = self.net, self.run, rows.tokens
        tables = rows.tables[self.table], rows.tables[self.table + 1]
        latent, kv = run("mixer.down", fused_linears, h_RD, self.q_down, self.kv)
        latent = run("mixer.q_norm", self.q_norm, latent)
        (q,) = run("mixer.q_up", fused_linears, latent, self.q_up)
        q = run("mixer.head_norm", self.head_norm, q.view(-1, tokens, net.heads, net.head_dim))
        q = run("rope.q", rotate_pairs, q, *tables)
        kv = run("mixer.kv_norm", self.kv_norm, kv)
        kv = run("rope.kv", rotate_pairs, kv.view(-1, tokens, 1, net.head_dim), *tables)
        compressed = None if self.compress is None else self.compress(h_RD, tokens, tables)
        chosen = None if self.indexer is None else self.indexer(h_RD, latent, tokens, tables)
        del latent
        settings = tokens, net.window, net.rate, net.head_dim**-0.5
        out = run("mixer.core", attend, q.flatten(0, 1), kv.flatten(0, 2), compressed, chosen, self.sinks, *settings)
        del q, kv, compressed, chosen
        out = run("rope.out", rotate_pairs, out.view(-1, tokens, net.heads, net.head_dim), *tables, True)
        out = run("mixer.out_down", project_groups, out.view(-1, net.out_groups, self.out_down.matrix.shape[1]), self)
        return run("mixer.out", self.out, out)


def build_rms_norm(model: Model, dim: int) -> RmsNorm:
    """Build a norm of latents or keys, which is an RMSNorm with weights in any model."""
    return RmsNorm(dim, epsilon=model.norm_epsilon, plus_one=model.norm_plus_one)


class Compressor(nn.Module):
    """Makes compressed keys of ``dim``. ``name``: of its operations."""

    def __init__(self, model: Model, net: CompressedAttention, *, name: str, dim: int) -> None:
        super().__init__()
        assert net.rate is not None
        self.run: Run = call_directly
        self.name, self.rate, self.overlaps = name, net.rate, net.overlaps
        # as the planner's names: the pool of keys that have a gradient is part of the core
        self.pool_name, self.rope_name = (
            ("mixer.core.pool", "rope.compress")
            if name == "mixer"
            else (f"{name}.compress.pool", f"{name}.compress.rope")
        )
        columns = net.series * dim
        self.kv, self.gate = (Linear(model.width, columns, bias=False, is_low_precision=False) for _ in range(2))
        self.position_bias = nn.Parameter(torch.empty(net.rate, columns))
        self.norm = build_rms_norm(model, dim)

    def forward(self, x_RD: Tensor, tokens: int, tables: Tables) -> Tensor:
        """Return the compressed keys [B · keys, dim] of rows [R, D], rotated by the position of their first tokens."""
        run, name = self.run, f"{self.name}.compress"
        values, gates = run(f"{name}.project", fused_linears, x_RD, self.kv, self.gate)
        pooled = run(self.pool_name, pool, values, gates, self.position_bias, tokens, self.overlaps)
        del values, gates
        keys = run(f"{name}.norm", self.norm, pooled)
        del pooled
        batch, count = len(x_RD) // tokens, tokens // self.rate
        cos, sin = (table[:: self.rate][:count] for table in tables)
        rotated: Tensor = run(self.rope_name, rotate_pairs, keys.view(batch, count, 1, keys.shape[1]), cos, sin)
        return rotated.flatten(0, 2)


class CompressedIndexer(nn.Module):
    """The lightning indexer over compressed keys: it chooses those to which a query attends, without a gradient."""

    def __init__(self, model: Model, net: CompressedAttention) -> None:
        super().__init__()
        assert net.indexer is not None
        self.run: Run = call_directly
        self.shape = net.indexer
        heads, dim = self.shape.heads, self.shape.head_dim
        self.q = Linear(net.q_rank, heads * dim, bias=False, is_low_precision=False)
        self.compress = Compressor(model, net, name="mixer.indexer", dim=dim)
        self.w = Linear(model.width, heads, bias=False, is_low_precision=False)

    @torch.no_grad()
    def forward(self, x_RD: Tensor, latent: Tensor, tokens: int, tables: Tables) -> Tensor:
        """Return the indices [R, K] of the compressed keys that each query attends to."""
        run, heads = self.run, self.shape.heads
        keys = self.compress(x_RD, tokens, tables)
        (q,) = run("mixer.indexer.q", fused_linears, latent, self.q)
        (w,) = run("mixer.indexer.w", fused_linears, x_RD, self.w)
        q = run("mixer.indexer.rope.q", rotate_pairs, q.view(-1, tokens, heads, self.shape.head_dim), *tables)
        settings = tokens, self.compress.rate, self.shape.topk
        return run("mixer.indexer.choice", choose_compressed_keys, q.flatten(0, 1), keys, w, *settings)


@exclude_from_graphs
def project_groups(x: Tensor, mixer: CompressedAttentionMixer) -> Tensor:
    """Return the products of groups of heads [R, G, in] with a matrix of each: [R, G · out]."""
    return _ProjectGroups.apply(x, mixer.out_down)


class _ProjectGroups(torch.autograd.Function):
    """Saves the input; the backward accumulates dW itself, at once or deferred."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear) -> Tensor:
        ctx.linear = linear
        ctx.save_for_backward(x)
        weights = linear.matrix.view(x.shape[1], -1, x.shape[2])
        out = x.new_empty(x.shape[0], x.shape[1], weights.shape[1])
        torch.bmm(x.transpose(0, 1), weights.mT, out=out.transpose(0, 1))
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        linear: Linear = ctx.linear
        weights = linear.matrix.view(x.shape[1], -1, x.shape[2])
        by_group = gradient.view(x.shape[0], x.shape[1], -1).transpose(0, 1)
        x_grad = torch.empty_like(x)
        torch.bmm(by_group, weights, out=x_grad.transpose(0, 1))
        rows, gradients = x.detach().transpose(0, 1), by_group.detach()  # a deferred dW must not hold the graph

        def work() -> None:
            accumulate_grad(linear.matrix, torch.bmm(gradients.mT, rows).view(linear.matrix.shape))

        if linear.matrix.requires_grad:
            linear.wgrad_store.run_or_defer(work)
        return x_grad, None
