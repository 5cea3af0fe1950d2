"""Bytes that kernels move to add the gradients of a unit to those of earlier micro-batches."""

from __future__ import annotations

from fivefold.layout.sharding import get_policy
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Counts, Name
from fivefold.planner.counts.memory.states import count_reduced_width


def count_accumulated_bytes(counts: Counts, layout: Layout, name: Name) -> tuple[int, int]:
    """Return the bytes that kernels read and write to accumulate a unit's gradients, by other software than ours.

    Those after the first backward of a step, and those after each later one. Where they go:

    - Megatron's matmuls, and the trainer's kernels, add gradients themselves: none (``Prices``).
    - nanotron adds each gradient to an fp32 buffer (``wgrad_accumulation=deferred``).
    - Autograd keeps the first gradient and adds each later one to it, or casts it first if sums have another dtype
      (pytorch/pytorch@v2.13.0:torch/csrc/autograd/functions/accumulate_grad.h).
    - Gradients that are reduced after every backward are added as shards (FSDP: ``_saved_grad_shard += ...`` in
      pytorch/pytorch@00ae0bc:torch/distributed/fsdp/_runtime_utils.py; FSDP2: ``sharded_param.grad += ...`` in
      @v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce).
    - DeepSpeed's ZeRO copies a gradient to the bucket of its reduction (deepspeedai/DeepSpeed@0.19.8:
      deepspeed/runtime/zero/stage3.py, __add_grad_to_ipg_bucket; stage_1_and_2.py likewise).
    """
    stack, recipe = counts.job.stack, counts.job.precision
    if stack.adds_in_wgrad or stack.kernel_facts.separate_adds:
        return 0, 0
    states = counts.states(layout, name)
    numel, widths = states.sums // recipe.summed_bytes, recipe.gradients_bytes + 2 * recipe.summed_bytes
    if stack.wgrad_accumulation in ("deferred", "deferred_buckets"):
        return numel * widths, numel * widths
    is_sharded = not get_policy(layout, counts.job).gradients_stay
    if counts.reduces_every_micro_batch(layout, name):
        copied = 2 * numel * recipe.gradients_bytes * (stack.reduce_bucket > 0)
        return copied, copied + 3 * states.updated_numel * count_reduced_width(layout, counts.job)
    is_cast = recipe.gradients_bytes != recipe.summed_bytes and not is_sharded  # else as the reduction copies it
    return numel * (recipe.gradients_bytes + recipe.summed_bytes) * is_cast, numel * widths
