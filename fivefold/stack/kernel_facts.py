"""What Fivefold's own kernels do, and what kernels under PyTorch's autograd do: two lists, of which a stack has one.

Facts that a software has on its own are fields of ``Stack``; those here come together with its linear layers.
"""

from __future__ import annotations

from typing import NamedTuple


class KernelFacts(NamedTuple):
    """What the kernels of a software do, as far as bytes, messages and seconds depend on it."""

    # linear layers
    fuses_linears: bool  # those on one input are one operation, with its messages
    keeps_casts: bool  # the cast of an input to fp8 or fp4 is kept for the backward; else it is cast again
    supports_autocast: bool
    two_dimensional_tp: bool  # splits rows and columns of weights over tensor parallelism
    fused_norms: bool  # a norm is one kernel, which needs no scratch in its backward

    # experts
    pads_to_capacity: bool  # computes on as many rows as experts may have; else on those that arrive
    separate_biases: bool  # an operation of its own adds the biases of experts
    overlaps_expert_wgrad: bool  # dW of gate and up is computed during the backward's all_to_all
    sums_expert_dgrad: bool  # dx of gate and up are added before their dW are computed
    weighs_in_own_kernel: bool  # the product with the routing weights, in fp32, is not part of the activation's kernel

    # attention
    own_attention: bool  # kernels of its own for rings, sinks and dropout; for two head dims PyTorch's, with seeds

    # gradients
    adds_to_table: bool  # the head adds the gradient of a tied table to the sums of the embedding
    allocates_sums: bool  # else the first gradients become the sums (PyTorch's AccumulateGrad)
    separate_adds: bool  # kernels of their own add gradients to sums and branches; one kernel runs all experts
    reduces_experts_midway: bool  # within the backward of their block
    overlaps_each_reduction: bool  # if every backward reduces: with the next unit's, and the last with the next forward


FIVEFOLD = KernelFacts(
    fuses_linears=True,
    keeps_casts=False,
    supports_autocast=False,
    two_dimensional_tp=True,
    fused_norms=False,
    pads_to_capacity=False,
    separate_biases=True,
    overlaps_expert_wgrad=True,
    sums_expert_dgrad=True,
    weighs_in_own_kernel=True,
    own_attention=True,
    adds_to_table=True,
    allocates_sums=True,
    separate_adds=True,
    reduces_experts_midway=True,
    overlaps_each_reduction=True,
)
AUTOGRAD = KernelFacts(
    fuses_linears=False,
    keeps_casts=True,
    supports_autocast=True,
    two_dimensional_tp=False,
    fused_norms=True,
    pads_to_capacity=True,
    separate_biases=False,
    overlaps_expert_wgrad=False,
    sums_expert_dgrad=False,
    weighs_in_own_kernel=False,
    own_attention=False,
    adds_to_table=False,
    allocates_sums=False,
    separate_adds=False,
    reduces_experts_midway=False,
    overlaps_each_reduction=False,
)
