"""Differential attention: two cores of the same values, and the difference of their outputs."""

from __future__ import annotations

from fivefold.model.norms import NORMS
from fivefold.planner.counts.operations.attention.core import list_core
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise, norm, rename_tensors, split


def attend_twice(local: Local, *, q: str, k: str, v: str, layer: int) -> list[Op]:
    """List the cores of differential attention: all queries and keys, with each half of the values repeated.

    The outputs are joined, [rows, heads, 2 H]. Source: transformers 5.23, ``DiffLlamaAttention.forward``.
    """
    size = local.rows * local.attention(layer).kv_heads * local.attention(layer).head_dim * local.width
    half = local.rows * local.attention(layer).output_dims * local.width
    ops = [split("attention.core.halves", v, {"v1": size, "v2": size})]  # a half, and its repetition
    ops[0] = ops[0]._replace(moved_bytes=3 * size, moved_backward_bytes=3 * size)
    for index in "12":
        ops += [
            rename_tensors(op, {name: f"{name}{index}" for name in ("o", "lse", "seeds", "core.s", "core.p")})._replace(
                name=op.name.replace("core", f"core.{index}", 1)
            )
            for op in list_core(local, q=q, k=k, v=f"v{index}", layer=layer)
        ]
    if local.facts.has_own_attention_kernels:
        return ops
    joined = elementwise("attention.join", "cast", ("o1", "o2"), "o", size=2 * half)
    return [*ops, joined._replace(moved_bytes=4 * half, moved_backward_bytes=4 * half)]


def subtract_heads(local: Local, source: str, *, columns: int, dim: int) -> list[Op]:
    """List the difference of the first and second half of the heads, and its norm over 2 H without a weight."""
    size = local.rows * columns * local.width
    if local.facts.has_own_attention_kernels:  # one operation on the outputs of both cores
        sums, numel = local.rows * columns // (2 * dim), local.rows * columns
        return [
            Op(
                "attention.core.difference",
                "activation",
                ("o1", "o2"),
                {"on": size, "on.stat": 4 * sums},
                keeps=("o1", "o2", "on.stat"),
                parameters=4 * dim,
                wgrad_numels=(dim,) * 4,
                moved_bytes=3 * size,
                moved_backward_bytes=5 * size,
                # fp32: the difference and its square, and in the backward two gradients and a product
                forward_scratch=4 * numel if local.width == 4 else 6 * numel,
                backward_scratch=6 * numel if local.width == 4 else 8 * numel,
            )
        ]
    product = elementwise("attention.lambda", "activation", (source,), "ol", size=size, keeps=(source,))
    product = product._replace(parameters=4 * dim, wgrad_numels=(dim,) * 4, backward_scratch=size)
    difference = elementwise("attention.subtract", "add", (source, "ol"), "od", size=size)
    kind = local.norm._replace(norm=NORMS["rmsnorm"], weight=False)
    rows = local.rows * columns // (2 * dim)
    scale = elementwise("attention.core.scale", "activation", ("odn",), "on", size=size)
    return [
        product,
        difference,
        norm("attention.out_norm", "od", "odn", rows=rows, dim=2 * dim, width=local.width, kind=kind),
        scale,
    ]
