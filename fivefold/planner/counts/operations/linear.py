"""A linear layer under tensor parallelism, as in Megatron: column-parallel (output sharded) or row-parallel (input).

    column   x ──(sp: all_gather)── x W_col        backward: reduce_scatter, or all_reduce without sp
    row      x W_row ──reduce_scatter, or all_reduce without sp── y        backward: all_gather, or nothing

Under sp the gathered input is freed and gathered again for dW, in 16 bits, or kept (``Stack.column_inputs``); in the
forward fp8 and fp4 ones travel as cast. Other stacks keep that cast; Fivefold casts around each product (``Op.casts``).
Sources: arXiv:1909.08053, arXiv:2205.05198 §4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from fivefold.job import SCALED_ELEMENTS, Job
from fivefold.planner.counts.operations.local_shapes import Local, Part
from fivefold.planner.counts.operations.op import Casts, Message, Op, exchange, matmul
from fivefold.units import ceil_div


class Source:
    """The input of column-parallel linears, cast and gathered once for all of them; ``ops`` do that."""

    def __init__(
        self, local: Local, tensor: str, *, into: int, rows: int, gathered: bool = True, reader: str = ""
    ) -> None:  # fmt: skip
        """``tensor`` is [rows, into]; ``gathered``: its readers need the rows of all tp ranks. ``reader``: ends the
        names of what is made here, where another ``Source`` of the same tensor makes it too."""
        self.local, self.into, self.kept = local, into, tensor
        self.ops: list[Op] = []
        self.sums: list[Op] = []  # of 2D tensor parallelism, after all readers: their outputs, summed over tp_inner
        self.first = True  # the next reader is the first
        size = rows * into * local.width
        if keeps_casts(local):
            self.kept = f"{tensor}.cast{reader}"
            size = narrow_bytes(local, rows * into)
            self.ops.append(cast(local, tensor, self.kept, numel=rows * into))
        self.read, self.rows = self.kept, rows
        self.regathered = self.cast_rows = 0  # cast_rows: rows cast here before they are gathered; 0: after it
        part = local.part
        if not gathered or part.tp == 1:
            return
        self.read = f"{tensor}.whole{reader}"
        if part.sp:
            kept = local.job.stack.column_inputs == "kept"
            self.rows, self.regathered = local.rows, 0 if kept else size * local.outer
            # the gradient is sent in 16 bits, whatever the operand was cast to
            wide = local.rows * into * local.width
            again = "" if kept else "all_gather"
            message = Message(over(part), "all_gather", "reduce_scatter", size * local.outer, 1, again, wide)
            if local.job.precision.narrow and not keeps_casts(local):
                self.cast_rows = rows
                payload, *scales = travelling(local, into)
                message = message._replace(payload=payload[1], wide_payload=size * local.outer, scales=tuple(scales))
            self.ops.append(
                exchange(f"{tensor}.gather", self.kept, self.read, size=size * local.outer, message=message,
                         gradient_bytes=wide)
            )  # fmt: skip
            if kept:
                self.kept = self.read
        else:
            message = Message("tp", "", "all_reduce", rows * into * local.width)
            self.ops.append(exchange(f"{tensor}.copy", self.kept, self.read, size=0, message=message))

    def column(self, name: str, out: str, *, outof: int, bias: bool = False, shared: bool = False) -> Op:
        """Column-parallel matmul to ``out`` [rows, outof]; ``outof`` is the size on this rank, in 2D a y-th of what is
        summed over the inner ranks, or of what all of them need (``shared``: a key head of several).
        """
        local, inner = self.local, self.local.part.tp_inner
        partial = out if inner == 1 else f"{out}.partial"
        op = matmul(
            name, self.read, partial, rows=self.rows, into=self.into, outof=outof * inner, width=local.width, bias=bias
        )
        if inner > 1:
            size, kinds = self.rows * outof * local.width, ("reduce_scatter", "all_gather")
            message = Message("tp_inner", *kinds, payload=inner * size)
            if shared:  # each of the ranks needs all of them
                size, message = inner * size, Message("tp_inner", "all_reduce", "all_reduce", payload=inner * size)
            self.sums.append(exchange(f"{name}.reduce", partial, out, size=size, message=message))
        op = casting(op, self.local, first=self.first, cast_rows=self.cast_rows)
        self.first = False
        return op._replace(keeps=(self.kept,), backward_scratch=self.regathered, regathered=self.regathered)


def row(local: Local, name: str, source: str, out: str, *, into: int, outof: int, bias: bool) -> Sequence[Op]:
    """Row-parallel matmul: ``source`` [rows, into] → ``out`` [stream rows, outof]; ``into`` is that of this rank."""
    part = local.part
    ops, read = [], source
    if keeps_casts(local):
        read = f"{source}.cast"
        ops.append(cast(local, source, read, numel=local.rows * into))
    partial = out if part.tp == 1 else f"{out}.partial"
    inner, outof = part.tp_inner, outof // part.tp_inner
    if inner > 1:
        ops.append(_gathered_columns(local, source, into=into))
        read = f"{source}.whole"
    into *= inner
    product = matmul(name, read, partial, rows=local.rows, into=into, outof=outof, width=local.width, bias=bias)
    product = casting(product, local)
    if inner > 1:
        again = local.rows * into * local.width
        product = product._replace(keeps=(source,), backward_scratch=again, regathered=again)
    ops.append(product)
    if part.tp > 1:
        size = local.rows * outof * local.width
        kinds = ("reduce_scatter", "all_gather") if part.sp else ("all_reduce", "")
        message = Message(over(part), *kinds, payload=size)
        size = local.stream_rows * outof * local.width
        ops.append(exchange(f"{name}.reduce", partial, out, size=size, message=message))
    return ops


def over(part: Part) -> str:
    """The group over which rows of the stream are cut: of 2D tensor parallelism the outer one."""
    return "tp" if part.tp_inner == 1 else "tp_outer"


def over_columns(local: Local, op: Op) -> Op:
    """A norm of the stream; where 2D tensor parallelism cuts its columns, fp32 sums of each row go over tp_inner."""
    if local.part.tp_inner == 1:
        return op
    sums = 8 if len(op.gradient_widths) > 1 else 4  # LayerNorm: of x and of x²
    return op._replace(message=Message("tp_inner", "all_reduce", "all_reduce", sums * local.stream_rows))


def _gathered_columns(local: Local, source: str, *, into: int) -> Op:
    """All-gather over tp_inner of a row-parallel layer's input [rows, ``into``] under 2D tensor parallelism, or of its
    cast.
    """
    wide = local.rows * into * local.width * local.part.tp_inner
    message = Message("tp_inner", "all_gather", "reduce_scatter", wide, 1, "all_gather", wide)
    if local.job.precision.narrow:
        payload, *scales = travelling(local, into * local.part.tp_inner)
        message = message._replace(payload=payload[1], wide_payload=wide, scales=tuple(scales))
    return exchange(f"{source}.gather", source, f"{source}.whole", size=wide, message=message, gradient_bytes=wide)


def settled(op: Op, job: Job) -> Op:
    """``op`` with no weight gradient tensor (0 elements) if its matmul accumulates into the gradient sums itself."""
    if job.stack.weight_gradients not in ("summed", "placeholders") or not sums_itself(op):
        return op
    return op._replace(gradient_widths=(0, *op.gradient_widths[1:]))


def sums_itself(op: Op) -> bool:
    """Whether the operation is a linear layer with fused wgrad accumulation in Transformer Engine or Megatron."""
    return op.kind == "matmul" and op.name != "moe.router"


def keeps_casts(local: Local) -> bool:
    """Whether the cast of an input is kept for the backward instead of the input; Fivefold casts again."""
    return local.job.precision.narrow and local.facts.keeps_casts


def casting(op: Op, local: Local, *, first: bool = True, experts: int = 0, cast_rows: int = 0) -> Op:
    """``op`` with the bytes of Fivefold's casts; ``first``: its input's too. ``experts``: groups of rows;
    ``cast_rows``: rows of the input that this rank casts, if it gathers the others' casts.
    """
    recipe = local.job.precision
    if not recipe.narrow:
        return op
    rows, outof, into = op.shape
    if keeps_casts(local):  # W reads the output's gradient as it was cast for dx (Transformer Engine's WeightGradStore)
        return op._replace(product_bytes=narrow_bytes(local, rows * op.batch * outof))
    per, rows = max(1, experts), rows * op.batch
    x, g = cast_bytes(local, rows, into), cast_bytes(local, rows, outof)
    weight = cast_bytes(local, outof, into, matrices=per, weight="forward")
    transposed = cast_bytes(local, into, outof, matrices=per, weight="backward")
    if recipe.holds_casts:  # the weight is its cast; dx reads a transposed copy
        weight, transposed = 0, per * into * outof
    columns, late = (
        0 if recipe.wide_gradients else cast_bytes(local, size, rows, groups=experts) for size in (into, outof)
    )
    found = Casts(first * x, weight, g, transposed, rows * into * local.width, first * columns, late)
    of_x, of_w, of_g = (local.width * size for size in (rows * into, per * into * outof, rows * outof))
    of_w = transposed if recipe.holds_casts else of_w
    moved = (
        first * (of_x + x) * (cast_rows or rows) // rows + (of_w + weight) * (not recipe.holds_casts),
        of_g + g + of_w + transposed,
        (first * (of_x + columns) + of_g + late) * (not recipe.wide_gradients),
    )
    return op._replace(casts=found, moved_by_casts=moved)


def cast_bytes(
    local: Local, rows: int, columns: int, *, matrices: int = 1, groups: int = 0,
    weight: Literal["", "forward", "backward"] = "",
) -> int:  # fmt: skip
    """Bytes of ``matrices`` of [rows, columns] in fp8 with scales, as ``trainer/model/float8`` makes them.

    ``groups``: the columns belong to so many experts, each with scales of its own.
    """
    scaling, numel = local.job.precision.scaling, matrices * rows * columns
    if scaling == "tensorwise" or (weight == "backward" and local.job.precision.wide_gradients):
        return numel + 4 * matrices
    if scaling == "rowwise":
        return numel + 4 * matrices * rows * max(1, groups)
    if scaling in ("blocks", "blocks16"):
        return matrices * (rows * _row_of_blocks(local, columns, groups=groups) + _outer_bytes(local))
    tile = SCALED_ELEMENTS[scaling]
    if weight:
        return numel + 4 * matrices * ceil_div(rows, tile) * ceil_div(columns, tile)
    tiles = columns // tile + groups + 1 if groups else ceil_div(columns, tile)
    return numel + 4 * rows * tiles


def travelling(local: Local, into: int) -> Iterator[tuple[str, int]]:
    """Collectives and payloads by which ranks get the cast [rows, ``into``] of all rows: of the data, then of what
    scales it. For a scale of the whole matrix they agree on its largest element.
    """
    scaling, rows = local.job.precision.scaling, local.rows
    data = rows * (ceil_div(into, 2) if local.job.precision.compute == "fp4" else into)
    yield "all_gather", data
    if scaling in ("tensorwise", "blocks16"):
        yield "all_reduce", 4
    if scaling != "tensorwise":
        scales = 1 if scaling == "rowwise" else ceil_div(into, SCALED_ELEMENTS[scaling])
        yield "all_gather", rows * scales * (1 if scaling in ("blocks", "blocks16") else 4)


def cast(local: Local, source: str, out: str, *, numel: int) -> Op:
    """A cast to fp8 or fp4 with its scales; the same kernel writes the transposed copy that dW reads."""
    size = narrow_bytes(local, numel)
    moved = numel * local.width + 2 * size
    # backward bytes: the matmul casts its output's gradient likewise, which is counted here
    return Op(
        out, "cast", (source,), {out: size}, moved_bytes=moved, moved_backward_bytes=moved,
        gradients={out: numel * local.width},
    )  # fmt: skip


def narrow_bytes(local: Local, numel: int) -> int:
    """Bytes of ``numel`` elements in fp8 or fp4, scales included."""
    recipe = local.job.precision
    scaled = SCALED_ELEMENTS.get(recipe.scaling)
    per_scale = 1 if recipe.scaling in ("blocks", "blocks16") else 4
    scales = 4 if scaled is None else per_scale * ceil_div(numel, scaled)
    return (ceil_div(numel, 2) if recipe.compute == "fp4" else numel) + scales + _outer_bytes(local)


def _row_of_blocks(local: Local, columns: int, *, groups: int) -> int:
    """Bytes of one row of ``columns`` in MXFP8 or NVFP4 with its scales; of ``groups`` with room for uneven ends."""
    each, four = SCALED_ELEMENTS[local.job.precision.scaling], local.job.precision.compute == "fp4"
    if groups:
        return (columns // 2 + groups if four else columns) + columns // each + groups + 1
    return (ceil_div(columns, 2) if four else columns) + ceil_div(columns, each)


def _outer_bytes(local: Local) -> int:
    """Bytes of the scale of a whole matrix beside those of its blocks."""
    return 4 if local.job.precision.scaling == "blocks16" else 0
