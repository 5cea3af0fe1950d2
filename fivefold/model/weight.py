"""One weight tensor of a model as a record: its name, shape and kind, from which its sharding follows."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from fivefold.base_format import BaseFormat

# conv: the filters of a depthwise convolution, [channels, taps]
# blocks: the square matrices on the diagonal of a projection, [blocks, in, out]
Kind = Literal[
    "embedding",
    "norm",
    "column",
    "row",
    "router",
    "expert_column",
    "expert_row",
    "head",
    "bias",
    "vector",
    "lora",
    "conv",
    "blocks",
]

# log rates: the logarithms of decay rates from 1 to 16 (Mamba-2, arXiv:2405.21060)
# steps: the inverse of softplus of steps from 0.001 to 0.1, drawn by their logarithm (Mamba, arXiv:2312.00752 §3.6)
# log numbers: the logarithms of 1, 2, … along the last dim (Mamba, ibid.)
# decays: the number whose softplus is −ln a, for an a² between 0.9² and 0.999² (Griffin, arXiv:2402.19427 §2.4)
# softplus 0.8, softplus 0.3: the number whose softplus is that (xIELU, arXiv:2411.13010: 0.8, and 0.8 − β with β = 0.5)
Initial = Literal["by kind", "ones", "log rates", "log numbers", "steps", "decays", "softplus 0.8", "softplus 0.3"]

MAGNITUDE = ".lora_magnitude"
EXPERT_FACTORS = ("_lora_a", "_lora_b")  # of routed experts
ADAPTER_WEIGHTS = (".lora_a", ".lora_b", MAGNITUDE, *EXPERT_FACTORS)  # factors, and magnitudes of DoRA


class Weight(NamedTuple):
    """One tensor of a model. ``kind`` decides sharding and weight decay, and with ``initial`` the initial values.

    Kind ``lora``: a weight of an adapter that every rank of tensor parallelism holds in full. ``parts``: sizes along
    dim 0 of the parts of a token mixer's weight; every rank of tensor parallelism holds an equal share of each.
    ``frozen``: a part that the job freezes (``Job.freeze``). ``has_gradient`` False: the loss is not differentiable by
    it; its gradient is zero, and a step leaves it as it is. ``unquantized_in``: the format of a repository's weights
    (``Model.quantization``) that keeps it in 16 bits.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    initial: Initial = "by kind"
    parts: tuple[int, ...] = ()
    frozen: bool = False
    has_gradient: bool = True
    unquantized_in: str = ""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def module(self) -> str:
        """Return the name of its linear layer, or its own if it is a parameter of experts."""
        return self.name.removesuffix(".weight")

    @property
    def is_vector(self) -> bool:
        """Tell whether it is the weight or bias of a norm, a bias, or another vector, also of experts."""
        return self.kind in ("norm", "bias", "vector") or self.name.endswith("bias")

    @property
    def is_hidden(self) -> bool:
        """Tell whether it is a matrix (or the stacked matrices of experts) inside a block."""
        return not self.is_vector and self.kind in ("column", "row", "router", "expert_column", "expert_row", "lora")

    @property
    def is_adapter(self) -> bool:
        """Tell whether it is a weight of an adapter."""
        return self.name.endswith(ADAPTER_WEIGHTS)


def is_gemm_weight(weight: Weight) -> bool:
    """Tell whether the weight is the matrix of a GEMM in a block, which may run in fp8: no router, bias or adapter."""
    is_matrix = weight.kind in ("column", "row", "expert_column", "expert_row") and not weight.name.endswith("_bias")
    return is_matrix and not weight.is_adapter


def is_quantized(weight: Weight, base: BaseFormat | None) -> bool:
    """Tell whether a base quantizes the weight: in nf4, fp4 or int8 that of a linear layer of a block.

    bitsandbytes quantizes ``nn.Linear`` modules; transformers stacks routed experts as parameters, which stay in the
    dtype of the activations (transformers 5.23: integrations/bitsandbytes.py, replace_with_bnb_linear). A base in fp8
    has both, one in mxfp4 routed experts alone. A repository in few bits may keep some of them in 16.
    """
    if base is None or not is_gemm_weight(weight) or weight.unquantized_in == base.name:
        return False
    is_expert = weight.kind in ("expert_column", "expert_row")
    return base.quantizes_experts if is_expert else base.quantizes_linears
