"""Rotary embedding of some dims of every head; the others are copied. A program computes all heads of one token.

y_i = x_i · cos_i + x_(i ± h/2) · sin_i over the h rotated dims, with the tables ``cos | cos`` and ``−sin | sin``
"""

import triton
import triton.language as tl


@triton.jit
def turn(
    x, cos, sin, y, tokens, heads, dim, first, turned, x_sequence, x_token, x_head, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """``x`` [B, T, heads, dim] by strides → contiguous ``y``. Dims [first, first + turned) turn; ``sign`` −1: back."""
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
        other = tl.arange(0, REST)
        other = tl.where(other < first, other, other + turned)
        copied = (head < heads)[:, None] & (other < dim)[None, :]
        kept = tl.load(source + other[None, :], mask=copied)
        tl.store(target + other[None, :], kept, mask=copied)
