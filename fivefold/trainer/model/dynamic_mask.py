"""Attention with masks that values make (Doge): a number of each key is added to its scores, and few keys are seen.

    number of a key      d = exp(a · softplus(v W + b)), one for each key head
    scores               q·kᵀ·scale + d; a query sees the ``keep`` keys with the largest d of those it may see
    saved                d and v W; q, k, v, the mask [B, N, T, S], the output and an fp32 log-sum-exp of each query

The mask is a tensor of each head, query and key, as in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.attention import AttentionShape
from fivefold.model.spec import Model
from fivefold.trainer.model.attention_mask import AttentionMask
from fivefold.trainer.model.linear import Linear
from fivefold.trainer.model.operation import Run, exclude_from_graphs
from fivefold.trainer.model.unfused_attention import list_masks


class DynamicMask(Linear):
    """The linear layer from the values of all key heads to a number of each, and the factors ``a`` [K]."""

    def __init__(self, model: Model, shape: AttentionShape) -> None:
        heads = shape.kv_heads
        super().__init__(heads * shape.value_dim, heads, bias=model.qkv_bias, is_low_precision=False)
        assert model.dynamic_mask is not None
        self.keep, self.group = model.dynamic_mask, shape.heads // heads
        self.a = nn.Parameter(torch.empty(heads))


def attend(run: Run, layer: DynamicMask, heads: tuple[Tensor, Tensor, Tensor], rule: AttentionMask) -> Tensor:
    """Attend: q [B, T, N, H], k and v [B, T, K, H] → [B, T, N, H of v]."""
    q, k, v = heads
    numbers = run("attention.mask.dt", layer, v.flatten(2).flatten(0, 1))
    numbers = run("attention.mask.act", make_numbers, numbers, layer.a)
    mask = run("attention.mask", make_mask, numbers, layer, rule, v.shape[1])
    del numbers
    return run("attention.core", attend_masked, q, k, v, mask, rule.scale)


@exclude_from_graphs
def make_numbers(logits: Tensor, a: Tensor) -> Tensor:
    """Return exp(a · softplus(logits)) of ``logits`` [R, K]."""
    return _Numbers.apply(logits, a)


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, a: Tensor) -> Tensor:
        numbers = torch.exp(a * F.softplus(logits))
        ctx.save_for_backward(logits, a, numbers)
        return numbers

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        logits, a, numbers = ctx.saved_tensors
        scaled = gradient * numbers
        a_gradient = (scaled * F.softplus(logits)).sum(0)
        return scaled.mul_(a).mul_(logits.sigmoid()), a_gradient


@exclude_from_graphs
def make_mask(numbers: Tensor, layer: DynamicMask, rule: AttentionMask, tokens: int) -> Tensor:
    """Return the mask [B, N, T, S] of the ``numbers`` [B · T, K] of keys: −∞ where a query does not see the key."""
    return _Mask.apply(numbers, layer.keep, layer.group, rule.window, tokens)


class _Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, numbers: Tensor, keep: int, group: int, window: int | None, tokens: int) -> Tensor:
        ctx.group, ctx.shape = group, numbers.shape
        of_keys = numbers.view(-1, tokens, numbers.shape[1]).transpose(1, 2)  # [B, K, S]
        mask = of_keys[:, :, None].repeat(1, 1, tokens, 1)
        for rows, hidden in list_masks(tokens, window=window, documents=None, device=numbers.device):
            mask[:, :, rows].masked_fill_(hidden, -torch.inf)
        if tokens > keep:
            unseen = torch.ones_like(mask, dtype=torch.bool).scatter_(-1, mask.topk(keep, dim=-1).indices, False)
            mask.masked_fill_(unseen, -torch.inf)
        return mask.repeat_interleave(group, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        # unseen keys have the probability 0, and so no gradient
        of_keys = gradient.unflatten(1, (-1, ctx.group)).sum((2, 3))
        return of_keys.transpose(1, 2).reshape(ctx.shape), None, None, None, None


@exclude_from_graphs
def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return softmax(q·kᵀ·scale + mask)·v [B, T, N, H of v]."""
    return _Attend.apply(q, k, v, mask, scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        scores = _compute_scores(q, k, mask, scale)
        highest = scores.amax(-1, keepdim=True)
        shares = scores.sub_(highest).exp_()
        sums = shares.sum(-1, keepdim=True)
        log_sums = highest.add_(sums.log())[..., 0]
        shares = shares.div_(sums).to(v.dtype)
        out = (_group(shares, k.shape[2]) @ v.transpose(1, 2)).flatten(1, 2)
        out = out.view(*shares.shape[:3], -1).transpose(1, 2).contiguous()
        ctx.save_for_backward(q, k, v, mask, out, log_sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        q, k, v, mask, out, log_sums = ctx.saved_tensors
        kv_heads = k.shape[2]
        shares = _compute_scores(q, k, mask, ctx.scale).sub_(log_sums[..., None]).exp_()
        g = _group(gradient.transpose(1, 2), kv_heads)
        v_gradient = _group(shares.to(v.dtype), kv_heads).mT @ g
        mean = (gradient * out).sum(-1, dtype=torch.float32).transpose(1, 2)[..., None]
        shares.mul_((g @ v.transpose(1, 2).mT).view(mask.shape).sub_(mean))
        mask_gradient = shares.to(q.dtype)
        del shares
        grouped = _group(mask_gradient, kv_heads)
        q_gradient = (grouped @ k.transpose(1, 2)).mul_(ctx.scale).view(q.transpose(1, 2).shape)
        k_gradient = (grouped.mT @ _group(q.transpose(1, 2), kv_heads)).mul_(ctx.scale)
        q_gradient, k_gradient, v_gradient = (
            x.transpose(1, 2).contiguous() for x in (q_gradient, k_gradient, v_gradient)
        )
        return q_gradient, k_gradient, v_gradient, mask_gradient, None


def _compute_scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return q·kᵀ·scale + mask, in fp32: [B, N, T, S]."""
    product = _group(q.transpose(1, 2), k.shape[2]) @ k.transpose(1, 2).mT
    return product.view(mask.shape).float().mul_(scale).add_(mask)


def _group(x: Tensor, kv_heads: int) -> Tensor:
    """Group query heads by key head: [B, N, T, …] → [B, K, N / K · T, …]."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)
