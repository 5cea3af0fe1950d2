"""Which kernels compute an activation, by its name, and the numbers of those that Triton compiles a kernel for."""

from __future__ import annotations

from fivefold.model.activations import ACTIVATIONS, ActivationName

SILU, GELU, GELU_TANH, SQUARED_RELU, CLAMPED_SWIGLU, INPUT_WEIGHTED_SILU = range(6)
# of dense layers, without trained numbers
DENSE = tuple(name for name, record in ACTIVATIONS.items() if not (record.parameters or record.clamps))
# methods of ``Kernels`` for activations of experts: act(gate) · up · share, or act(share · gate) · share · up; others
# have ``weighted_gated``
WEIGHTED: dict[ActivationName, str] = {"silu": "weighted_swiglu", "clamped_swiglu": "weighted_clamped_swiglu"}
INPUT_WEIGHTED: dict[ActivationName, str] = {"silu": "input_weighted_swiglu"}
