"""The delta rule in a group of chunks of T tokens, as Gated DeltaNets and Kimi delta attention apply it.

    S ← γ S        S ← S + β k (v − k S)        o = q S        per head

With the triangle A = I + (β k · kᵀ, decayed, below its diagonal) of each chunk, its corrected values are

    values = A⁻¹ β v − A⁻¹ (β k e^decay) S[c]        S[c + 1] = e^last S[c] + (k e^(last − decay))ᵀ values

decay: its log since the start of the chunk, last: that of the last token. The inverses and the products with them are
computed of all chunks at once; states and corrected values then chunk after chunk, as flash-linear-attention does
(fla-org/flash-linear-attention@0395eef:fla/ops/common/chunk_delta_h.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.mixers.gated_delta_net import DELTA_CHUNK
from fivefold.trainer.model.mixers.convolution import get_sum_dtype

UNIT_EPSILON = 1e-6  # of the lengths of queries and keys, as in flash-linear-attention


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return ``x`` [B, tokens, heads · dim] as [chunks, B, heads, T, dim] in the dtype of sums, contiguous."""
    view: Tensor = x.unflatten(1, (-1, min(DELTA_CHUNK, x.shape[1]))).unflatten(-1, (heads, -1)).permute(1, 0, 3, 2, 4)
    # the cast copies, if there is one
    return view.to(get_sum_dtype(x.dtype), memory_format=torch.contiguous_format).contiguous()


def compute_beta(b: Tensor, *, negative_eigenvalues: bool = False) -> Tensor:
    """Return β, how much of a token's value is written: between 0 and 1, or 2 with negative eigenvalues."""
    beta = b.sigmoid()
    return beta * 2 if negative_eigenvalues else beta


def compute_decay(x: Tensor, a_log: Tensor, dt_bias: Tensor, *, lower_bound: float | None = None) -> Tensor:
    """Return the log of the decay of each token: −e^a_log · softplus(x + dt_bias).

    With ``lower_bound`` it is lower_bound · σ(e^a_log · (x + dt_bias)). ``a_log`` and ``dt_bias`` are cast to the dtype
    of ``x`` and broadcast to its shape.
    """
    logits, rates = x + dt_bias.to(x.dtype), a_log.to(x.dtype).exp()
    return F.softplus(logits) * -rates if lower_bound is None else (logits * rates).sigmoid() * lower_bound


def apply_delta_rule(
    lefts: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    products: Sequence[Tensor],
    state: Tensor | None,
    *,
    is_last: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, tokens, heads · value dim] of a group, and the state after it, None if it is the last.

    ``lefts``: β k, and queries unless only the state is computed, [chunks, B, heads, T, dim]; ``products``: products of
    each with the decayed keys before it, [chunks, B, heads, T, T]. ``beta`` [chunks, B, heads, T, 1]; ``decay``: its
    log since the start of the chunk, [chunks, B, heads, T, dim], or 1 instead of dim.
    """
    inverse, corrected = invert_unit_lower(products[0]), v * beta
    from_start, last = decay.exp(), decay[..., -1:, :]
    before: Tensor | None = None
    after: Tensor | None = None
    if len(v) > 1:
        keys, reads = k * (last - decay).exp(), inverse @ (lefts[0] * from_start)
        values, before, after = hand_on_states(inverse @ corrected, reads, keys, last.exp().mT, state, is_last=is_last)
    else:
        if state is not None:
            before = state[None]
            corrected = corrected - (lefts[0] * from_start) @ before
        values = inverse @ corrected
        if not is_last:
            after = ((k * (last - decay).exp()).mT @ values)[0]
            after = after if state is None else after + state * last[0].exp().mT
    if len(lefts) == 1:
        return v, after
    out = products[1] @ values
    if before is not None:
        out = out + (lefts[1] * from_start) @ before
    return out.permute(1, 0, 3, 2, 4).flatten(3).flatten(1, 2), after


def hand_on_states(
    values: Tensor, reads: Tensor, keys: Tensor, decays: Tensor, state: Tensor | None, *, is_last: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return corrected values, the states before each chunk, and the state after the group, None if it is the last.

        values[c] ← values[c] − reads[c] S[c]        S[c + 1] = decays[c] S[c] + keys[c]ᵀ values[c]

    ``values`` [chunks, B, heads, T, value dim], which is overwritten; ``reads`` and ``keys`` [chunks, B, heads, T, key
    dim]; ``decays`` [chunks, B, heads, key dim or 1, 1]; ``state`` [B, heads, key dim, value dim], None: zero.
    """
    corrected, before, after = _HandOn.apply(values, reads, keys, decays, state, is_last)
    return corrected, before, None if is_last else after


class _HandOn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, reads: Tensor, keys: Tensor, decays: Tensor, state: Tensor | None, is_last: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.mark_dirty(values)
        chunks, *heads = values.shape[:3]
        states = values.new_empty(chunks, *heads, reads.shape[-1], values.shape[-1])
        if state is None:
            states[0].zero_()
        else:
            states[0].copy_(state)
        # not one of ``states``: a view would keep all of them
        after = None if is_last else torch.empty_like(states[0])
        for index in range(chunks):
            _flatten(values[index]).baddbmm_(_flatten(reads[index]), _flatten(states[index]), alpha=-1)
            into = states[index + 1] if index + 1 < chunks else after
            if into is not None:
                torch.mul(states[index], decays[index], out=into)
                _flatten(into).baddbmm_(_flatten(keys[index]).mT, _flatten(values[index]))
        ctx.save_for_backward(values, reads, keys, decays, states)
        ctx.has_state = state is not None
        return values, states, after

    @staticmethod
    def backward(ctx: Any, grad: Tensor, states_grad: Tensor, after_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        values, reads, keys, decays, states = ctx.saved_tensors
        values_grad, after_grads = torch.empty_like(values), torch.empty_like(states)  # of the state after each chunk
        if after_grad is None:
            after_grads[-1].zero_()
        else:
            after_grads[-1].copy_(after_grad)
        state_grad = torch.empty_like(states[0]) if ctx.has_state else None
        for index in reversed(range(len(values))):
            after = _flatten(after_grads[index])
            torch.baddbmm(_flatten(grad[index]), _flatten(keys[index]), after, out=_flatten(values_grad[index]))
            into = after_grads[index - 1] if index else state_grad
            if into is not None:
                torch.addcmul(states_grad[index], after_grads[index], decays[index], out=into)
                _flatten(into).baddbmm_(_flatten(reads[index]).mT, _flatten(values_grad[index]), alpha=-1)
        reads_grad = (values_grad @ states.mT).neg_()
        decays_grad = (after_grads * states).sum_to_size(decays.shape)
        return values_grad, reads_grad, values @ after_grads.mT, decays_grad, state_grad, None


def _flatten(x: Tensor) -> Tensor:
    """Return a view [B · heads, ·, ·] of ``x`` [B, heads, ·, ·], all of whose dims are contiguous."""
    return x.view(-1, *x.shape[2:])


def normalize_to_unit_length(x: Tensor) -> Tensor:
    """Return ``x`` divided by its length along the last dim."""
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPSILON).rsqrt()


def invert_unit_lower(matrix: Tensor) -> Tensor:
    """Return the inverse of I + the part of ``matrix`` [..., C, C] below the diagonal."""
    return _UnitLowerInverse.apply(matrix)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        inverse: Tensor = torch.linalg.solve_triangular(matrix, identity, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        inner: Tensor = grad @ inverse.mT
        product: Tensor = inverse.mT @ inner
        return product.tril_(-1).neg_()
