"""A linear layer under tensor parallelism, as in Megatron: column-parallel (output sharded) or row-parallel (input).

    column   x ──(sp: all_gather)── x W_col        backward: reduce_scatter, or all_reduce without sp
    row      x W_row ──reduce_scatter, or all_reduce without sp── y        backward: all_gather, or nothing

Under sp the gathered input is freed and gathered again for dW, in 16 bits, or kept (``Stack.column_inputs``); in the
forward, fp8 and fp4 inputs are sent as cast. Other stacks keep that cast; Fivefold casts around each product
(``Op.casts``), and so does torchao with a scale for each row, where inputs are sent and kept in 16 bits. Sources:
arXiv:1909.08053, arXiv:2205.05198 §4.2.2; pytorch/ao@36027d8:torchao/float8/float8_linear.py,
matmul_with_hp_or_float8_args, and float8_tensor_parallel.py, which gathers casts with one scale only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from fivefold.job import SCALED_ELEMENTS, Job
from fivefold.planner.counts.operations.local_shapes import Local, LocalDegrees
from fivefold.planner.counts.operations.op import Float8Casts, NormKind, Op, OpMessage, exchange, matmul, norm
from fivefold.units import ceil_div


class LinearInput:
    """The input of column-parallel linears, cast and gathered once for all of them by ``ops``."""

    def __init__(
        self,
        local: Local,
        tensor: str,
        *,
        in_features: int,
        rows: int,
        needs_all_rows: bool = True,
        reader: str = "",
        all_reduces: int = 1,
    ) -> None:
        """List the operations that cast and gather ``tensor`` [rows, in_features].

        ``needs_all_rows``: its readers need the rows of all tp ranks. ``reader``: suffix of the names of the tensors
        made here, needed if another ``LinearInput`` of the same tensor makes them too. ``all_reduces``: of its gradient
        without sequence parallelism (``Stack.input_grad_all_reduces``).
        """
        self.local, self.in_features, self.kept = local, in_features, tensor
        self.ops: list[Op] = []
        self.sums: list[
            Op
        ] = []  # 2D tensor parallelism: reductions of the readers' outputs over tp_inner, after all readers
        self.first = True  # the next reader is the first
        size = rows * in_features * local.width
        if keeps_casts(local):
            self.kept = f"{tensor}.cast{reader}"
            size = count_low_precision_bytes(local, rows * in_features)
            self.ops.append(cast(local, tensor, self.kept, numel=rows * in_features))
        self.read, self.rows = self.kept, rows
        self.regathered = self.cast_rows = 0  # cast_rows: rows cast here before the gather; 0: cast after it
        part = local.part
        if not needs_all_rows or part.tp == 1:
            return
        self.read = f"{tensor}.whole{reader}"
        if part.sp:
            keeps_gathered = local.job.stack.column_inputs != "regathered"
            self.rows, self.regathered = local.rows, 0 if keeps_gathered else size * local.outer
            # the gradient is sent in 16 bits, whatever the operand was cast to
            gradient_bytes = local.rows * in_features * local.width
            regather = "" if keeps_gathered else "all_gather"
            message = OpMessage(
                get_row_group(part), "all_gather", "reduce_scatter", size * local.outer, 1, regather, gradient_bytes
            )
            if local.job.precision.is_low_precision and local.facts.fuses_linears:
                self.cast_rows = rows
                payload, *scales = list_sent_casts(local, in_features)
                message = message._replace(payload=payload[1], uncast_payload=size * local.outer, scales=tuple(scales))
            self.ops.append(
                exchange(
                    f"{tensor}.gather",
                    self.kept,
                    self.read,
                    size=size * local.outer,
                    message=message,
                    gradient_bytes=gradient_bytes,
                )
            )
            if keeps_gathered:
                self.kept = self.read
        else:
            size = rows * in_features * local.width
            if local.job.stack.column_inputs == "copied":
                source, self.kept = self.kept, f"{tensor}.copies{reader}"
                copied = all_reduces * size  # one for each layer
                copies = Op(self.kept, "cast", (source,), {self.kept: copied}, moved_bytes=2 * copied)
                self.ops.append(copies._replace(gradients={self.kept: size}, passes_gradient=True))
            message = OpMessage(
                "tp", "", "all_reduce", size, backward_payload=all_reduces * size, backward_parts=all_reduces
            )
            self.ops.append(exchange(f"{tensor}.copy", self.kept, self.read, size=0, message=message))

    def column(self, name: str, out: str, *, out_features: int, bias: bool = False, shared: bool = False) -> Op:
        """Return the column-parallel matmul to ``out`` [rows, out_features].

        ``out_features`` is the size on this rank. Under 2D tensor parallelism each inner rank computes partial sums of
        ``tp_inner * out_features`` columns and reduce-scatters them to ``out_features``. With ``shared`` (one key head
        for several ranks) it all-reduces them instead, as every inner rank needs all columns.
        """
        local, inner = self.local, self.local.part.tp_inner
        partial = out if inner == 1 else f"{out}.partial"
        op = matmul(
            name,
            self.read,
            partial,
            rows=self.rows,
            in_features=self.in_features,
            out_features=out_features * inner,
            width=local.width,
            bias=bias,
        )
        if inner > 1:
            size = self.rows * out_features * local.width
            kinds = ("reduce_scatter", "all_gather")
            message = OpMessage("tp_inner", *kinds, payload=inner * size)
            if shared:  # every inner rank needs the full columns
                size, message = inner * size, OpMessage("tp_inner", "all_reduce", "all_reduce", payload=inner * size)
            self.sums.append(exchange(f"{name}.reduce", partial, out, size=size, message=message))
        op = add_casts(op, self.local, first=self.first, cast_rows=self.cast_rows)
        self.first = False
        return op._replace(keeps=(self.kept,), backward_scratch=self.regathered, regathered_bytes=self.regathered)


def list_row_parallel(
    local: Local, name: str, source: str, out: str, *, in_features: int, out_features: int, bias: bool
) -> Sequence[Op]:
    """List the row-parallel matmul ``source`` [rows, in] → ``out`` [stream rows, out], both of this rank."""
    part = local.part
    ops, tensor = [], source
    if keeps_casts(local):
        tensor = f"{source}.cast"
        ops.append(cast(local, source, tensor, numel=local.rows * in_features))
    partial = out if part.tp == 1 else f"{out}.partial"
    inner, out_features = part.tp_inner, out_features // part.tp_inner
    if inner > 1:
        ops.append(_gather_columns(local, source, in_features=in_features))
        tensor = f"{source}.whole"
    in_features *= inner
    product = matmul(
        name,
        tensor,
        partial,
        rows=local.rows,
        in_features=in_features,
        out_features=out_features,
        width=local.width,
        bias=bias,
    )
    product = add_casts(product, local)
    if inner > 1:
        regathered_bytes = local.rows * in_features * local.width
        product = product._replace(
            keeps=(source,), backward_scratch=regathered_bytes, regathered_bytes=regathered_bytes
        )
    ops.append(product)
    if part.tp > 1:
        size = local.rows * out_features * local.width
        kinds = ("reduce_scatter", "all_gather") if part.sp else ("all_reduce", "")
        message = OpMessage(get_row_group(part), *kinds, payload=size)
        size = local.stream_rows * out_features * local.width
        ops.append(exchange(f"{name}.reduce", partial, out, size=size, message=message))
    return ops


def get_row_group(part: LocalDegrees) -> str:
    """Return the group that shards the rows of the stream: under 2D tensor parallelism the outer one."""
    return "tp" if part.tp_inner == 1 else "tp_outer"


def list_norm(local: Local, op: Op) -> Op:
    """Return a norm of the stream.

    If 2D tensor parallelism shards its columns, with fp32 sums of each row over tp_inner.
    """
    if local.part.tp_inner == 1:
        return op
    sums_bytes = 8 if len(op.wgrad_numels) > 1 else 4  # LayerNorm: of x and of x²
    return op._replace(message=OpMessage("tp_inner", "all_reduce", "all_reduce", sums_bytes * local.stream_rows))


def build_sub_norm(local: Local, name: str, source: str, *, dim: int, kind: NormKind | None = None) -> Op:
    """Return the norm of a row-parallel layer's input, of which this rank holds ``dim`` columns.

    It reads the tensor ``source`` and writes the tensor of that name with an appended n.

    Under tp the sums of each row are all-reduced. ``kind``: by default the model's norm.
    """
    kind = kind or local.norm
    op = norm(name, source, f"{source}n", rows=local.rows, dim=dim, width=local.width, kind=kind)
    if local.part.tp == 1:
        return op
    sums_bytes = 4 * kind.norm.statistics * local.rows
    return op._replace(message=OpMessage("tp", "all_reduce", "all_reduce", sums_bytes))


def _gather_columns(local: Local, source: str, *, in_features: int) -> Op:
    """Return the all-gather over tp_inner of a row-parallel layer's input [rows, ``in_features``], or of its cast.

    It is needed under 2D tensor parallelism.
    """
    gathered_bytes = local.rows * in_features * local.width * local.part.tp_inner
    message = OpMessage("tp_inner", "all_gather", "reduce_scatter", gathered_bytes, 1, "all_gather", gathered_bytes)
    if local.job.precision.is_low_precision:
        payload, *scales = list_sent_casts(local, in_features * local.part.tp_inner)
        message = message._replace(payload=payload[1], uncast_payload=gathered_bytes, scales=tuple(scales))
    return exchange(
        f"{source}.gather",
        source,
        f"{source}.whole",
        size=gathered_bytes,
        message=message,
        gradient_bytes=gathered_bytes,
    )


def drop_wgrad(op: Op, job: Job) -> Op:
    """Return ``op`` without a weight gradient tensor (0 elements) if its matmul accumulates in place."""
    if job.stack.wgrad_accumulation not in ("fused", "fused_dummy") or not has_fused_wgrad_accumulation(op):
        return op
    return op._replace(wgrad_numels=(0, *op.wgrad_numels[1:]))


def has_fused_wgrad_accumulation(op: Op) -> bool:
    """Return True for a linear layer with fused wgrad accumulation in Transformer Engine or Megatron."""
    return op.kind == "matmul" and op.name != "moe.router"


def keeps_casts(local: Local) -> bool:
    """Return True if the cast of an input is kept for the backward instead of the input.

    Fivefold casts again. So does torchao with a scale for each row: dW needs one for each column.
    """
    recipe = local.job.precision
    return recipe.is_low_precision and local.facts.keeps_casts and recipe.scaling != "rowwise"


def add_casts(op: Op, local: Local, *, first: bool = True, experts: int = 0, cast_rows: int = 0) -> Op:
    """Return ``op`` in the recipe's fp8 or fp4, with the bytes of its casts if they are made around its products.

    Only these linear layers, and experts, leave 16 bits: not the head, routers, indexers, compressed keys, experts of
    attention, adapters, per-layer inputs, LAuReL, gates of norms, nor a vision tower (``trainer/model/float8``).

    ``first``: the input is cast too. ``experts``: groups of rows; ``cast_rows``: rows of the input that this rank
    casts, if it gathers the other ranks' casts.
    """
    recipe = local.job.precision
    if not recipe.is_low_precision:
        return op
    op = op._replace(low_precision=True)
    rows, out_features, in_features = op.shape
    if keeps_casts(local):  # W reads the output gradient as cast for dx (Transformer Engine's WeightGradStore)
        return op._replace(wgrad_operand_bytes=count_low_precision_bytes(local, rows * op.batch * out_features))
    n_groups, rows = max(1, experts), rows * op.batch
    input_bytes = cast_bytes(local, rows, in_features)
    gradient_bytes = cast_bytes(local, rows, out_features)
    weight = cast_bytes(local, out_features, in_features, matrices=n_groups, weight="forward")
    transposed = cast_bytes(local, in_features, out_features, matrices=n_groups, weight="backward")
    if recipe.holds_casts:  # the weight is its cast; dx reads a transposed copy
        weight, transposed = 0, n_groups * in_features * out_features
    input_columns, gradient_columns = (
        0 if recipe.wide_gradients else cast_bytes(local, size, rows, groups=experts)
        for size in (in_features, out_features)
    )
    casts = Float8Casts(
        first * input_bytes,
        weight,
        gradient_bytes,
        transposed,
        rows * in_features * local.width,
        first * input_columns,
        gradient_columns,
    )
    input_moved, weight_moved, gradient_moved = (
        local.width * size for size in (rows * in_features, n_groups * in_features * out_features, rows * out_features)
    )
    weight_moved = transposed if recipe.holds_casts else weight_moved
    moved_bytes = (
        first * (input_moved + input_bytes) * (cast_rows or rows) // rows
        + (weight_moved + weight) * (not recipe.holds_casts),
        gradient_moved + gradient_bytes + weight_moved + transposed,
        (first * (input_moved + input_columns) + gradient_moved + gradient_columns) * (not recipe.wide_gradients),
    )
    op = op._replace(casts=casts, moved_cast_bytes=moved_bytes)
    if local.facts.fuses_linears:  # that operation holds them
        return op
    scratch = casts.gradient + casts.transposed, input_columns + gradient_columns
    return op._replace(forward_scratch=input_bytes + weight, cast_scratch_bytes=scratch)


def cast_bytes(
    local: Local,
    rows: int,
    columns: int,
    *,
    matrices: int = 1,
    groups: int = 0,
    weight: Literal["", "forward", "backward"] = "",
) -> int:
    """Return the bytes of ``matrices`` of [rows, columns] in fp8 with scales, as ``trainer/model/float8`` makes them.

    ``groups``: the columns belong to this many experts, each with its own scales.
    """
    scaling, numel = local.job.precision.scaling, matrices * rows * columns
    if local.job.precision.has_one_scale or (weight == "backward" and local.job.precision.wide_gradients):
        return numel + 4 * matrices
    if scaling == "rowwise":
        return numel + 4 * matrices * rows * max(1, groups)
    if scaling in ("blocks", "blocks16"):
        return matrices * (rows * _count_row_bytes(local, columns, groups=groups) + _count_outer_bytes(local))
    tile = SCALED_ELEMENTS[scaling]
    if weight:
        return numel + 4 * matrices * ceil_div(rows, tile) * ceil_div(columns, tile)
    tiles = columns // tile + groups + 1 if groups else ceil_div(columns, tile)
    return numel + 4 * rows * tiles


def list_sent_casts(local: Local, in_features: int) -> Iterator[tuple[str, int]]:
    """Yield the collectives and payloads that send the cast [rows, ``in_features``] of all rows.

    The data come first, then the scales.

    For a scale of the full matrix the ranks agree on its largest element.
    """
    scaling, rows = local.job.precision.scaling, local.rows
    yield "all_gather", rows * local.job.precision.number_format.count_bytes(in_features)
    if scaling in ("tensorwise", "blocks16"):
        yield "all_reduce", 4
    if not local.job.precision.has_one_scale:
        scales = 1 if scaling == "rowwise" else ceil_div(in_features, SCALED_ELEMENTS[scaling])
        yield "all_gather", rows * scales * (1 if scaling in ("blocks", "blocks16") else 4)


def cast(local: Local, source: str, out: str, *, numel: int) -> Op:
    """Return a cast to fp8 or fp4 with its scales; the same kernel writes the transposed copy that dW reads, if any.

    A scale of the full matrix takes another pass, which reads it for its largest element.

    Its backward has no kernel: each product casts the gradient of its own output (``time/compute.py``). Source:
    NVIDIA/TransformerEngine@v2.8:transformer_engine/pytorch/module/linear.py (``set_usage``) and base.py
    (``grad_output_preprocess``).
    """
    size = count_low_precision_bytes(local, numel)
    transposed = size if local.job.adapter is None else 0
    return Op(
        out,
        "cast",
        (source,),
        {out: size},
        moved_bytes=count_read_passes(local.job) * numel * local.width + size + transposed,
        transposed_bytes=transposed,
        gradients={out: numel * local.width},
    )


def count_read_passes(job: Job) -> int:
    """Return how often a cast reads its input: twice for a scale of the full matrix, first for its largest element.

    torch.compile takes it in the kernel that makes the tensor. Delayed scaling has it from earlier steps. Sources:
    NVIDIA/TransformerEngine@d0067d0:transformer_engine/pytorch/csrc/quantizer.cpp (quantize_impl of
    Float8CurrentScalingQuantizer and NVFP4Quantizer); pytorch/ao@36027d8:torchao/testing/training/roofline_utils.py
    (fuse_with_prev).
    """
    return 2 if job.precision.scaling in ("tensorwise", "blocks16") and not job.stack.is_compiled else 1


def count_low_precision_bytes(local: Local, numel: int) -> int:
    """Return the bytes of ``numel`` elements in fp8 or fp4, scales included."""
    recipe = local.job.precision
    block = SCALED_ELEMENTS.get(recipe.scaling)
    per_scale = 1 if recipe.scaling in ("blocks", "blocks16") else 4
    scales_bytes = 4 if block is None else per_scale * ceil_div(numel, block)
    return recipe.number_format.count_bytes(numel) + scales_bytes + _count_outer_bytes(local)


def _count_row_bytes(local: Local, columns: int, *, groups: int) -> int:
    """Return the bytes of a row of ``columns`` in MXFP8 or NVFP4 with scales; ``groups`` adds space for uneven ends."""
    elements, bits = SCALED_ELEMENTS[local.job.precision.scaling], local.job.precision.number_format.operand_bits
    if groups:
        return columns * bits // 8 + (groups if bits < 8 else 0) + columns // elements + groups + 1
    return ceil_div(columns * bits, 8) + ceil_div(columns, elements)


def _count_outer_bytes(local: Local) -> int:
    """Return the bytes of the scale of a full matrix, which is added to those of its blocks."""
    return 4 if local.job.precision.scaling == "blocks16" else 0
