"""The operations from the core's output to that of attention: gate, norms and projection."""

from __future__ import annotations

from fivefold.model.attention import AttentionShape
from fivefold.planner.counts.operations.attention.differential import subtract_heads
from fivefold.planner.counts.operations.linear import build_sub_norm, list_row_parallel
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise


def list_output(local: Local, shape: AttentionShape, *, layer: int) -> list[Op]:
    """List the operations from the core's output ``o`` to ``a``: gate, norms and the projection."""
    model, columns = local.model, shape.output_dims
    ops, out = list[Op](), "o"
    if model.output_gate:
        ops += gate_output(local, shape)
        out = "og"
    if model.differential:
        ops += subtract_heads(local, out, columns=columns, dim=shape.head_dim)
        out = "on"
    if model.sub_norm:
        ops.append(build_sub_norm(local, "attention.out_norm", out, dim=columns))
        out = f"{out}n"
    if local.job.stack.transposes_attention and local.part.sequences > 1:
        size = local.rows * columns * local.width
        ops.append(elementwise("attention.transpose", "cast", (out,), f"{out}.t", size=size))
        out = f"{out}.t"
    sizes = {"in_features": columns, "out_features": model.width}
    return [*ops, *list_row_parallel(local, "attention.out", out, "a", bias=model.has_out_bias(layer), **sizes)]


def gate_output(local: Local, shape: AttentionShape) -> list[Op]:
    """List the product of attention's output and its gate, which has the width of heads or of their dims: o → og."""
    model, rows, width = local.model, local.rows, local.width
    size, factors = rows * shape.output_dims * width, rows * model.count_gate_columns(shape) * width
    ops, gate_name = list[Op](), "gate"
    if model.gate_bias:
        gate_name = "gateb"
        biased = elementwise("attention.gate.bias", "activation", ("gate",), gate_name, size=factors)
        ops.append(biased._replace(parameters=shape.heads, wgrad_numels=(shape.heads,), passes_gradient=True))
    kept = ("o", gate_name)
    gate = elementwise("attention.core.gate", "activation", kept, "og", size=size, keeps=kept, backward_scratch=size)
    if model.gate_per_head:  # its factors are small compared with the heads that they multiply
        gate = gate._replace(
            moved_bytes=2 * size + factors,
            moved_backward_bytes=3 * size + 2 * factors,
            forward_scratch=factors,
            backward_scratch=factors,
        )
    return [*ops, gate]
