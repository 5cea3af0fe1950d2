"""Context parallelism: each rank of cp holds 1/cp of the tokens of every sequence; only token mixers communicate.

ring     rank r holds chunks r and 2cp−1−r of 2cp; forward cp−1 p2p of (k, v), backward cp−1 of (k, v) and cp−1 of
         (dk, dv), each concurrent with a block of attention   (Liu et al., arXiv:2310.01889; zig-zag as in Llama 3)
ulysses  rank r holds the r-th of cp contiguous chunks; all_to_all of q, k, v and out between heads and tokens, of other
         token mixers of what their scans read and write   (Jacobs et al., arXiv:2309.14509); p2p of the tokens before
         a rank's own that a short convolution reads
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fivefold.layout.spec import Layout
from fivefold.model.mixers.geometry import MixerGeometry
from fivefold.trainer.model.attention_mask import AttentionMask, Heads
from fivefold.trainer.model.dropout import PROBABILITIES, place_in
from fivefold.trainer.model.flash_attention import (
    DropoutNoise,
    add_sinks,
    attend,
    attend_backward,
    sinks_backward,
)
from fivefold.trainer.model.mixers.heads import HeadShare
from fivefold.trainer.model.operation import exclude_from_graphs
from fivefold.trainer.parallel.collectives import all_to_all, exchange, sum_rows
from fivefold.trainer.parallel.mesh import AxisGroup
from fivefold.trainer.parallel.ring_blocks import Hops, list_hops, list_zigzag_positions


def list_positions(layout: Layout, *, rank: int, sequence: int) -> Tensor:
    """Return the positions of the tokens of a sequence that rank ``rank`` of cp holds, in its order: int64 [T / cp]."""
    if layout.context_parallelism.parts_per_rank == 1:
        return torch.arange(sequence).chunk(layout.cp)[rank]
    return list_zigzag_positions(ranks=layout.cp, rank=rank, sequence=sequence)


def attach(model: nn.Module, axis: AxisGroup, *, exchanges_heads: bool) -> None:
    """Make every attention in ``model`` (every module with a ``core``) attend to the keys of all ranks of ``axis``."""
    for attention in (module for module in model.modules() if hasattr(module, "core")):
        core: Any = attention.core
        if exchanges_heads:
            attention.hooks = Ulysses(axis)  # type: ignore[assignment]
            core.heads = core.heads._replace(rank=axis.rank, ranks=axis.size)
        else:
            attention.core = Ring(axis, core.rule, heads=core.heads)  # type: ignore[assignment]
    for mixer in (module for module in model.modules() if hasattr(module, "halo")):
        mixer.halo = TokenHalo(axis)  # type: ignore[assignment]
    for mixer in (module for module in model.modules() if isinstance(getattr(module, "shape", None), MixerGeometry)):
        mixer.hooks = MixerUlysses(axis)  # type: ignore[assignment]
        mixer.shape = cast(MixerGeometry, mixer.shape).shard(axis.size)  # type: ignore[assignment]
    for mixer in (module for module in model.modules() if hasattr(module, "sums_over_ranks")):
        cast(list[Any], mixer.sums_over_ranks).append(partial(sum_rows, axis))


class Ulysses:
    """DeepSpeed-Ulysses: each rank attends over full sequences with 1/cp of the heads, by the single-rank core.

    If cp does not divide the kv heads, they are repeated until it does. With fewer kv heads than ranks, each rank gets
    one.
    """

    def __init__(self, axis: AxisGroup) -> None:
        self.axis = axis

    @exclude_from_graphs
    def enter(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, ...]:
        """Exchange tokens for heads: each of q, k, v [B, T / cp, heads, H] → [B, T, heads / cp, H]."""
        heads = k_BTKH.shape[2]
        repeats = math.lcm(heads, self.axis.size) // heads
        if repeats > 1:
            k_BTKH = k_BTKH.repeat_interleave(repeats, dim=2)
            v_BTKH = v_BTKH.repeat_interleave(repeats, dim=2)
        return _AllToAll.apply(self.axis, _to_tokens, _to_heads, q_BTNH, k_BTKH, v_BTKH)

    @exclude_from_graphs
    def leave(self, out_BTNH: Tensor) -> Tensor:
        """Exchange heads for tokens: [B, T, N / cp, H] → [B, T / cp, N, H]."""
        (exchanged,) = _AllToAll.apply(self.axis, _to_heads, _to_tokens, out_BTNH)
        return exchanged


class MixerUlysses:
    """Ulysses of a token mixer: each rank mixes the tokens of full sequences with 1/cp of the heads or channels.

    The chain of states of a head runs through all tokens, so that heads are exchanged, as in Megatron-Core's
    ``ssm/mamba_context_parallel.py``.
    """

    def __init__(self, axis: AxisGroup) -> None:
        self.axis, self.share = axis, HeadShare(axis.rank, axis.size)

    @exclude_from_graphs
    def enter(self, tokens: int, *rows: Tensor, parts: Sequence[int] = ()) -> tuple[Tensor, ...]:
        """Exchange tokens for heads: each [B · T / cp, columns] → [B · T, columns / cp]; of columns in ``parts``."""
        there, back = (
            (_to_tokens, _to_heads)
            if not parts
            else (partial(_to_tokens_by_parts, parts=parts), partial(_to_heads_by_parts, parts=parts))
        )
        views = (x.view(-1, tokens, x.shape[1]) for x in rows)
        exchanged: tuple[Tensor, ...] = _AllToAll.apply(self.axis, there, back, *views)
        return tuple(x.flatten(0, 1) for x in exchanged)

    @exclude_from_graphs
    def leave(self, tokens: int, rows: Tensor) -> Tensor:
        """Exchange heads for tokens: [B · T, columns / cp] → [B · T / cp, columns]."""
        view = rows.view(-1, tokens * self.axis.size, rows.shape[1])
        (exchanged,) = _AllToAll.apply(self.axis, _to_heads, _to_tokens, view)
        return exchanged.flatten(0, 1)


class TokenHalo:
    """Exchanges the tokens at the edges of the contiguous chunk that each rank holds of every sequence.

    Messages go around, so that all ranks send equally: the first rank drops what the last one sends, and returns zeros.
    """

    def __init__(self, axis: AxisGroup) -> None:
        self.axis = axis

    def get_before(self, last: Tensor) -> Tensor:
        """Return the last tokens of the rank before this one; zeros at the first rank.

        ``last``: the last rows of this rank.
        """
        before = self._pass_on(last.contiguous(), 1)
        return before.zero_() if self.axis.rank == 0 else before

    def return_before(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's last tokens from the rank after it.

        ``gradient``: gradient of what ``get_before`` returned.
        """
        return self._pass_on(gradient.zero_() if self.axis.rank == 0 else gradient, -1)

    def _pass_on(self, x: Tensor, step: int) -> Tensor:
        arriving = torch.empty_like(x)
        place = self.axis.rank
        ranks = self.axis.size
        for pending in exchange([(x, (place + step) % ranks)], [(arriving, (place - step) % ranks)], self.axis):
            pending.wait()
        return arriving


Direction = Callable[[Tensor, AxisGroup], Callable[[], Tensor]]


class _AllToAll(torch.autograd.Function):
    """All-to-all of every tensor, all started before the first wait; the backward applies ``back`` to the gradients.

    A tensor without a gradient, such as the keys of a first block whose adapters are on the queries, has none after it:
    operations that read no other tensor keep nothing, and none is sent back.
    """

    @staticmethod
    def forward(ctx: Any, axis: AxisGroup, there: Direction, back: Direction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.back = axis, back
        started = [there(tensor, axis) for tensor in tensors]
        exchanged = tuple(finish() for finish in started)
        needed = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(x for x, is_needed in zip(exchanged, needed, strict=True) if not is_needed))
        ctx.set_materialize_grads(False)  # no gradients of zeros of those
        return exchanged

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        started = [None if gradient is None else ctx.back(gradient, ctx.axis) for gradient in gradients]
        return None, None, None, *(None if finish is None else finish() for finish in started)


def _to_tokens(x: Tensor, axis: AxisGroup) -> Callable[[], Tensor]:
    """Start the all-to-all [B, T / cp, N, H] → [B, T, N / cp, H]; return the function that waits for it."""
    pending = all_to_all(x.unflatten(2, (axis.size, -1)).movedim(2, 0), axis)
    return lambda: pending.wait().movedim(0, 1).flatten(1, 2)


def _to_heads(x: Tensor, axis: AxisGroup) -> Callable[[], Tensor]:
    """Start the all-to-all [B, T, N / cp, H] → [B, T / cp, N, H]; return the function that waits for it."""
    pending = all_to_all(x.unflatten(1, (axis.size, -1)).movedim(1, 0), axis)
    return lambda: pending.wait().movedim(0, 2).flatten(2, 3)


def _to_tokens_by_parts(x: Tensor, axis: AxisGroup, *, parts: Sequence[int]) -> Callable[[], Tensor]:
    """Start ``_to_tokens`` of [B, T / cp, columns], of which every rank gets its share of each of ``parts``."""
    sent = x.new_empty(axis.size, *x.shape[:2], x.shape[2] // axis.size)
    for rank in range(axis.size):
        torch.cat(HeadShare(rank, axis.size).take(x, parts, dim=2), dim=2, out=sent[rank])
    pending = all_to_all(sent, axis)
    return lambda: pending.wait().movedim(0, 1).flatten(1, 2)


def _to_heads_by_parts(x: Tensor, axis: AxisGroup, *, parts: Sequence[int]) -> Callable[[], Tensor]:
    """Start ``_to_heads`` of [B, T, columns / cp], the inverse of ``_to_tokens_by_parts``."""
    pending = all_to_all(x.unflatten(1, (axis.size, -1)).movedim(1, 0), axis)

    def finish() -> Tensor:
        received = pending.wait()
        joined = received.new_empty(*received.shape[1:3], sum(parts))
        for rank, columns in enumerate(received):
            shares = HeadShare(rank, axis.size).take(joined, parts, dim=2)
            for into, share in zip(shares, columns.split([part // axis.size for part in parts], dim=2), strict=True):
                into.copy_(share)
        return joined

    return finish


class Ring:
    """Ring attention: (k, v) travel from rank to rank, and each rank attends to the keys it currently holds.

    Saves q, k, v, out and lse for the backward.
    """

    def __init__(self, axis: AxisGroup, rule: AttentionMask, *, heads: Heads = Heads()) -> None:  # noqa: B008  frozen
        self.axis, self.rule, self.heads = axis, rule, heads

    @exclude_from_graphs
    def __call__(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
        keys_B: Tensor | None = None,
    ) -> Tensor:
        """Attend with q, k, v [B, T / cp, heads, H], tokens ordered as in ``list_positions`` → [B, T / cp, N, H of v].

        ``documents_BT``: document id of each token of the full sequences, preferably on the CPU; None: one document.
        """
        tokens = q_BTNH.shape[1]
        rule = self.rule.apply_dropout(tokens * self.axis.size, training=keys_B is not None)
        hops = list_hops(self.axis, rule, sequences=len(q_BTNH), tokens=tokens, documents_BT=documents_BT)
        noise = None
        if rule.dropout and keys_B is not None:
            place = place_in(rule.layer, PROBABILITIES)
            noise = DropoutNoise(keys_B, rule.dropout, place, self.heads.first_index(q_BTNH.shape[2]))
        return _Ring.apply(q_BTNH, k_BTKH, v_BTKH, sinks_N, self.axis, rule, hops, noise)


class _Hop:
    """One ring hop: isend ``buffer`` to the next rank and irecv a buffer of the same shape from the previous one."""

    def __init__(self, buffer: Tensor, axis: AxisGroup) -> None:
        self._sent, self._coming = buffer, torch.empty_like(buffer)
        after = (axis.rank + 1) % axis.size
        before = (axis.rank - 1) % axis.size
        self._works = exchange([(buffer, after)], [(self._coming, before)], axis)

    def wait(self) -> Tensor:
        """Wait for both messages; return the received buffer."""
        for work in self._works:
            work.wait()
        return self._coming


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        axis: AxisGroup,
        rule: AttentionMask,
        hops: Hops,
        noise: DropoutNoise | None,
    ) -> Tensor:
        ctx.axis, ctx.rule, ctx.hops, ctx.noise = axis, rule, hops, noise
        kv = _pack(k, v)
        out, lse = torch.empty(0), torch.empty(0)
        for hop_index, blocks in enumerate(hops):
            hop = _Hop(kv, axis) if hop_index < len(hops) - 1 else None
            ks, vs = _unpack(kv, k, v)
            for ring_block in blocks:
                queries, keys, offset, spans = ring_block[:4]
                block, block_lse = attend(
                    q[:, queries],
                    ks[:, keys],
                    vs[:, keys],
                    rule,
                    offset=offset,
                    spans=spans,
                    noise=ring_block.noise(noise),
                )
                if not lse.numel():
                    out, lse = block.to(block_lse.dtype), block_lse
                else:
                    _merge(out[:, queries], lse[:, queries], block, block_lse)
                del block, block_lse
            kv = hop.wait() if hop is not None else kv
        if sinks is not None:
            add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        axis: AxisGroup = ctx.axis
        d_sinks = None if sinks is None else sinks_backward(gradient, out, lse, sinks)
        kv, gradient = _pack(k, v), gradient.contiguous()
        dq, local_dkv = torch.empty(0), torch.empty(0)
        outgoing: _Hop | None = None  # (dk, dv) summed so far, for the keys of the previous step
        for hop_index, blocks in enumerate(ctx.hops):
            hop = _Hop(kv, axis) if hop_index < axis.size - 1 else None
            ks, vs = _unpack(kv, k, v)
            dkv = local_dkv if hop_index == 0 else None
            for ring_block in blocks:
                queries, keys, offset, spans = ring_block[:4]
                block_dq, dk, dv = attend_backward(
                    gradient[:, queries],
                    q[:, queries],
                    ks[:, keys],
                    vs[:, keys],
                    out[:, queries],
                    lse[:, queries],
                    ctx.rule,
                    offset=offset,
                    spans=spans,
                    noise=ring_block.noise(ctx.noise),
                )
                if not dq.numel():  # gradients of this rank's (k, v): no hop needed
                    dq, local_dkv = block_dq.to(lse.dtype), _pack(dk, dv)
                    dkv = local_dkv
                    continue
                dq[:, queries] += block_dq
                dkv = _receive_sums(outgoing, like=kv) if dkv is None else dkv
                for total, block_gradient in zip(_unpack(dkv, k, v), (dk, dv), strict=True):
                    total[:, keys] += block_gradient
            if hop_index:
                outgoing = _Hop(_receive_sums(outgoing, like=kv) if dkv is None else dkv, axis)
            kv = hop.wait() if hop is not None else kv
        if outgoing is not None:
            local_dkv += outgoing.wait()
        return dq.to(q.dtype), *_unpack(local_dkv, k, v), d_sinks, None, None, None, None


def _receive_sums(going: _Hop | None, *, like: Tensor) -> Tensor:
    """Return the gradient sums that the previous rank sent on, or zeros on the first rank that adds to them."""
    return torch.zeros_like(like) if going is None else going.wait()


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Concatenate k and v into one flat buffer, so that a hop is one message."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpack(pair: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return pair[: k.numel()].view(k.shape), pair[k.numel() :].view(v.shape)


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge a block of attention into ``out`` and ``lse`` in place, each weighted by exp(lse) over the sum of both."""
    merged_lse = torch.logaddexp(lse, block_lse)
    out.mul_((lse - merged_lse).exp_()[..., None]).addcmul_(block, (block_lse - merged_lse).exp_()[..., None])
    lse.copy_(merged_lse)
