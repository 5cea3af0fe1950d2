"""Properties of Fivefold's own kernels and of kernels under PyTorch's autograd, of losses and of attention kernels.

Properties of a single framework are fields of ``Stack``. Those here follow from the kind of its linear layers, of its
loss and of its attention: whoever adds a kind of loss or of attention states its properties here.
"""

from __future__ import annotations

from typing import NamedTuple


class KernelFacts(NamedTuple):
    """Properties of a framework's kernels that affect bytes, messages and seconds."""

    # linear layers
    fuses_linears: bool  # linear layers on one input are one operation, which includes their messages
    keeps_casts: bool  # the cast of an input to fp8 or fp4 is kept for the backward; else it is cast again
    supports_autocast: bool
    two_dimensional_tp: bool  # 2D tensor parallelism splits rows and columns of weights
    fused_norms: bool  # a norm is one kernel, which needs no scratch in its backward
    fused_dequantization: bool  # a weight in nf4 is dequantized by one kernel, which holds the codebooks

    # experts
    pads_to_capacity: bool  # computes on as many rows as experts may have; else on those received
    separate_biases: bool  # a separate operation adds the biases of experts
    overlaps_expert_wgrad: bool  # dW of gate and up is computed during the backward's all_to_all
    sums_expert_dgrad: bool  # dx of gate and up are added before their dW are computed
    weighs_in_own_kernel: bool  # the fp32 product with the routing weights is separate from the activation's kernel

    # attention
    has_own_attention_kernels: (
        bool  # own kernels for rings, sinks and dropout; PyTorch's, with seeds, for two head dims
    )

    # gradients
    adds_to_table: bool  # the head adds the gradient of tied weights to the accumulated one of the embedding
    allocates_sums: bool  # allocates accumulated gradients; else the first gradients become them (AccumulateGrad)
    separate_adds: bool  # separate kernels accumulate gradients and add branches; one kernel runs all experts
    reduces_experts_midway: bool  # reduces expert gradients within the backward of their block
    overlaps_each_reduction: bool  # if every backward reduces: with the next unit's, the last with the next forward


FIVEFOLD = KernelFacts(
    fuses_linears=True,
    keeps_casts=False,
    supports_autocast=False,
    two_dimensional_tp=True,
    fused_norms=False,
    fused_dequantization=True,
    pads_to_capacity=False,
    separate_biases=True,
    overlaps_expert_wgrad=True,
    sums_expert_dgrad=True,
    weighs_in_own_kernel=True,
    has_own_attention_kernels=True,
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
    fused_dequantization=False,
    pads_to_capacity=True,
    separate_biases=False,
    overlaps_expert_wgrad=False,
    sums_expert_dgrad=False,
    weighs_in_own_kernel=False,
    has_own_attention_kernels=False,
    adds_to_table=False,
    allocates_sums=False,
    separate_adds=False,
    reduces_experts_midway=False,
    overlaps_each_reduction=False,
)


class LossFacts(NamedTuple):
    """Properties of a kind of cross entropy: the tensors of logits that it makes and keeps."""

    chunked: bool = False  # a chunk of rows at a time, in the backward: all logits never exist at once
    in_place: bool = False  # a kernel of its own, whose gradient replaces the logits
    under_autograd: bool = False  # PyTorch's cross entropy, which keeps its log-softmax
    in_fp32: bool = False  # on an fp32 copy of the logits, which becomes the softmax
    keeps_fp32_logits: bool = False  # in addition to the softmax
    holds_logits: bool = False  # the caller holds those in the dtype of the matmuls until the forward has ended
    copies_softmax: bool = False  # compiled: the softmax is kept while a copy of it becomes the gradient
    retains_logits: bool = False  # the caller holds them until the end of the backward
    trains: bool = False  # Fivefold's trainer has it


LOSSES = {  # ``Stack.loss`` says what each name means
    "fused": LossFacts(in_place=True, trains=True),
    "chunked": LossFacts(chunked=True, trains=True),
    "plain": LossFacts(under_autograd=True, in_fp32=True),
    "low_precision": LossFacts(under_autograd=True, retains_logits=True),
    "upcast": LossFacts(in_fp32=True),
    "upcast_copy": LossFacts(in_fp32=True, keeps_fp32_logits=True),
    "upcast_separate": LossFacts(in_fp32=True, keeps_fp32_logits=True, holds_logits=True),
    "upcast_compiled": LossFacts(in_fp32=True, copies_softmax=True),
}


class AttentionFacts(NamedTuple):
    """Properties of a kind of attention kernels."""

    materializes_scores: bool = False  # matmuls and a softmax, of all keys; else the scores stay on the chip
    pads_heads: bool = False  # heads of two dimensions, as latent attention has, to the larger one
    trains: bool = False  # Fivefold's trainer has it


ATTENTIONS = {  # ``Stack.attention`` says what each name means
    "flash": AttentionFacts(trains=True),
    "flash2": AttentionFacts(),
    "flash1": AttentionFacts(),
    "flash1_triton": AttentionFacts(),
    "blocks": AttentionFacts(pads_heads=True),
    "unfused": AttentionFacts(materializes_scores=True, trains=True),
}
