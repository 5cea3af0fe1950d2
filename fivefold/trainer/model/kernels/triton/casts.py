"""Casts to fp8 with scales, in fp32: a program casts ``HEIGHT`` rows, ``BLOCK`` columns at a time.

    factor = maximum of the format / largest |x| of the part      data = fp8(clamp(x · factor)), scale = 1 / factor

The largest is taken over the bits of |x|, which have the order of the numbers and NaN last, so that NaN is kept.
``ROUND``: bits of mantissa to round to first, in Triton's interpreter, whose conversion loses carries; 0: none.
"""

import triton
import triton.language as tl


@triton.jit
def _row_amax(source, inside, first, end, column_stride, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bits [HEIGHT, 1] of the largest |x| of each row in columns ``first`` to ``end``."""
    bits = tl.zeros([HEIGHT, 1], tl.int32)
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = inside[:, None] & (column < end)[None, :]
        value = tl.load(source + column[None, :] * column_stride, mask=mask, other=0.0).to(tl.float32)
        value_bits = tl.abs(value).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, tl.max(value_bits, axis=1, keep_dims=True))
    return bits


@triton.jit
def _factor(bits, top, POWERS: tl.constexpr):
    """Return the factor of parts with the largest |x| ``bits``.

    It uses at least 1e-12 of it, so that zeros have a factor.
    """
    amax = bits.to(tl.float32, bitcast=True).to(tl.float64)
    min_amax = tl.full(amax.shape, 1e-12, tl.float64)
    factor = (top / tl.where(amax < min_amax, min_amax, amax)).to(tl.float32)
    if POWERS:
        power = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        factor = tl.where(factor == factor, power, factor)
    return factor


@triton.jit
def _round(value, SMALLEST: tl.constexpr, MANTISSA: tl.constexpr):
    """Round to the nearest number of ``MANTISSA`` bits, ties to even; ``SMALLEST``: exponent of normal numbers."""
    bits = value.to(tl.int32, bitcast=True)
    dropped_bits: tl.constexpr = 23 - MANTISSA
    rounded_bits = (
        (bits + ((bits >> dropped_bits) & 1) + ((1 << (dropped_bits - 1)) - 1)) >> dropped_bits << dropped_bits
    )
    magnitude, magic = tl.abs(value), 2.0 ** (SMALLEST + dropped_bits)
    subnormal = (magnitude + magic) - magic
    subnormal = tl.where(value < 0, -subnormal, subnormal)
    out = tl.where(magnitude < 2.0**SMALLEST, subnormal, rounded_bits.to(tl.float32, bitcast=True))
    nan = (bits * 0 + (0x7F800000 | ((1 << MANTISSA) - 1) << dropped_bits)).to(tl.float32, bitcast=True)
    return tl.where(value == value, out, nan)


@triton.jit
def cast(
    x,
    known,
    data,
    scales,
    rows,
    columns,
    matrix_stride,
    row_stride,
    column_stride,
    width,
    top,
    known_stride,
    SHARED: tl.constexpr,
    KNOWN: tl.constexpr,
    POWERS: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROUND: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast parts of ``width`` columns: of one row each, of ``HEIGHT`` rows if ``SHARED``.

    ``KNOWN``: ``known`` has the largest |x| of each matrix, as bits.
    """
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    first = tl.program_id(1) * width
    end = tl.minimum(first + width, columns)
    source = x + matrix * matrix_stride + row[:, None] * row_stride
    if KNOWN:
        bits = tl.load(known + matrix * known_stride + tl.zeros([1, 1], tl.int32))
    else:
        bits = _row_amax(source, row < rows, first, end, column_stride, HEIGHT, BLOCK)
        if SHARED:
            bits = tl.max(bits, axis=0, keep_dims=True)
    factor = _factor(bits, top, POWERS)
    scale = (1.0 / factor.to(tl.float64)).to(tl.float32)
    if KNOWN:
        place = matrix * known_stride + tl.zeros([1, 1], tl.int64)
        tl.store(scales + place, scale, mask=place + tl.program_id(0) + tl.program_id(1) == matrix * known_stride)
    elif SHARED:
        place = (matrix * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
        tl.store(scales + place + tl.zeros([1, 1], tl.int64), scale)
    else:
        place = (matrix * rows + row) * tl.num_programs(1) + tl.program_id(1)
        tl.store(scales + place[:, None], scale, mask=(row < rows)[:, None])
    for start in range(first, end, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = (row < rows)[:, None] & (column < end)[None, :]
        value = tl.load(source + column[None, :] * column_stride, mask=inside, other=0.0).to(tl.float32) * factor
        value = tl.where(value > top, top, tl.where(value < -top, -top, value))
        if ROUND:
            value = _round(value, SMALLEST, ROUND)
        place = (matrix * rows + row[:, None]) * columns + column[None, :]
        tl.store(data + place, value.to(data.dtype.element_ty), mask=inside)


@triton.jit
def block_amax(
    x, partial, rows, columns, matrix_stride, row_stride, column_stride, HEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write to ``partial`` [matrices, programs] the bits of the largest |x| of ``HEIGHT`` rows each."""
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    source = x + matrix * matrix_stride + row[:, None] * row_stride
    bits = _row_amax(source, row < rows, 0, columns, column_stride, HEIGHT, BLOCK)
    tl.store(partial + matrix * tl.num_programs(0) + tl.program_id(0), tl.max(tl.max(bits, axis=1), axis=0))
