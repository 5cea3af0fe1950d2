"""RMSNorm and LayerNorm: a program computes ``TILE`` full rows of ``BLOCK`` ≥ D columns, in fp32.

    forward     n = (x − mean) · rstd, y = n · w + b
    backward    dx = (g · w − mean(g · w) − n · mean(g · w · n)) · rstd, dw = Σ g · n, db = Σ g

RMSNorm has no first two means. A program of the backward sums dw and db of its rows into one row of ``partial``.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    x,
    weight,
    bias,
    y,
    rstds,
    means,
    rows,
    width,
    stride,
    epsilon,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the norm of ``TILE`` rows.

    ``CENTERED``: LayerNorm, which has ``means``. ``WEIGHTED``: else w is 1. ``PLUS_ONE``: w is 1 + ``weight``.
    """
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHTED:
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    if CENTERED:
        mean = tl.sum(value, axis=1) / width
        value = tl.where(inside, value - mean[:, None], 0.0)
        tl.store(means + row, mean, mask=row < rows)
    rstd = tl.rsqrt(tl.sum(value * value, axis=1) / width + epsilon)
    tl.store(rstds + row, rstd, mask=row < rows)
    normal = (value * rstd[:, None]).to(y.dtype.element_ty).to(tl.float32)  # rounded like the eager kernel's
    out = normal * scale[None, :]
    if BIASED:
        out += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * width + column[None, :], out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    gradient,
    x,
    weight,
    rstds,
    means,
    dx,
    partial,
    rows,
    width,
    gradient_stride,
    stride,
    CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of every tile of this program, one in ``num_programs``.

    ``partial`` [programs, 1 or 2, D] gets the program's dw, and db if ``BIASED``.
    """
    column = tl.arange(0, BLOCK)
    scale = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHTED:
        scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, TILE), tl.num_programs(0)):
        row = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(gradient + row[:, None] * gradient_stride + column[None, :], mask=inside, other=0.0)
        dy = dy.to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
        if CENTERED:
            value = tl.where(inside, value - tl.load(means + row, mask=row < rows, other=0.0)[:, None], 0.0)
        normal = value * rstd[:, None]
        if BIASED:
            db += tl.sum(dy, axis=0)
        dw += tl.sum(dy * normal, axis=0)
        weighted_dy = dy * scale[None, :]
        out = weighted_dy - normal * (tl.sum(weighted_dy * normal, axis=1) / width)[:, None]
        if CENTERED:
            out -= (tl.sum(weighted_dy, axis=1) / width)[:, None]
        out *= rstd[:, None]
        tl.store(dx + row[:, None] * width + column[None, :], out.to(dx.dtype.element_ty), mask=inside)
    if BIASED:
        place = partial + tl.program_id(0) * 2 * width + column
        tl.store(place + width, db, mask=column < width)
    else:
        place = partial + tl.program_id(0) * width + column
    if WEIGHTED:
        tl.store(place, dw, mask=column < width)
