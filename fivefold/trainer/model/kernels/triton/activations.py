"""Activations and their products with ``up``, elementwise in fp32, and their gradients.

plain    y = f(u)        gated    y = f(g) · u        weighted    y = f(g) · u · share of the row
"""

import triton
import triton.language as tl

from fivefold.trainer.model.kernels import kinds

SILU = tl.constexpr(kinds.SILU)
GELU = tl.constexpr(kinds.GELU)
GELU_TANH = tl.constexpr(kinds.GELU_TANH)
SQUARED_RELU = tl.constexpr(kinds.SQUARED_RELU)
CLAMPED_SWIGLU = tl.constexpr(kinds.CLAMPED_SWIGLU)
INPUT_WEIGHTED_SILU = tl.constexpr(kinds.INPUT_WEIGHTED_SILU)


@triton.jit
def _value(x, KIND: tl.constexpr):
    """f(x)."""
    if KIND == SILU or KIND == INPUT_WEIGHTED_SILU:  # noqa: SIM109 (Triton has no "in")
        y = x * tl.sigmoid(x)
    elif KIND == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == GELU_TANH:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # ½(1 + tanh z) = σ(2z)
    else:
        tl.static_assert(KIND == SQUARED_RELU)
        kept = tl.maximum(x, 0.0)
        y = kept * kept
    return y


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """f′(x)."""
    if KIND == SILU or KIND == INPUT_WEIGHTED_SILU:  # noqa: SIM109 (Triton has no "in")
        sigmoid = tl.sigmoid(x)
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == GELU:
        slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == GELU_TANH:
        sigmoid = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
    else:
        tl.static_assert(KIND == SQUARED_RELU)
        slope = 2.0 * tl.maximum(x, 0.0)
    return slope


@triton.jit
def _factors(g, u, KIND: tl.constexpr):
    """The two factors of a gated activation: f(g) and u; CLAMPED_SWIGLU: g σ(1.702 g) and u + 1 of clamped g and u."""
    if KIND == CLAMPED_SWIGLU:
        low = tl.minimum(g, 7.0)
        value, factor = low * tl.sigmoid(1.702 * low), tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0
    else:
        value, factor = _value(g, KIND), u
    return value, factor


@triton.jit
def _slopes(g, u, KIND: tl.constexpr):
    """Derivatives of the two factors."""
    if KIND == CLAMPED_SWIGLU:
        low = tl.minimum(g, 7.0)
        sigmoid = tl.sigmoid(1.702 * low)
        slope = tl.where(g > 7.0, 0.0, sigmoid * (1.0 + 1.702 * low * (1.0 - sigmoid)))
        up_slope = tl.where(tl.abs(u) > 7.0, 0.0, 1.0)
    else:
        slope, up_slope = _slope(g, KIND), tl.full(u.shape, 1.0, tl.float32)
    return slope, up_slope


@triton.jit
def plain(x, y, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """y = f(x)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
    tl.store(y + place, _value(value, KIND).to(y.dtype.element_ty), mask=place < numel)


@triton.jit
def plain_backward(gradient, x, dx, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """dx = g · f′(x)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    back = tl.load(gradient + place, mask=place < numel, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
    tl.store(dx + place, (back * _slope(value, KIND)).to(dx.dtype.element_ty), mask=place < numel)


@triton.jit
def gated(gate, up, y, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """y = f(gate) · up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    value, factor = _factors(g, u, KIND)
    tl.store(y + place, (value * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(gradient, gate, up, gate_gradient, up_gradient, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of gate and up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    back = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    value, factor = _factors(g, u, KIND)
    slope, up_slope = _slopes(g, u, KIND)
    dtype = up_gradient.dtype.element_ty
    tl.store(up_gradient + place, (back * value * up_slope).to(dtype), mask=inside)
    tl.store(gate_gradient + place, (back * factor * slope).to(dtype), mask=inside)


@triton.jit
def weighted(gate, up, share, y, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """y = f(gate) · up · share; a program computes ``BLOCK`` columns of a row.

    INPUT_WEIGHTED_SILU: gate and up are multiplied by share before f.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < width, row * width + column
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(share + row).to(tl.float32)
    if KIND == INPUT_WEIGHTED_SILU:
        weight = weight.to(y.dtype.element_ty).to(tl.float32)  # rounded, as the eager one is
        g *= weight
    value, factor = _factors(g, u, KIND)
    tl.store(y + place, (value * factor * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def weighted_backward(
    gradient, gate, up, share, gate_gradient, up_gradient, share_gradient, width,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of gate, up and share; a program walks along a row, whose sum is the gradient of its share."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(share + row).to(tl.float32)
    summed = tl.zeros([BLOCK], dtype=tl.float32)
    dtype = up_gradient.dtype.element_ty
    if KIND == INPUT_WEIGHTED_SILU:
        weight = weight.to(dtype).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, place = column < width, row * width + column
        back = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        if KIND == INPUT_WEIGHTED_SILU:
            value, factor = _factors(g * weight, u * weight, KIND)
            slope, up_slope = _slopes(g * weight, u * weight, KIND)
            summed += back * (value * u + factor * slope * g)
        else:
            value, factor = _factors(g, u, KIND)
            slope, up_slope = _slopes(g, u, KIND)
            summed += back * value * factor
        back *= weight
        tl.store(up_gradient + place, (back * value * up_slope).to(dtype), mask=inside)
        tl.store(gate_gradient + place, (back * factor * slope).to(dtype), mask=inside)
    tl.store(share_gradient + row, tl.sum(summed, axis=0))
