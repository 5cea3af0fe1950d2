"""A mask from values, as Doge makes it."""

from __future__ import annotations

from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise, matmul


def make_mask(local: Local, v: str, *, layer: int) -> list[Op]:
    """List what makes a mask from values: a number of each key and key head, of the largest of which queries see keys.

    The mask is a tensor of each head, query and key, which attention keeps, as transformers 5.23 makes it
    (``DogeAttention.prepare_dynamic_mask``).
    """
    model, shape, width = local.model, local.attention(layer), local.width
    assert model.dynamic_mask is not None
    rows, heads, tokens = local.rows, shape.kv_heads, local.job.sequence
    size, mask = rows * heads * width, rows * tokens * shape.heads * width
    bias = model.qkv_bias
    sizes = {"in_features": heads * shape.value_dim, "out_features": heads}
    chosen = mask if model.dynamic_mask < tokens else 0  # zeros with ones at the chosen keys
    decay = elementwise("attention.mask.act", "activation", ("dt",), "dta", size=size, keeps=("dt", "dta"))
    expand = elementwise("attention.mask", "activation", ("dta",), "mask", size=mask, keeps=())
    if local.facts.has_own_attention_kernels:  # one mask for each key head; of the keys that are not seen, a byte
        numel = rows * tokens * heads
        indices = 8 * rows * heads * model.dynamic_mask
        unseen = numel + max(indices + numel, indices + indices * width // 8) if chosen else 0
        scratch = (numel * width + unseen, 0)
    else:
        scratch = (mask + 2 * chosen, mask)
    return [
        matmul("attention.mask.dt", v, "dt", rows=rows, width=width, bias=bias, **sizes),
        decay._replace(parameters=heads, wgrad_numels=(heads,), forward_scratch=2 * size, backward_scratch=2 * size),
        expand._replace(writes={"mask": mask}, forward_scratch=scratch[0], backward_scratch=scratch[1]),
    ]
