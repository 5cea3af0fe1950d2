"""A linear layer under tensor parallelism: cut by column (its output) or by row (its input), Megatron's pair.

    column   x ──(sp: all_gather)── x W_col        backward: reduce_scatter, or all_reduce without sp
    row      x W_row ──reduce_scatter, or all_reduce without sp── y        backward: all_gather, or nothing

Under sp the gathered input is let go and gathered again for the weight's gradient. fp8 and fp4 operands are cast
before they travel and kept instead of the 16-bit tensor. Sources: arXiv:1909.08053, arXiv:2205.05198 §4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.job import SCALED_ELEMENTS
from fivefold.plan.count.ops import Message, Op, exchange, matmul
from fivefold.plan.count.part import Local
from fivefold.units import ceil_div


class Source:
    """The input of column linears: cast and gathered once for all of them."""

    def __init__(self, local: Local, tensor: str, *, into: int, rows: int, gathered: bool = True) -> None:
        """``rows`` are those of ``tensor``; ``gathered``: the readers want the rows of all of tp."""
        self.local, self.into, self.kept = local, into, tensor
        self.ops: list[Op] = []
        recipe, size = local.job.precision, rows * into * local.width
        if recipe.narrow:
            self.kept = f"{tensor}.cast"
            size = narrow_bytes(local, rows * into)
            self.ops.append(cast(local, tensor, self.kept, numel=rows * into))
        self.read, self.rows = self.kept, rows
        self.regathered = 0
        part = local.part
        if not gathered or part.tp == 1:
            return
        self.read = f"{tensor}.whole"
        if part.sp:
            self.rows, self.regathered = local.rows, size * part.tp
            # the gradient travels in 16 bits, whatever the operand was cast to
            wide = local.rows * into * local.width
            message = Message("tp", "all_gather", "reduce_scatter", size * part.tp, 1, "all_gather", wide)
            self.ops.append(
                exchange(f"{tensor}.gather", self.kept, self.read, size=size * part.tp, message=message,
                         gradient_bytes=wide)
            )  # fmt: skip
        else:
            message = Message("tp", "", "all_reduce", rows * into * local.width)
            self.ops.append(exchange(f"{tensor}.copy", self.kept, self.read, size=0, message=message))

    def column(self, name: str, out: str, *, outof: int, bias: bool = False) -> Op:
        """``out`` [rows, outof] with ``outof`` as it is on this rank."""
        op = matmul(
            name, self.read, out, rows=self.rows, into=self.into, outof=outof, width=self.local.width, bias=bias
        )
        return op._replace(keeps=(self.kept,), backward_scratch=self.regathered, regathered=self.regathered)


def row(local: Local, name: str, source: str, out: str, *, into: int, outof: int, bias: bool) -> Sequence[Op]:
    """``out`` [stream rows, outof] from ``source`` [rows, into], ``into`` as it is on this rank."""
    part = local.part
    ops, read = [], source
    if local.job.precision.narrow:
        read = f"{source}.cast"
        ops.append(cast(local, source, read, numel=local.rows * into))
    partial = out if part.tp == 1 else f"{out}.partial"
    ops.append(matmul(name, read, partial, rows=local.rows, into=into, outof=outof, width=local.width, bias=bias))
    if part.tp > 1:
        size = local.rows * outof * local.width
        kinds = ("reduce_scatter", "all_gather") if part.sp else ("all_reduce", "")
        message = Message("tp", *kinds, payload=size)
        size = local.stream_rows * outof * local.width
        ops.append(exchange(f"{name}.reduce", partial, out, size=size, message=message))
    return ops


def cast(local: Local, source: str, out: str, *, numel: int) -> Op:
    """To fp8 or fp4 with its scales. The transposed copy that the weight's gradient reads is written along."""
    size = narrow_bytes(local, numel)
    moved = numel * local.width + 2 * size
    # backward: the gradient of the matmul's output is cast alike, which is no gradient of this operation
    return Op(
        out, "cast", (source,), {out: size}, moved_bytes=moved, moved_backward_bytes=moved,
        gradients={out: numel * local.width},
    )  # fmt: skip


def narrow_bytes(local: Local, numel: int) -> int:
    """Bytes of ``numel`` elements in fp8 or fp4, scales included."""
    recipe = local.job.precision
    scaled = SCALED_ELEMENTS.get(recipe.scaling)
    per_scale = 1 if recipe.scaling == "blocks" else 4
    scales = 4 if scaled is None else per_scale * ceil_div(numel, scaled)
    return (ceil_div(numel, 2) if recipe.compute == "fp4" else numel) + scales
