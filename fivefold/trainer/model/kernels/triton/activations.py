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
    """Return f(x)."""
    if KIND == SILU or KIND == INPUT_WEIGHTED_SILU:  # noqa: SIM109 (Triton has no "in")
        y = x * tl.sigmoid(x)
    elif KIND == GELU:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == GELU_TANH:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # ½(1 + tanh z) = σ(2z)
    else:
        tl.static_assert(KIND == SQUARED_RELU)
        positive = tl.maximum(x, 0.0)
        y = positive * positive
    return y


@triton.jit
def _slope(x, KIND: tl.constexpr):
    """Return f′(x)."""
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
    """Return the two factors of a gated activation: f(g) and u.

    CLAMPED_SWIGLU: g σ(1.702 g) and u + 1 of clamped g and u.
    """
    if KIND == CLAMPED_SWIGLU:
        clamped_g = tl.minimum(g, 7.0)
        value = clamped_g * tl.sigmoid(1.702 * clamped_g)
        factor = tl.minimum(tl.maximum(u, -7.0), 7.0) + 1.0
    else:
        value, factor = _value(g, KIND), u
    return value, factor


@triton.jit
def _slopes(g, u, KIND: tl.constexpr):
    """Return the derivatives of the two factors."""
    if KIND == CLAMPED_SWIGLU:
        clamped_g = tl.minimum(g, 7.0)
        sigmoid = tl.sigmoid(1.702 * clamped_g)
        slope = tl.where(g > 7.0, 0.0, sigmoid * (1.0 + 1.702 * clamped_g * (1.0 - sigmoid)))
        up_slope = tl.where(tl.abs(u) > 7.0, 0.0, 1.0)
    else:
        slope, up_slope = _slope(g, KIND), tl.full(u.shape, 1.0, tl.float32)
    return slope, up_slope


@triton.jit
def plain_forward(x, y, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y = f(x)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
    tl.store(y + place, _value(value, KIND).to(y.dtype.element_ty), mask=place < numel)


@triton.jit
def plain_backward(gradient, x, dx, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute dx = g · f′(x)."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gradient + place, mask=place < numel, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
    tl.store(dx + place, (g * _slope(value, KIND)).to(dx.dtype.element_ty), mask=place < numel)


@triton.jit
def gated_forward(gate, up, y, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y = f(gate) · up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    value, factor = _factors(g, u, KIND)
    tl.store(y + place, (value * factor).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward(gradient, gate, up, gate_gradient, up_gradient, numel, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the gradients of gate and up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    dy = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    value, factor = _factors(g, u, KIND)
    slope, up_slope = _slopes(g, u, KIND)
    dtype = up_gradient.dtype.element_ty
    tl.store(up_gradient + place, (dy * value * up_slope).to(dtype), mask=inside)
    tl.store(gate_gradient + place, (dy * factor * slope).to(dtype), mask=inside)


@triton.jit
def weighted_forward(gate, up, share, y, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute y = f(gate) · up · share; a program computes ``BLOCK`` columns of a row.

    INPUT_WEIGHTED_SILU: gate and up are multiplied by share before f.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = column < width, row * width + column
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(share + row).to(tl.float32)
    if KIND == INPUT_WEIGHTED_SILU:
        weight = weight.to(y.dtype.element_ty).to(tl.float32)  # rounded like the eager kernel's
        g *= weight
    value, factor = _factors(g, u, KIND)
    tl.store(y + place, (value * factor * weight).to(y.dtype.element_ty), mask=inside)


@triton.jit
def weighted_backward(
    gradient,
    gate,
    up,
    share,
    gate_gradient,
    up_gradient,
    share_gradient,
    width,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of gate, up and share.

    A program loops along a row, whose sum is the gradient of its share.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(share + row).to(tl.float32)
    share_sums = tl.zeros([BLOCK], dtype=tl.float32)
    dtype = up_gradient.dtype.element_ty
    if KIND == INPUT_WEIGHTED_SILU:
        weight = weight.to(dtype).to(tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, place = column < width, row * width + column
        dy = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        if KIND == INPUT_WEIGHTED_SILU:
            value, factor = _factors(g * weight, u * weight, KIND)
            slope, up_slope = _slopes(g * weight, u * weight, KIND)
            share_sums += dy * (value * u + factor * slope * g)
        else:
            value, factor = _factors(g, u, KIND)
            slope, up_slope = _slopes(g, u, KIND)
            share_sums += dy * value * factor
        dy *= weight
        tl.store(up_gradient + place, (dy * value * up_slope).to(dtype), mask=inside)
        tl.store(gate_gradient + place, (dy * factor * slope).to(dtype), mask=inside)
    tl.store(share_gradient + row, tl.sum(share_sums, axis=0))
