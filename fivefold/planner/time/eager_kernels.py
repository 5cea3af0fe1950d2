"""Memory passes of operations that PyTorch's kernels compute one after another (``kernels = "eager"``).

bytes that all kernels of an operation read and write / bytes that one kernel would (``Op.moved_bytes``)

They are counted from the trainer's own functions (``trainer/model/kernels/``), operation by operation, and tested
against them.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.planner.counts.operations.op import Op


class EagerKernelCost(NamedTuple):
    """The cost of an operation in eager PyTorch: its bytes relative to one fused kernel, and its number of kernels."""

    forward: float
    backward: float
    kernels: int
    backward_kernels: int


# Keys: operation and bytes of an element. norm: x is squared and summed, scaled in fp32, cast, weighted;
# the backward makes six more fp32 tensors. loss: softmax in fp32, two maxima, a scatter, a product and a cast.
EAGER: dict[tuple[str, int], EagerKernelCost] = {
    ("norm", 2): EagerKernelCost(4.5, 12.0, 8, 12),
    ("norm", 4): EagerKernelCost(2.5, 6.0, 7, 9),
    ("rope", 2): EagerKernelCost(4.5, 4.5, 4, 5),
    ("rope", 4): EagerKernelCost(4.5, 4.5, 4, 5),
    ("activation", 2): EagerKernelCost(5 / 3, 2.2, 2, 4),
    ("activation", 4): EagerKernelCost(5 / 3, 2.2, 2, 4),
    ("experts", 2): EagerKernelCost(7 / 3, 4.8, 3, 9),
    ("experts", 4): EagerKernelCost(7 / 3, 4.0, 3, 8),
    ("loss", 2): EagerKernelCost(6.5, 1.0, 14, 1),
    ("loss", 4): EagerKernelCost(4.0, 1.0, 13, 1),
}
# Kernels of PyTorch's modules under autograd (``kernels = "plain"``), as transformers' LlamaRMSNorm,
# apply_rotary_pos_emb and act(gate) * up; halves: of one tensor, whose gradients are joined. norm: widened, squared,
# averaged, scaled, narrowed, weighted; autograd multiplies by each factor, and computes the power again. Rotary halves
# are copied, negated, and filled with zeros in the backward. Measured:
# linkedin/Liger-Kernel@ead96b6:benchmark/data/all_benchmark_data.csv
PLAIN: dict[tuple[str, int], EagerKernelCost] = {
    ("norm", 2): EagerKernelCost(9.0, 15.3, 8, 16),
    ("norm", 4): EagerKernelCost(3.5, 7.67, 6, 14),
    ("rope", 2): EagerKernelCost(5.06, 7.06, 5, 7),
    ("rope", 4): EagerKernelCost(5.06, 7.06, 5, 7),
    ("activation", 2): EagerKernelCost(5 / 3, 1.8, 2, 3),
    ("activation", 4): EagerKernelCost(5 / 3, 1.8, 2, 3),
    ("halves", 2): EagerKernelCost(5 / 3, 2.6, 2, 4),
    ("halves", 4): EagerKernelCost(5 / 3, 2.6, 2, 4),
}
PLAIN_LOSS_KERNELS = 4  # of PyTorch's cross entropy: widened, log-softmax, and their gradients; ``Op.moved_bytes``
ONE = EagerKernelCost(1.0, 1.0, 1, 1)
ROPE_APART = EagerKernelCost(
    4.58, 4.35, 15, 11
)  # NVIDIA/Megatron-LM:megatron/core/models/common/embeddings/rope_utils.py


def count_eager_passes(op: Op, *, width: int) -> EagerKernelCost:
    """Return the memory passes of ``op`` over elements of ``width`` bytes; one if PyTorch has a kernel for it."""
    kind = "experts" if op.name == "moe.experts.act" else op.kind
    return EAGER.get((kind, width), ONE)
