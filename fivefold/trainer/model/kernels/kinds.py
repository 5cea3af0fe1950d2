"""Numbers of the activations that the Triton kernels compute; the kernels are compiled for one of them."""

from __future__ import annotations

SILU, GELU, GELU_TANH, SQUARED_RELU, CLAMPED_SWIGLU, INPUT_WEIGHTED_SILU = range(6)
