"""The kernels of attention to compressed keys (DeepSeek-V4): the keys of a window, compressed ones, and their choice.

    pool     Σ softmax(gate + bias) · value over the tokens of a compressed key, and over those before it
    choice   I[t, s] = Σ_j w_j[t] · ReLU(q_j[t] · k[s])        the ``topk`` largest among complete compressed keys
    core     softmax(q · kᵀ · scale) · k over a window and the compressed keys, which are their own values

Choice and core are custom operators, which hold no scores of all queries. A compressed key is complete, and seen, once
its last token is. Written with PyTorch's matmuls, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.trainer.model.flash_attention import add_sinks, sinks_backward
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.model.sparse_attention import MAX_TEMPORARY_ELEMENTS, NO_KEY

SHORTEST_BLOCK = 64  # queries that are computed at once, if the window is shorter


@exclude_from_graphs
def pool(values: Tensor, gates: Tensor, bias: Tensor, tokens: int, overlaps: bool) -> Tensor:
    """Return compressed keys [B · keys, H] of ``values`` and ``gates`` [B · tokens, series · H].

    ``bias`` [rate, series · H]: of the gates. ``overlaps``: the first half of the columns is for the next key, and the
    second one for that of the token.
    """
    return _Pool.apply(values, gates, bias, tokens, overlaps)


class _Pool(torch.autograd.Function):
    """Saves the values, copied if keys overlap, and the softmax in fp32 and as it multiplies."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gates: Tensor, bias: Tensor, tokens: int, overlaps: bool) -> Tensor:
        ctx.tokens, ctx.overlaps, ctx.bias_dtype = tokens, overlaps, bias.dtype
        grouped = _group(gates, tokens, len(bias)) + bias
        if overlaps:
            grouped = _join_series(grouped, -torch.inf)
        softmax = grouped.softmax(2, dtype=torch.promote_types(gates.dtype, torch.float32))
        del grouped
        joined = _group(values, tokens, len(bias))
        if overlaps:
            joined = _join_series(joined, 0.0)
        weights = softmax.to(values.dtype)
        ctx.save_for_backward(joined, softmax, weights)
        return (joined * weights).sum(2).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        joined, softmax, weights = ctx.saved_tensors
        gradient = gradient.view(*joined.shape[:2], 1, joined.shape[3])
        slope = (gradient * joined).to(softmax.dtype)
        slope = torch.ops.aten._softmax_backward_data(slope, softmax, 2, softmax.dtype)
        if ctx.overlaps:
            slope = _split_series(slope)
        bias_grad = slope.sum((0, 1)).to(ctx.bias_dtype)
        gates_grad = _ungroup(slope.to(joined.dtype), ctx.tokens)
        del slope
        values_grad = gradient * weights
        if ctx.overlaps:
            values_grad = _split_series(values_grad)
        return _ungroup(values_grad, ctx.tokens), gates_grad, bias_grad, None, None


def _group(x: Tensor, tokens: int, rate: int) -> Tensor:
    """View rows [B · T, C] as [B, keys, rate, C], without the last tokens, which are no complete key."""
    keys = tokens // rate
    return x.view(-1, tokens, x.shape[1])[:, : keys * rate].unflatten(1, (keys, rate))


def _ungroup(x: Tensor, tokens: int) -> Tensor:
    """Return gradients [B, keys, rate, C] as rows [B · T, C]; that of the last tokens is zero."""
    rest = tokens - x.shape[1] * x.shape[2]
    rows = x.flatten(1, 2)
    if rest:
        rows = F.pad(rows, (0, 0, 0, rest))
    return rows.flatten(0, 1)


def _join_series(x: Tensor, before: float) -> Tensor:
    """Return [B, keys, 2 · rate, H] of both series [B, keys, rate, 2 · H]: that of the tokens before a key comes first.

    The first key has none, where ``before`` stands.
    """
    rate, dim = x.shape[2], x.shape[3] // 2
    joined = x.new_empty(*x.shape[:2], 2 * rate, dim)
    joined[:, :, rate:] = x[..., dim:]
    joined[:, 1:, :rate] = x[:, :-1, :, :dim]
    joined[:, :1, :rate] = before
    return joined


def _split_series(joined: Tensor) -> Tensor:
    """Return the gradient of both series [B, keys, rate, 2 · H]: the reverse of ``_join_series``."""
    rate, dim = joined.shape[2] // 2, joined.shape[3]
    x = joined.new_empty(*joined.shape[:2], rate, 2 * dim)
    x[..., dim:] = joined[:, :, rate:]
    x[:, :-1, :, :dim] = joined[:, 1:, :rate]
    x[:, -1:, :, :dim] = 0
    return x


@torch.library.custom_op("fivefold::choose_compressed_keys", mutates_args=())
def choose_compressed_keys(q_RNH: Tensor, k_SH: Tensor, w_RN: Tensor, tokens: int, rate: int, topk: int) -> Tensor:
    """Return the indices [R, K] of the complete compressed keys with the largest scores, within a query's sequence.

    Rows are sequences of ``tokens``. If fewer than ``topk`` keys are complete, the other indices are ``NO_KEY``.
    """
    chosen, keys = _empty_indices(q_RNH, tokens, rate, topk), tokens // rate
    if not keys:
        return chosen
    positions = torch.arange(tokens, device=q_RNH.device)
    most = max(1, MAX_TEMPORARY_ELEMENTS // (q_RNH.shape[1] * keys))
    for start in range(0, len(q_RNH), tokens):
        held = k_SH[start // tokens * keys :][:keys].float()
        for begin in range(0, tokens, most):
            places = positions[begin : begin + most]
            rows = slice(start + begin, start + begin + len(places))
            scores = torch.matmul(q_RNH[rows].float(), held.mT).relu_()
            totals = torch.bmm(w_RN[rows, None].float(), scores)[:, 0]
            totals.masked_fill_(positions[:keys] >= ((places + 1) // rate)[:, None], -torch.inf)
            best = totals.topk(chosen.shape[1], dim=-1)
            chosen[rows] = best.indices.masked_fill_(best.values == -torch.inf, NO_KEY).to(chosen.dtype)
    return chosen


choose_compressed_keys.register_fake(lambda q, k, w, tokens, rate, topk: _empty_indices(q, tokens, rate, topk))


def _empty_indices(q_RNH: Tensor, tokens: int, rate: int, topk: int) -> Tensor:
    return q_RNH.new_empty(q_RNH.shape[0], min(topk, tokens // rate), dtype=torch.int32)


@torch.library.custom_op("fivefold::compressed_attention", mutates_args=())
def compressed_attention(
    q_RNH: Tensor,
    keys_RH: Tensor,
    compressed_SH: Tensor | None,
    chosen_RK: Tensor | None,
    tokens: int,
    window: int,
    rate: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend: q [R, N, H] to the last ``window`` keys [R, H] and compressed ones → out [R, N, H] and lse [R, N], fp32.

    Rows are sequences of ``tokens``, each of which has ``tokens // rate`` compressed keys. A query attends to those
    that are complete, or to those of them that ``chosen`` names. lse is fp64 for fp64.
    """
    out, lse = _empty_outputs(q_RNH)
    for block in _list_blocks(q_RNH, keys_RH, compressed_SH, chosen_RK, (tokens, window, rate)):
        scores = block.score(q_RNH[block.rows].to(lse.dtype), scale)
        lse[block.rows] = scores.logsumexp(-1)
        out[block.rows] = block.multiply(scores.sub_(lse[block.rows][..., None]).exp_()).to(out.dtype)
    return out, lse


compressed_attention.register_fake(lambda q, *_: _empty_outputs(q))


@torch.library.custom_op("fivefold::compressed_attention_backward", mutates_args=())
def compressed_attention_backward(
    gradient_RNH: Tensor,
    q_RNH: Tensor,
    keys_RH: Tensor,
    compressed_SH: Tensor | None,
    chosen_RK: Tensor | None,
    out_RNH: Tensor,
    lse_RN: Tensor,
    tokens: int,
    window: int,
    rate: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and compressed keys (empty without them) from that of ``out``."""
    q_grad, dtype = torch.empty_like(q_RNH), lse_RN.dtype
    keys_grad = torch.zeros(keys_RH.shape, dtype=dtype, device=keys_RH.device)
    compressed_grad = keys_grad.new_zeros(0 if compressed_SH is None else len(compressed_SH), keys_RH.shape[1])
    for block in _list_blocks(q_RNH, keys_RH, compressed_SH, chosen_RK, (tokens, window, rate)):
        rows = block.rows
        q, g = q_RNH[rows].to(dtype), gradient_RNH[rows].to(dtype)
        shares = block.score(q, scale).sub_(lse_RN[rows][..., None]).exp_()
        inner = (g * out_RNH[rows]).sum(-1, keepdim=True)
        score_grads = block.project(g).sub_(inner).mul_(shares).mul_(scale)
        q_grad[rows] = block.multiply(score_grads).to(q_grad.dtype)
        block.add_gradients(score_grads, q, shares, g, keys_grad, compressed_grad)
    return q_grad, keys_grad.to(keys_RH.dtype), compressed_grad.to(keys_RH.dtype)


@compressed_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, keys: Tensor, compressed: Tensor | None, *rest: Any) -> Any:
    empty = keys.new_empty(0 if compressed is None else len(compressed), keys.shape[1])
    return torch.empty_like(q), torch.empty_like(keys), empty


def _empty_outputs(q_RNH: Tensor) -> tuple[Tensor, Tensor]:
    sums_dtype = torch.promote_types(q_RNH.dtype, torch.float32)
    return torch.empty_like(q_RNH), q_RNH.new_empty(q_RNH.shape[:2], dtype=sums_dtype)


class _Block(NamedTuple):
    """Queries of one sequence, the keys that they share, and with an indexer those of each.

    ``rows``: the queries; ``window``: rows of their keys; ``complete``: rows of the compressed keys that they share.
    ``keys`` [S, H]: both; ``hidden`` [n, S]: which a query does not see. ``own`` [n, K, H]: chosen compressed keys, of
    rows ``places``, of which ``none`` [n, K] are no keys.
    """

    rows: slice
    window: slice
    complete: slice
    keys: Tensor
    hidden: Tensor
    own: Tensor | None = None
    places: Tensor | None = None
    none: Tensor | None = None

    def project(self, x: Tensor) -> Tensor:
        """Return the products [n, N, S + K] of rows of heads [n, N, H] with all keys."""
        products = torch.matmul(x, self.keys.mT)
        return products if self.own is None else torch.cat((products, torch.bmm(x, self.own.mT)), dim=-1)

    def score(self, q: Tensor, scale: float) -> Tensor:
        """Return the scores [n, N, S + K] of queries [n, N, H]."""
        hidden = self.hidden if self.none is None else torch.cat((self.hidden, self.none), dim=-1)
        return self.project(q).mul_(scale).masked_fill_(hidden[:, None], -torch.inf)

    def multiply(self, shares: Tensor) -> Tensor:
        """Return the sums [n, N, H] of all keys times ``shares`` [n, N, S + K]."""
        held = len(self.keys)
        sums = torch.matmul(shares[..., :held], self.keys)
        return sums if self.own is None else sums + torch.bmm(shares[..., held:], self.own)

    def add_gradients(
        self, score_grads: Tensor, q: Tensor, shares: Tensor, g: Tensor, keys_grad: Tensor, compressed_grad: Tensor
    ) -> None:
        """Add the gradients of all keys, by the scores and as values."""
        held = len(self.keys)
        grads = score_grads[..., :held].flatten(0, 1).mT @ q.flatten(0, 1)
        grads.addmm_(shares[..., :held].flatten(0, 1).mT, g.flatten(0, 1))
        windowed = self.window.stop - self.window.start
        keys_grad[self.window] += grads[:windowed]
        compressed_grad[self.complete] += grads[windowed:]
        if self.places is not None:
            own = torch.bmm(score_grads[..., held:].mT, q).baddbmm_(shares[..., held:].mT, g)
            compressed_grad.index_add_(0, self.places.flatten(), own.flatten(0, 1))


def _list_blocks(
    q_RNH: Tensor,
    keys_RH: Tensor,
    compressed_SH: Tensor | None,
    chosen_RK: Tensor | None,
    settings: tuple[int, int, int],
) -> Iterator[_Block]:
    """Yield blocks of queries; ``settings``: tokens of a sequence, the window, and tokens of a compressed key."""
    tokens, window, rate = settings
    dtype, (_, heads, dim) = torch.promote_types(q_RNH.dtype, torch.float32), q_RNH.shape
    held = 0 if compressed_SH is None else tokens // rate
    longest = min(max(window, SHORTEST_BLOCK), tokens)
    numbers = heads * (min(window, tokens) + longest)
    numbers += heads * held if chosen_RK is None else chosen_RK.shape[1] * max(heads, dim)
    most = min(longest, max(1, MAX_TEMPORARY_ELEMENTS // numbers))
    positions = torch.arange(tokens, device=q_RNH.device)
    for start in range(0, len(q_RNH), tokens):
        first_key = start // tokens * held
        for begin in range(0, tokens, most):
            end = min(begin + most, tokens)
            first = max(0, begin - window + 1)
            queries, places = positions[begin:end, None], positions[first:end]
            rows, seen = slice(start + begin, start + end), slice(start + first, start + end)
            hidden, keys = (places > queries) | (places <= queries - window), keys_RH[seen].to(dtype)
            if compressed_SH is None or not held:
                yield _Block(rows, seen, slice(0, 0), keys, hidden)
            elif chosen_RK is None:
                complete = slice(first_key, first_key + end // rate)
                unseen = positions[: end // rate] >= (queries + 1) // rate
                joined = torch.cat((keys, compressed_SH[complete].to(dtype)))
                yield _Block(rows, seen, complete, joined, torch.cat((hidden, unseen), dim=-1))
            else:
                chosen = chosen_RK[rows].long()
                of_key = chosen.clamp(min=0) + first_key
                own = compressed_SH[of_key].to(dtype)
                yield _Block(rows, seen, slice(0, 0), keys, hidden, own, of_key, chosen == NO_KEY)


@exclude_from_graphs
def attend(
    q_RNH: Tensor,
    keys_RH: Tensor,
    compressed_SH: Tensor | None,
    chosen_RK: Tensor | None,
    sinks_N: Tensor,
    tokens: int,
    window: int,
    rate: int | None,
    scale: float,
) -> Tensor:
    """Attend with sinks: → [R, N, H]; keeps all inputs, the output and lse. Arguments: ``compressed_attention``."""
    settings = tokens, window, rate or 0, scale
    return _CompressedCore.apply(q_RNH, keys_RH, compressed_SH, chosen_RK, sinks_N, settings)


class _CompressedCore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        compressed: Tensor | None,
        chosen: Tensor | None,
        sinks: Tensor,
        settings: tuple[int, int, int, float],
    ) -> Tensor:
        out, lse = compressed_attention(q, keys, compressed, chosen, *settings)
        add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, keys, compressed, chosen, sinks, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, compressed, chosen, sinks, out, lse = ctx.saved_tensors
        sinks_grad = sinks_backward(gradient[None], out[None], lse[None], sinks)
        inputs = gradient, q, keys, compressed, chosen, out, lse
        q_grad, keys_grad, compressed_grad = compressed_attention_backward(*inputs, *ctx.settings)
        return q_grad, keys_grad, None if compressed is None else compressed_grad, None, sinks_grad, None
