"""Latent attention to the keys that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556 §2.1).

    choice   I[t, s] = Σ_j w_j[t] · ReLU(q_j[t] · k[s])        indices of the ``topk`` largest, s ≤ t
    core     softmax(q · cᵀ · scale) · c over these keys c     one latent key of all heads, its first dims the value
    absorb   q W_uk → queries of the latent; out W_uv → values of each head

Choice and core are custom operators: neither holds the scores of all queries, nor the keys of all queries side by side.
The choice has no gradient. Written with PyTorch's matmuls, in fp32. The absorbed products read both halves of
``kv_up``, whose gradient is made once both backwards have run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.trainer.model.attention_mask import AttentionMask, Heads
from fivefold.trainer.model.flash_attention import add_sinks, sinks_backward
from fivefold.trainer.model.linear import Linear, accumulate_grad
from fivefold.trainer.model.operation import exclude_from_graphs

MAX_TEMPORARY_ELEMENTS = 2**22  # numbers of a temporary at once; 16 MiB
NO_KEY = -1  # an index of no key, as in FlashMLA: the query sees fewer keys than may be chosen


@torch.library.custom_op("fivefold::choose_keys", mutates_args=())
def choose_keys(
    q_RNH: Tensor, k_SH: Tensor, w_RN: Tensor, first: int, tokens: int, topk: int, documents_S: Tensor | None
) -> Tensor:
    """Return the indices [R, K] of the keys with the largest scores, as positions in a query's sequence.

    The queries are the rows from row ``first`` on of all rows S, which are sequences of ``tokens``. A query sees the
    keys up to its own of its document; if these are fewer than ``topk``, the other indices are ``NO_KEY``.
    """
    rows, heads, _ = q_RNH.shape
    chosen = _empty_indices(q_RNH, tokens, topk)
    positions = torch.arange(tokens, device=k_SH.device)
    for begin, end in _split_rows(rows, first=first, tokens=tokens, size=heads * tokens):
        start = (first + begin) // tokens * tokens  # the first row of the sequence
        keys = k_SH[start : start + tokens].float()
        scores = torch.matmul(q_RNH[begin:end].float(), keys.mT).relu_()
        totals = torch.bmm(w_RN[begin:end, None].float(), scores)[:, 0]
        places = slice(first + begin - start, first + end - start)
        hidden = positions[places, None] < positions
        if documents_S is not None:
            documents = documents_S[start : start + tokens]
            hidden = hidden | (documents[places, None] != documents)
        best = totals.masked_fill_(hidden, -torch.inf).topk(chosen.shape[1], dim=-1)
        chosen[begin:end] = best.indices.masked_fill_(best.values == -torch.inf, NO_KEY)
    return chosen


choose_keys.register_fake(lambda q, k, w, first, tokens, topk, *_: _empty_indices(q, tokens, topk))


def _empty_indices(q_RNH: Tensor, tokens: int, topk: int) -> Tensor:
    return q_RNH.new_empty(q_RNH.shape[0], min(topk, tokens), dtype=torch.int32)


def _split_rows(rows: int, *, first: int, tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of one sequence each, with ``MAX_TEMPORARY_ELEMENTS`` at most if a row needs ``size``."""
    most, begin = max(1, MAX_TEMPORARY_ELEMENTS // size), 0
    while begin < rows:
        end = min(begin + most, rows, begin + tokens - (first + begin) % tokens)
        yield begin, end
        begin = end


@torch.library.custom_op("fivefold::sparse_attention", mutates_args=())
def sparse_attention(
    q_RNH: Tensor, keys_RH: Tensor, chosen_RK: Tensor, tokens: int, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend: q [R, N, H] to the chosen rows of keys [R, H] → out [R, N, V] and lse [R, N], fp32 (fp64 for fp64).

    The value of a key is its first ``value_dim`` dims, V. Rows are sequences of ``tokens``.
    """
    out, lse = _empty_outputs(q_RNH, value_dim)
    for rows in _list_row_blocks(q_RNH, chosen_RK):
        keys, hidden, _ = _gather_keys(keys_RH, chosen_RK, rows, tokens=tokens, dtype=lse.dtype)
        scores = _score(q_RNH[rows].to(lse.dtype), keys, hidden, scale=scale)
        lse[rows] = scores.logsumexp(-1)
        out[rows] = torch.bmm(scores.sub_(lse[rows][..., None]).exp_(), keys[..., :value_dim]).to(out.dtype)
    return out, lse


sparse_attention.register_fake(lambda q, keys, chosen, tokens, value_dim, *_: _empty_outputs(q, value_dim))


@torch.library.custom_op("fivefold::sparse_attention_backward", mutates_args=())
def sparse_attention_backward(
    gradient_RNV: Tensor,
    q_RNH: Tensor,
    keys_RH: Tensor,
    chosen_RK: Tensor,
    out_RNV: Tensor,
    lse_RN: Tensor,
    tokens: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of queries and keys from that of ``out``; shapes as in ``sparse_attention``."""
    q_grad, value_dim, dtype = torch.empty_like(q_RNH), out_RNV.shape[-1], lse_RN.dtype
    keys_grad = torch.zeros(keys_RH.shape, dtype=dtype, device=keys_RH.device)
    for rows in _list_row_blocks(q_RNH, chosen_RK):
        keys, hidden, places = _gather_keys(keys_RH, chosen_RK, rows, tokens=tokens, dtype=dtype)
        q, g = q_RNH[rows].to(dtype), gradient_RNV[rows].to(dtype)
        shares = _score(q, keys, hidden, scale=scale).sub_(lse_RN[rows][..., None]).exp_()
        inner = (g * out_RNV[rows]).sum(-1, keepdim=True)
        score_grads = torch.bmm(g, keys[..., :value_dim].mT).sub_(inner).mul_(shares).mul_(scale)
        q_grad[rows] = torch.bmm(score_grads, keys).to(q_grad.dtype)
        grads = torch.bmm(score_grads.mT, q)
        grads[..., :value_dim] += torch.bmm(shares.mT, g)
        keys_grad.index_add_(0, places.flatten(), grads.flatten(0, 1))
    return q_grad, keys_grad.to(keys_RH.dtype)


sparse_attention_backward.register_fake(lambda gradient, q, keys, *_: (torch.empty_like(q), torch.empty_like(keys)))


def _empty_outputs(q_RNH: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    sums_dtype = torch.promote_types(q_RNH.dtype, torch.float32)
    return q_RNH.new_empty(*q_RNH.shape[:2], value_dim), q_RNH.new_empty(q_RNH.shape[:2], dtype=sums_dtype)


def _list_row_blocks(q_RNH: Tensor, chosen_RK: Tensor) -> Iterator[slice]:
    """Yield blocks of rows, whose gathered keys and scores have ``MAX_TEMPORARY_ELEMENTS`` numbers at most."""
    rows, heads, dim = q_RNH.shape
    most = max(1, MAX_TEMPORARY_ELEMENTS // (chosen_RK.shape[1] * max(heads, dim)))
    yield from (slice(begin, begin + most) for begin in range(0, rows, most))


def _gather_keys(
    keys_RH: Tensor, chosen_RK: Tensor, rows: slice, *, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys [rows, K, H] of each query of ``rows``, which of them are none, and their rows in ``keys``."""
    chosen = chosen_RK[rows].long()
    sequences = torch.arange(rows.start, rows.start + len(chosen), device=chosen.device) // tokens
    places = chosen.clamp(min=0) + (sequences * tokens)[:, None]
    return keys_RH[places].to(dtype), chosen == NO_KEY, places


def _score(q: Tensor, keys: Tensor, hidden: Tensor, *, scale: float) -> Tensor:
    """Return the scores [rows, N, K] of queries [rows, N, H] on their keys [rows, K, H]."""
    return torch.bmm(q, keys.mT).mul_(scale).masked_fill_(hidden[:, None], -torch.inf)


class SparseCore:
    """The attention core of a rank that has full sequences; ``value_dim``: dims of a key that are its value."""

    def __init__(self, rule: AttentionMask, *, value_dim: int) -> None:
        self.rule, self.heads, self.value_dim = rule, Heads(), value_dim

    @exclude_from_graphs
    def __call__(
        self, q_RNH: Tensor, keys_RH: Tensor, chosen_RK: Tensor, sinks_N: Tensor | None, tokens: int
    ) -> Tensor:
        """Attend to the chosen keys: → [R, N, V]; keeps all inputs, the output and lse."""
        settings = tokens, self.value_dim, self.rule.scale
        return _SparseCore.apply(q_RNH, keys_RH, chosen_RK, sinks_N, *settings)


class _SparseCore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        chosen: Tensor,
        sinks: Tensor | None,
        tokens: int,
        value_dim: int,
        scale: float,
    ) -> Tensor:
        out, lse = sparse_attention(q, keys, chosen, tokens, value_dim, scale)
        if sinks is not None:
            add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, keys, chosen, sinks, out, lse)
        ctx.settings = tokens, scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, chosen, sinks, out, lse = ctx.saved_tensors
        sinks_grad = None if sinks is None else sinks_backward(gradient[None], out[None], lse[None], sinks)
        grads = sparse_attention_backward(gradient, q, keys, chosen, out, lse, *ctx.settings)
        return *grads, None, sinks_grad, None, None, None


class UpGradient:
    """The gradient of the up-projection of one forward: both absorbed products write their rows of each head into it.

    The first of them to run in the backward, which makes the values, allocates it.
    """

    def __init__(self, up: Linear, *, key_dim: int) -> None:
        self.up, self.key_dim = up, key_dim
        self.total: Tensor | None = None

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of keys and of values of a tensor [N, key_dim + v_dim, kv_rank]."""
        return heads[:, : self.key_dim], heads[:, self.key_dim :]

    def view_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the weights that make keys [N, key_dim, kv_rank] and values [N, v_dim, kv_rank]."""
        matrix = self.up.matrix
        return self.split(matrix.view(heads, -1, matrix.shape[1]))

    def add(self, inputs: Tensor, gradients: Tensor, *, of_values: bool) -> None:
        """Add the products of ``inputs`` [N, rows, R]ᵀ and ``gradients`` [N, R, kv_rank], at once or in W."""

        def work() -> None:
            matrix = self.up.matrix
            if self.total is None:
                self.total = matrix.new_empty(len(inputs), matrix.shape[0] // len(inputs), matrix.shape[1])
            part = self.split(self.total)[of_values]
            torch.bmm(inputs, gradients, out=part)
            if not of_values:
                total, self.total = self.total, None
                accumulate_grad(matrix, total.view(matrix.shape))

        self.up.wgrad_store.run_or_defer(work)


@exclude_from_graphs
def absorb_keys(q_BTNH: Tensor, up: UpGradient) -> Tensor:
    """Return the queries of the latent [R, N, kv_rank]: q W_uk, of the first dims of each head."""
    return _AbsorbKeys.apply(q_BTNH.flatten(0, 1), up)


class _AbsorbKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, up: UpGradient) -> Tensor:
        ctx.up = up
        ctx.save_for_backward(q)
        keys, _ = up.view_heads(q.shape[1])
        out = q.new_empty(*q.shape[:2], keys.shape[2])
        torch.bmm(q[..., : up.key_dim].transpose(0, 1), keys, out=out.transpose(0, 1))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (q,) = ctx.saved_tensors
        keys, _ = ctx.up.view_heads(q.shape[1])
        q_grad = torch.zeros_like(q)
        by_head = gradient.transpose(0, 1)
        torch.bmm(by_head, keys.mT, out=q_grad[..., : ctx.up.key_dim].transpose(0, 1))
        ctx.up.add(q[..., : ctx.up.key_dim].permute(1, 2, 0).detach(), by_head.detach(), of_values=False)
        return q_grad, None


@exclude_from_graphs
def absorb_values(out_RNV: Tensor, up: UpGradient) -> Tensor:
    """Return the values of each head [R, N · v_dim]: the core's output over latents, times W_uv."""
    return _AbsorbValues.apply(out_RNV, up)


class _AbsorbValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: UpGradient) -> Tensor:
        ctx.up = up
        ctx.save_for_backward(x)
        _, values = up.view_heads(x.shape[1])
        out = x.new_empty(*x.shape[:2], values.shape[1])
        torch.bmm(x.transpose(0, 1), values.mT, out=out.transpose(0, 1))
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        _, values = ctx.up.view_heads(x.shape[1])
        by_head = gradient.view(*x.shape[:2], -1).transpose(0, 1)
        x_grad = torch.empty_like(x)
        torch.bmm(by_head, values, out=x_grad.transpose(0, 1))
        ctx.up.add(by_head.mT.detach(), x.transpose(0, 1).detach(), of_values=True)
        return x_grad, None
