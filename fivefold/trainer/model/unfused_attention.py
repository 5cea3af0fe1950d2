"""Attention as it was before flash attention: scores and probabilities are tensors [B, N, T, S].

    scores = q·kᵀ·scale → probabilities = softmax(masked scores) → (dropout) → out = probabilities·v

The backward keeps q, k, v and the probabilities: 2·N·T²·B bytes in 16 bits, with dropout its mask and output too, the
5·N·T²·B of Korthikanti 2022 (arXiv:2205.05198, table 2). For measuring what flash attention saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.trainer.model.attention_mask import Heads, ScoreRule
from fivefold.trainer.model.dropout import PROBABILITIES, dropped, place_in, row_keys, score_rows
from fivefold.trainer.model.operation import Run, direct, outside_graphs

ROWS = 128  # of queries that are masked at a time


class Unfused:
    """Attention core for a rank that has whole sequences: causal, within documents if there are any."""

    def __init__(self, rule: ScoreRule, *, heads: Heads = Heads()) -> None:  # noqa: B008  frozen
        self.rule, self.heads = rule, heads

    def __call__(
        self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None = None,
        keys_B: Tensor | None = None, *, run: Run = direct,
    ) -> Tensor:  # fmt: skip
        """q [B, T, N, H], k and v [B, T, K, H] → [B, T, N, H of v]; each step is an operation for ``run``."""
        scores: Tensor = run("attention.core.scores", _scores, q_BTNH, k_BTKH, self.rule)
        shares: Tensor = run("attention.core.softmax", _softmax, scores, self.rule, documents_BT)
        del scores
        if self.rule.dropout and keys_B is not None:
            shares = run("attention.core.dropout", self._drop, shares, keys_B)
        out: Tensor = run("attention.core.values", _values, shares, v_BTKH)
        return out

    @outside_graphs
    def _drop(self, shares: Tensor, keys_B: Tensor) -> Tensor:
        _, heads, tokens, _ = shares.shape
        first = self.heads.first(heads)
        numbers = score_rows(range(first, first + heads), range(tokens), device=shares.device)
        keys = row_keys(keys_B, numbers, place=place_in(self.rule.layer, PROBABILITIES))
        found: Tensor = dropped(shares, keys, self.rule.dropout)
        return found


@outside_graphs
def _scores(q: Tensor, k: Tensor, rule: ScoreRule) -> Tensor:
    found: Tensor = _Scores.apply(q, k, rule.scale)  # type: ignore[no-untyped-call]
    return found


@outside_graphs
def _softmax(scores: Tensor, rule: ScoreRule, documents: Tensor | None) -> Tensor:
    found: Tensor = _Softmax.apply(scores, rule, documents)  # type: ignore[no-untyped-call]
    return found


@outside_graphs
def _values(shares: Tensor, v: Tensor) -> Tensor:
    found: Tensor = _Values.apply(shares, v)  # type: ignore[no-untyped-call]
    return found


class _Scores(torch.autograd.Function):
    """q·kᵀ·scale [B, N, T, S]; saves q and k."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(q, k)
        return _product(_by_key_head(q, k.shape[2]), _keys(k).mT, scale).view(q.shape[0], q.shape[2], q.shape[1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k = ctx.saved_tensors
        slopes = gradient.reshape(q.shape[0] * k.shape[2], -1, k.shape[1])
        dq = _product(slopes, _keys(k), ctx.scale)
        dk = _product(slopes.mT, _by_key_head(q, k.shape[2]), ctx.scale)
        return _tokens_first(dq, q), _tokens_first(dk, k), None


class _Softmax(torch.autograd.Function):
    """Probabilities of masked scores; overwrites the scores and saves the probabilities."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, rule: ScoreRule, documents: Tensor | None) -> Tensor:
        for rows, hidden in masks(scores.shape[2], window=rule.window, documents=documents, device=scores.device):
            scores[:, :, rows].masked_fill_(hidden, -torch.inf)
        shares = scores.softmax(-1)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (shares,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, shares, -1, shares.dtype), None, None


class _Values(torch.autograd.Function):
    """Probabilities · v [B, T, N, H of v]; saves both."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(shares, v)
        (sequences, heads, tokens, keys), kv_heads = shares.shape, v.shape[2]
        out = torch.bmm(shares.view(sequences * kv_heads, -1, keys), _keys(v))
        return out.view(sequences, heads, tokens, -1).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shares, v = ctx.saved_tensors
        g = _by_key_head(gradient, v.shape[2])
        of_shares = torch.bmm(g, _keys(v).mT).view(shares.shape)
        dv = torch.bmm(shares.view(g.shape[0], -1, shares.shape[-1]).mT, g)
        return of_shares, _tokens_first(dv, v)


def masks(
    tokens: int, *, window: int | None, documents: Tensor | None, device: torch.device
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of queries and which keys are hidden from them [B or 1, 1, rows, S]: later ones, those beyond the window,
    those of other documents.
    """
    places = torch.arange(tokens, device=device)
    ids = None if documents is None else documents.to(device)
    for start in range(0, tokens, ROWS):
        rows = slice(start, min(start + ROWS, tokens))
        apart = places[rows, None] - places
        hidden = (apart < 0)[None]
        if window is not None:
            hidden = hidden | (apart >= window)
        if ids is not None:
            hidden = hidden | (ids[:, rows, None] != ids[:, None])
        yield rows, hidden[:, None]


def _product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """``scale`` · left · right, in one kernel."""
    return torch.baddbmm(left.new_empty(1).expand(left.shape[0], 1, 1), left, right, beta=0, alpha=scale)


def _by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """[B, T, N, H] → [B · K, N / K · T, H]: the query heads of each key head."""
    sequences, tokens, heads, dim = x.shape
    return x.transpose(1, 2).reshape(sequences * kv_heads, heads // kv_heads * tokens, dim)


def _keys(x: Tensor) -> Tensor:
    """[B, S, K, H] → [B · K, S, H]."""
    return x.transpose(1, 2).flatten(0, 1)


def _tokens_first(x: Tensor, like: Tensor) -> Tensor:
    """[B · K, N / K · T, H] → the shape of ``like`` [B, T, N, H]."""
    sequences, tokens, heads, dim = like.shape
    return x.view(sequences, heads, tokens, dim).transpose(1, 2).contiguous()
