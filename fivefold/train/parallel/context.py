"""Context parallelism: each rank of cp holds 1/cp of the tokens of every sequence; only attention communicates.

ring     rank r holds chunks r and 2cp−1−r of 2cp; forward cp−1 p2p of (k, v), backward cp−1 of (k, v) and cp−1
         of (dk, dv), each beside a block of attention      (Liu et al., arXiv:2310.01889; zig-zag as in Llama 3)
ulysses  rank r holds the r-th of cp contiguous chunks; all_to_all of q, k, v and out between heads and tokens
         (Jacobs et al., arXiv:2309.14509)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fivefold.layout.spec import Layout
from fivefold.train.model.flash_attention import Span, across, attend, attend_backward, within
from fivefold.train.parallel.collectives import all_to_all, exchange
from fivefold.train.parallel.mesh import Axis

Kind = Literal["ring", "ulysses"]


def positions(layout: Layout, *, rank: int, sequence: int) -> Tensor:
    """Positions of the tokens of a sequence that rank ``rank`` of cp holds, in its order: int64 [T / cp]."""
    return _own_positions(layout.cp_kind, ranks=layout.cp, rank=rank, sequence=sequence)


def _own_positions(kind: Kind, *, ranks: int, rank: int, sequence: int) -> Tensor:
    if kind == "ulysses":
        return torch.arange(sequence).chunk(ranks)[rank]
    chunks = torch.arange(sequence).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def attach(model: nn.Module, axis: Axis, *, kind: Kind) -> None:
    """Make every attention in ``model`` (every module with a ``core``) attend to the keys of all ranks of ``axis``."""
    for attention in (module for module in model.modules() if hasattr(module, "core")):
        if kind == "ring":
            attention.core = Ring(axis, scale=attention.scale)  # type: ignore[assignment, arg-type]
        else:
            attention.hooks = Ulysses(axis)  # type: ignore[assignment]


class Ulysses:
    """DeepSpeed-Ulysses: each rank attends over whole sequences with 1/cp of the heads, by the single-rank core.

    If cp does not divide the kv heads, they are repeated until it does (fewer heads than ranks: to one per rank).
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor) -> tuple[Tensor, ...]:
        """[B, T / cp, heads, H] each → [B, T, heads / cp, H]."""
        heads = k_BTKH.shape[2]
        times = math.lcm(heads, self.axis.size) // heads
        if times > 1:
            k_BTKH, v_BTKH = k_BTKH.repeat_interleave(times, dim=2), v_BTKH.repeat_interleave(times, dim=2)
        found: tuple[Tensor, ...] = _AllToAll.apply(self.axis, _to_tokens, _to_heads, q_BTNH, k_BTKH, v_BTKH)  # type: ignore[no-untyped-call]
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, out_BTNH: Tensor) -> Tensor:
        """[B, T, N / cp, H] → [B, T / cp, N, H]."""
        (back,) = _AllToAll.apply(self.axis, _to_heads, _to_tokens, out_BTNH)  # type: ignore[no-untyped-call]
        found: Tensor = back
        return found


Direction = Callable[[Tensor, Axis], Callable[[], Tensor]]


class _AllToAll(torch.autograd.Function):
    """all_to_all of every tensor, all started before the first wait; the backward applies ``back`` to the gradients."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, there: Direction, back: Direction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.back = axis, back
        started = [there(tensor, axis) for tensor in tensors]
        return tuple(finish() for finish in started)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        started = [ctx.back(gradient, ctx.axis) for gradient in gradients]
        return None, None, None, *(finish() for finish in started)


def _to_tokens(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """[B, T / cp, N, H] → [B, T, N / cp, H]."""
    pending = all_to_all(x.unflatten(2, (axis.size, -1)).movedim(2, 0), axis)
    return lambda: pending.wait().movedim(0, 1).flatten(1, 2)


def _to_heads(x: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """[B, T, N / cp, H] → [B, T / cp, N, H]."""
    pending = all_to_all(x.unflatten(1, (axis.size, -1)).movedim(1, 0), axis)
    return lambda: pending.wait().movedim(0, 2).flatten(2, 3)


class Ring:
    """Ring attention: (k, v) go from rank to rank, each attends to those it has. Saves q, k, v, out and lse."""

    def __init__(self, axis: Axis, *, scale: float | None = None) -> None:
        self.axis, self.scale = axis, scale

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """q, k, v [B, T / cp, heads, H], tokens in the order of ``positions`` → [B, T / cp, N, H of v].

        ``documents_BT``: document id of each token of the whole sequences, preferably on the CPU; None: one document.
        """
        steps = _ring_steps(self.axis, tokens=q_BTNH.shape[1], documents_BT=documents_BT)
        out: Tensor = _Ring.apply(q_BTNH, k_BTKH, v_BTKH, self.axis, self.scale, steps)  # type: ignore[no-untyped-call]
        return out


class _RingStep(NamedTuple):
    """One step: which own queries attend to which of the keys here, as tokens; ``spans``: the document mask."""

    queries: slice
    keys: slice
    causal: bool
    spans: tuple[Span, ...] | None


def _ring_steps(axis: Axis, *, tokens: int, documents_BT: Tensor | None) -> list[_RingStep]:
    """The steps of rank r, one per rank of cp: at step i the keys of rank r − i are here.

    The first chunk of a lower rank precedes both of our chunks and its second follows both; the two chunks of a higher
    rank lie between ours. So every rank computes half of its score matrix at every step: the work is balanced.
    """
    first, second, both = slice(0, tokens // 2), slice(tokens // 2, tokens), slice(0, tokens)
    found = [_RingStep(both, both, True, None)]
    found += [_RingStep(both, first, False, None)] * axis.rank
    found += [_RingStep(second, both, False, None)] * (axis.size - 1 - axis.rank)
    if documents_BT is None:
        return found
    whole = tokens * axis.size
    ids = [
        documents_BT[:, _own_positions("ring", ranks=axis.size, rank=rank, sequence=whole)] for rank in range(axis.size)
    ]
    own = ids[axis.rank]
    return [
        steps._replace(
            spans=within(own) if steps.causal else across(own[:, steps.queries], ids[axis.rank - step][:, steps.keys])
        )
        for step, steps in enumerate(found)
    ]


class _Hop:
    """One ring hop: isend ``buffer`` to the next rank, irecv a buffer of the same shape from the previous one."""

    def __init__(self, buffer: Tensor, axis: Axis) -> None:
        self._sent, self._coming = buffer, torch.empty_like(buffer)
        after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        self._works = exchange([(buffer, after)], [(self._coming, before)], axis)

    def wait(self) -> Tensor:
        """Wait for both messages; return the received buffer."""
        for work in self._works:
            work.wait()
        return self._coming


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, scale: float | None, steps: list[_RingStep]
    ) -> Tensor:
        ctx.axis, ctx.scale, ctx.steps = axis, scale, steps
        pair = _pack(k, v)
        out, lse = torch.empty(0), torch.empty(0)
        for step, (queries, keys, causal, spans) in enumerate(steps):
            hop = _Hop(pair, axis) if step < len(steps) - 1 else None
            ks, vs = _unpack(pair, k, v)
            block, block_lse = attend(q[:, queries], ks[:, keys], vs[:, keys], causal=causal, scale=scale, spans=spans)
            if step == 0:
                out, lse = block.to(block_lse.dtype), block_lse
            else:
                _merge(out[:, queries], lse[:, queries], block, block_lse)
            pair = hop.wait() if hop is not None else pair
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis: Axis = ctx.axis
        pair, gradient = _pack(k, v), gradient.contiguous()
        dq, home = torch.empty(0), torch.empty(0)
        going: _Hop | None = None  # (dk, dv) summed so far, for the keys of the previous step
        for step, (queries, keys, causal, spans) in enumerate(ctx.steps):
            hop = _Hop(pair, axis) if step < axis.size - 1 else None
            ks, vs = _unpack(pair, k, v)
            dq_here, dk, dv = attend_backward(
                gradient[:, queries], q[:, queries], ks[:, keys], vs[:, keys], out[:, queries], lse[:, queries],
                causal=causal, scale=ctx.scale, spans=spans,
            )  # fmt: skip
            if step == 0:
                dq, home = dq_here.to(lse.dtype), _pack(dk, dv)  # gradients of this rank's own (k, v): no hop needed
            else:
                dq[:, queries] += dq_here
                sums = torch.zeros_like(pair) if going is None else going.wait()
                for total, part in zip(_unpack(sums, k, v), (dk, dv), strict=True):
                    total[:, keys] += part
                going = _Hop(sums, axis)
            pair = hop.wait() if hop is not None else pair
        if going is not None:
            home += going.wait()
        return dq.to(q.dtype), *_unpack(home, k, v), None, None, None


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """Concatenate k and v into one flat buffer, so that a hop is one message."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpack(pair: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return pair[: k.numel()].view(k.shape), pair[k.numel() :].view(v.shape)


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge a block of attention into ``out`` and ``lse`` in place: each part weighs exp(lse) over the sum of both."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_((lse - both).exp_()[..., None]).addcmul_(block, (block_lse - both).exp_()[..., None])
    lse.copy_(both)
