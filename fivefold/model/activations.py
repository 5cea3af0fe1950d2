"""Activation functions of feed-forward layers: one record each, with the facts that the planner counts.

A record with ``value`` and ``derivative`` is complete: dense layers train with it, by PyTorch's operations one after
another. The others have kernels of their own, in PyTorch (``trainer/model/kernels/activations.py``) and in Triton
(``triton/activations.py`` there), and for experts one that also multiplies by the routing weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fivefold.model.weight import Initial

ActivationName = Literal[
    "silu", "gelu", "gelu_tanh", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2", "xielu", "clamped_swiglu"
]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """An elementwise function act(x): plain layers compute act(up), gated layers act(gate) · up."""

    name: ActivationName
    # act(x) and act'(x) by the methods of a tensor, each a new tensor; None: the trainer has kernels for it.
    value: Callable[[Any], Any] | None = None
    derivative: Callable[[Any], Any] | None = None
    # Names of its trained numbers, one of each in every dense layer, with their initial values.
    parameters: Mapping[str, Initial] = field(default_factory=dict)
    # Names in a Hugging Face config.json; the first is written. Empty: a family has it without naming it.
    huggingface: tuple[str, ...] = ()
    # Tensors as large as its input that PyTorch saves for the backward pass where transformers spells the function out
    # as several PyTorch operations. Source: huggingface/transformers 5.23:src/transformers/activations.py
    written_out: tuple[str, ...] = ()
    cubes_input: bool = False  # computes pow(x, 3), for which autocast saves an fp32 copy of x
    plain_scratch: int = 0  # tensors as large as its output that PyTorch's kernels allocate without a product
    # Tensors as large as its output that PyTorch's kernels allocate during the product with ``up`` and its backward.
    gated_scratch: int = 0
    gated_backward_scratch: int = 1
    # Whether gate and up are clamped before the product, so that there is no kernel of act(gate) alone.
    clamps: bool = False
    # Whether one Triton kernel computes the product with ``up`` and the routing weights of experts.
    has_weighted_kernel: bool = False
    # Whether the peak of the experts' backward holds the gradient times the fp32 routing weight in fp32.
    widens_weighted_gradient: bool = False


# fmt: off
_ACTIVATIONS = (
    # x σ(x)
    Activation(name="silu", huggingface=("silu", "swish"), has_weighted_kernel=True, widens_weighted_gradient=True),
    Activation(name="gelu", huggingface=("gelu",)),  # x Φ(x)
    Activation(name="gelu_tanh", huggingface=("gelu_pytorch_tanh",)),  # ½x (1 + tanh(√(2/π) (x + 0.044715 x³)))
    # the same as several operations; gelu_fast computes the products inside the tanh one by one
    Activation(name="gelu_new", huggingface=("gelu_new",), written_out=("half", "tanh", "sum"), cubes_input=True),
    Activation(name="gelu_fast", huggingface=("gelu_fast",),
               written_out=("half", "tanh", "sum", "scaled", "cubic", "part")),
    Activation(name="quick_gelu", huggingface=("quick_gelu",), written_out=("sigmoid",),  # x σ(1.702 x)
               value=lambda x: x * (1.702 * x).sigmoid(),
               derivative=lambda x: (1.702 * x).sigmoid() * (1 + 1.702 * x * (-1.702 * x).sigmoid())),
    Activation(name="relu", huggingface=("relu",), value=lambda x: x.clamp(min=0), derivative=lambda x: (x > 0).to(x)),
    Activation(name="relu2", huggingface=("relu2",)),  # max(x, 0)²
    # α_p x² + βx for x > 0, else α_n (eˣ − 1 − x) + βx, with trained α_p, α_n > 0 (arXiv:2411.13010)
    Activation(name="xielu", huggingface=("xielu",), plain_scratch=1,
               parameters={"alpha_p": "softplus 0.8", "alpha_n": "softplus 0.3"}),
    # g σ(1.702 g) (u + 1), g = gate up to 7, u = up from −7 to 7 (gpt-oss, arXiv:2508.10925); scratch: clamped gate and
    # up, the sigmoid and their products
    Activation(name="clamped_swiglu", gated_scratch=1, gated_backward_scratch=4, clamps=True, has_weighted_kernel=True),
)
# fmt: on
ACTIVATIONS: dict[ActivationName, Activation] = {activation.name: activation for activation in _ACTIVATIONS}
