"""Rotary embedding of some dims of every head; the others are copied. A program computes all heads of one token.

y_i = x_i · cos_i + x_(i ± h/2) · sin_i over the h rotated dims, with the tables ``cos | cos`` and ``−sin | sin``
"""

import triton
import triton.language as tl


@triton.jit
def turn(
    x,
    cos,
    sin,
    y,
    tokens,
    heads,
    dim,
    first,
    turned,
    x_sequence,
    x_token,
    x_head,
    sign,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate ``x`` [B, T, heads, dim], given by strides, into contiguous ``y``.

    The dims [first, first + turned) are rotated; ``sign`` −1: by the inverse.
    """
    token = tl.program_id(0).to(tl.int64)
    sequence, place = token // tokens, token % tokens
    head = tl.arange(0, HEADS)
    source = x + sequence * x_sequence + place * x_token + head[:, None] * x_head
    target = y + (token * heads + head[:, None]) * dim
    half = turned // 2
    pair = tl.arange(0, HALF)
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    low = tl.load(source + first + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + first + half + pair[None, :], mask=inside, other=0.0).to(tl.float32)
    table = place * turned + pair
    cos_low = tl.load(cos + table, mask=pair < half, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + table + half, mask=pair < half, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + table, mask=pair < half, other=0.0).to(tl.float32) * sign
    sin_high = tl.load(sin + table + half, mask=pair < half, other=0.0).to(tl.float32) * sign
    out_low = low * cos_low[None, :] + high * sin_low[None, :]
    out_high = high * cos_high[None, :] + low * sin_high[None, :]
    tl.store(target + first + pair[None, :], out_low.to(y.dtype.element_ty), mask=inside)
    tl.store(target + first + half + pair[None, :], out_high.to(y.dtype.element_ty), mask=inside)
    if REST > 0:
        unrotated_dims = tl.arange(0, REST)
        unrotated_dims = tl.where(unrotated_dims < first, unrotated_dims, unrotated_dims + turned)
        copy_mask = (head < heads)[:, None] & (unrotated_dims < dim)[None, :]
        copied_values = tl.load(source + unrotated_dims[None, :], mask=copy_mask)
        tl.store(target + unrotated_dims[None, :], copied_values, mask=copy_mask)
