"""An operation of the forward pass: what it computes, reads, writes, and keeps for its backward.

A layer is a list of operations (``layer.py``). FLOPs, bytes moved and bytes kept are counted from it, and live bytes
over time by simulating the list forward and backward (``memory/liveness.py``). All numbers are exact integers for one
rank and one micro-batch, and do not depend on a machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from fivefold.model.norms import Norm
from fivefold.planner.counts.operations.launches import DROPOUT_LAUNCHES

# scan: the core of a token mixer other than attention
Kind = Literal[
    "matmul", "attention", "scan", "norm", "rope", "activation", "add", "embedding", "loss", "cast", "message"
]


class OpMessage(NamedTuple):
    """The messages of an operation over ``axis``: a collective in the forward, one in the backward ("": none).

    ``payload`` is the full tensor in bytes (all_to_all, p2p: the bytes that one rank holds), ``times`` per forward.
    """

    axis: str
    forward: str
    backward: str
    payload: int
    times: int = 1
    regather: str = ""  # collective that gathers again in the backward a tensor freed after the forward
    backward_payload: int | None = None  # None: as forward
    backward_parts: int = 1  # number of messages into which the backward payload is split
    uncast_payload: int | None = None  # payload of the regather if the forward sends a cast: the uncast tensor
    scales: tuple[tuple[str, int], ...] = ()  # additional collectives and payloads of a forward that sends a cast

    @property
    def uncast(self) -> OpMessage:
        """Return the message without casts, as recomputed operations send it, because dW reads their uncast result."""
        return self if self.uncast_payload is None else self._replace(payload=self.uncast_payload, scales=())


class Float8Casts(NamedTuple):
    """Bytes of the eight-bit casts that a linear layer of Fivefold makes around its products y, dx and dW.

    ``x`` and ``columns`` stay allocated while all layers on the same input are computed.
    """

    x: int = 0  # of the input, for y
    weight: int = 0  # of the weight, for y
    gradient: int = 0  # of the output's gradient, for dx
    transposed: int = 0  # of the weight, for dx
    product: int = 0  # no cast: a second dx, before it is added to the first
    columns: int = 0  # of the input, for dW
    gradient_columns: int = 0  # of the output's gradient, for dW


class Op(NamedTuple):
    """An operation: ``reads`` and ``keeps`` name tensors, ``writes`` maps names to bytes of new storage (0: a view).

    ``keeps`` lists the tensors whose storage must stay allocated until this operation's backward has run. Scratch is
    the peak of what the operation holds besides its inputs and outputs.
    """

    name: str
    kind: Kind
    reads: tuple[str, ...]
    writes: dict[str, int]
    keeps: tuple[str, ...] = ()
    parameters: int = 0  # trainable elements used
    # Elements of each weight gradient made here, in order; 0: accumulated by the matmul, without a tensor.
    wgrad_numels: tuple[int, ...] = ()
    bias_wgrad_numel: int = 0  # elements of bias gradients that a separate operation adds, so that no W makes them
    # bytes that a separate operation takes to add the bias of each row's expert: forward; backward, before dx
    bias_scratch: tuple[int, int] = (0, 0)
    flops: int = 0  # forward, attention as the full square
    backward_flops: int = 0  # 0: twice the forward
    causal_flops: int = 0  # forward, only the pairs that a causal mask lets through
    windowed_flops: int = 0  # attention with a window: forward of all cp ranks together, only visible pairs
    shape: tuple[int, int, int] = (0, 0, 0)  # m, n, k of a matmul, or of a scan's products; sequences, tokens, head dim
    moved_bytes: int = 0  # read and written by the forward
    moved_backward_bytes: int = 0
    transposed_bytes: int = 0  # part of moved_bytes: the transposed copy that a cast writes on some chips only
    forward_scratch: int = 0
    backward_scratch: int = 0
    scratch_tensor: int = 0  # the largest tensor of backward_scratch if there are several; 0: there is one
    regathered_bytes: int = 0  # part of backward_scratch: the input that is gathered again for dW
    wgrad_operand_bytes: int = 0  # output gradients for dW other than those received: gathered, or of gate and up
    differentiates: tuple[str, ...] | None = None  # inputs that get a gradient; None: all of ``reads``
    in_place: bool = False  # the gradient of the input overwrites the kept tensor
    passes_gradient: bool = False  # passes its gradient on to its inputs without a copy, as an addition does
    batch: int = 1  # equal matmuls (experts, chunks of a scan's heads), heads of attention or with a norm weight each
    message: OpMessage | None = None
    gradients: dict[str, int] | None = None  # bytes of the gradients of written tensors, if their sizes differ
    recomputed: bool = False  # runs a second time, in the backward
    always_kept: tuple[str, ...] = ()  # written tensors that are kept even if the operation is recomputed
    low_precision: bool = False  # its products run in the recipe's fp8 or fp4; others stay in 16 bits or fp32
    casts: Float8Casts = Float8Casts()
    moved_cast_bytes: tuple[int, int, int] = (0, 0, 0)  # bytes for y, dx, dW
    dequantizing_kernels: int = 0  # launched for a frozen weight in 4 bits before y, and again before dx
    # bytes of casts and of dequantized weights in the backward: during dx; during the largest dW
    cast_scratch_bytes: tuple[int, int] = (0, 0)
    backward_products: int = 2  # forwards that the backward's FLOPs equal: 1 without dW or without dx, 0 without both
    accumulates_dgrad: bool = False  # adds the gradient of its input in place to that of other readers, if there is one
    accumulates_wgrads: bool = False  # accumulates its weight gradients one after another before it frees anything
    fused: bool = False  # a scan by kernels of its own, not by PyTorch's operations
    convolved: int = 0  # elements of a fused Mamba-2's convolution, which its bytes do not count
    gated: int = 0  # elements of its gate and norm, likewise
    # kernels of the trainer's own form, forward and backward; of an activation, those that Megatron launches
    launches: tuple[int, int] = (1, 1)
    # bytes that those other than matmuls read and write, unless it is fused; 0: as moved_bytes
    launched_bytes: tuple[int, int] = (0, 0)
    blocks_host: bool = False  # copies a number to the device, for which the host waits


def list_gradient_sums(ops: Sequence[Op]) -> Iterator[tuple[int, int]]:
    """Yield the sums of gradients of tensors that several of ``ops`` read: an operation in whose backward, and bytes.

    A tensor's gradients are added as they are computed, in the backward of each of its readers but the last.
    """
    sizes = {
        name: op.moved_bytes // (len(op.reads) + 1) for op in ops if op.kind == "add" for name in op.reads
    }  # also of what the unit receives
    for op in ops:
        sizes.update(op.writes)
    summed = set[str]()
    for index in reversed(range(len(ops))):
        op = ops[index]
        for name in dict.fromkeys(op.reads if op.differentiates is None else op.differentiates):
            if name in summed and sizes.get(name):
                yield index, sizes[name]
            summed.add(name)


def count_largest_scratch(op: Op) -> int:
    """Return the bytes of the largest tensor of the backward's scratch."""
    return min(op.scratch_tensor or op.backward_scratch, op.backward_scratch)


def list_tensors(op: Op) -> tuple[str, ...]:
    """Return the names of all tensors that an operation reads, writes or keeps."""
    return tuple(dict.fromkeys((*op.reads, *op.writes, *op.keeps, *op.always_kept, *(op.differentiates or ()))))


def rename_tensors(op: Op, names: Mapping[str, str]) -> Op:
    """Return the operation with other names of tensors; those that ``names`` does not have keep theirs."""

    def rename(tensors: Iterable[str]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in tensors)

    return op._replace(
        reads=rename(op.reads),
        writes={names.get(name, name): size for name, size in op.writes.items()},
        keeps=rename(op.keeps),
        differentiates=None if op.differentiates is None else rename(op.differentiates),
        gradients=None if op.gradients is None else {names.get(name, name): n for name, n in op.gradients.items()},
        always_kept=rename(op.always_kept),
    )


def split(name: str, source: str, parts: dict[str, int]) -> Op:
    """Return copies of slices of ``source``, given by name and bytes; the backward concatenates their gradients."""
    size = sum(parts.values())
    return Op(name, "cast", (source,), parts, moved_bytes=2 * size, moved_backward_bytes=2 * size)


def is_weight_cast(op: Op) -> bool:
    """Return True if the operation casts a weight, whose gradient the matmul with it makes."""
    return op.kind == "cast" and op.differentiates == ()


def matmul(
    name: str, source: str, out: str, *, rows: int, in_features: int, out_features: int, width: int, bias: bool = False
) -> Op:
    """Return ``out[rows, out_features] = source[rows, in_features] @ weight.T`` in ``width`` bytes per element."""
    flops = 2 * rows * in_features * out_features
    moved_bytes = (rows * in_features + in_features * out_features + rows * out_features) * width
    return Op(
        name,
        "matmul",
        (source,),
        {out: rows * out_features * width},
        keeps=(source,),
        parameters=in_features * out_features + (out_features if bias else 0),
        wgrad_numels=(in_features * out_features, out_features) if bias else (in_features * out_features,),
        flops=flops,
        causal_flops=flops,
        shape=(rows, out_features, in_features),
        moved_bytes=moved_bytes,
        moved_backward_bytes=2 * moved_bytes,
    )


def matmul_groups(
    name: str, source: str, out: str, *, rows: int, groups: int, in_features: int, out_features: int, width: int
) -> Op:
    """Return the products of ``groups`` of columns of ``source``, or heads, each with a weight of its own."""
    op = matmul(name, source, out, rows=rows, in_features=in_features, out_features=out_features, width=width)
    return op._replace(
        writes={out: groups * op.writes[out]},
        parameters=groups * op.parameters,
        wgrad_numels=(groups * in_features * out_features,),
        flops=groups * op.flops,
        causal_flops=groups * op.causal_flops,
        moved_bytes=groups * op.moved_bytes,
        moved_backward_bytes=groups * op.moved_backward_bytes,
        batch=groups,
    )


class NormKind(NamedTuple):
    """The kind of a norm and of its kernel.

    ``plain``: several kernels; it keeps its input in fp32 and the normalized x before the weight. ``fused``: a norm for
    which PyTorch has one kernel uses it, without scratch; the trainer has its own kernel for all norms.
    """

    norm: Norm
    bias: bool
    plain: bool
    fused: bool
    weight: bool = True


def norm(name: str, source: str, out: str, *, rows: int, dim: int, width: int, kind: NormKind) -> Op:
    """Return a norm over ``dim`` that keeps its input and the fp32 statistics of each row."""
    numel = rows * dim
    copy_bytes = 0 if width == 4 else 4  # a 16-bit input is cast to fp32 first
    has_no_scratch = kind.norm.is_one_kernel and kind.fused
    has_bias = kind.weight and kind.norm.has_bias and kind.bias
    op = Op(
        name,
        "norm",
        (source,),
        {out: numel * width, f"{out}.stat": 4 * rows * kind.norm.statistics},
        keeps=(source, f"{out}.stat"),
        parameters=dim * (kind.weight + has_bias),
        wgrad_numels=(dim,) * (kind.weight + has_bias),
        moved_bytes=2 * numel * width,
        moved_backward_bytes=3 * numel * width,
        # trainer/model/kernels/norms.py: forward x·rstd in fp32; backward x̂ and a product in fp32, one of which is
        # the result if that is fp32
        forward_scratch=0 if has_no_scratch else numel * copy_bytes,
        backward_scratch=0 if has_no_scratch else numel * (8 if copy_bytes else 4),
        scratch_tensor=0 if has_no_scratch else numel * 4,
    )
    if not kind.plain or kind.norm.is_one_kernel:
        return op
    normalized = {f"{out}.normal": numel * width}
    fp32_copy = {f"{out}.wide": numel * 4} if copy_bytes else {}
    keeps = (*(fp32_copy or (source,)), *normalized, f"{out}.stat")
    return op._replace(writes=op.writes | normalized | fp32_copy, keeps=keeps, backward_scratch=numel * 12)


def rope(name: str, source: str, out: str, *, numel: int, width: int) -> Op:
    """Return a rotary embedding: four half-width products, concatenated; it keeps nothing."""
    size = numel * width
    return Op(
        name,
        "rope",
        (source,),
        {out: size},
        moved_bytes=2 * size,
        moved_backward_bytes=2 * size,
        forward_scratch=size,
        backward_scratch=size,
    )


def elementwise(
    name: str,
    kind: Kind,
    reads: tuple[str, ...],
    out: str,
    *,
    size: int,
    keeps: tuple[str, ...] = (),
    backward_scratch: int = 0,
    mask: int = 0,
) -> Op:
    """Return an operation that reads tensors of ``size`` bytes and writes one; ``mask``: bytes of a dropout mask."""
    writes = {out: size} | ({f"{out}.mask": mask} if mask else {})
    return Op(
        name,
        kind,
        reads,
        writes,
        passes_gradient=kind == "add",
        keeps=(*keeps, *([f"{out}.mask"] if mask else ())),
        moved_bytes=(len(reads) + 1) * size + mask,
        moved_backward_bytes=(len(reads) + len(keeps) + 1) * size + mask,
        backward_scratch=backward_scratch,
    )


def dropout(name: str, source: str, out: str, *, size: int, mask: int) -> Op:
    """Return a dropout over ``mask`` elements; it keeps a mask of one byte per element."""
    op = elementwise(name, "activation", (source,), out, size=size, mask=mask)
    applied_bytes = 4 * size + mask
    return op._replace(launches=DROPOUT_LAUNCHES, launched_bytes=(applied_bytes + mask, applied_bytes))


def swap_heads(name: str, source: str, out: str, *, size: int) -> Op:
    """Return the swap of heads and tokens over cp (Ulysses) of a token mixer; the size stays the same."""
    message = OpMessage("cp", "all_to_all", "all_to_all", size)
    return exchange(f"{name}.{source}.swap", source, out, size=size, message=message)


def exchange(
    name: str, source: str, out: str, *, size: int, message: OpMessage, gradient_bytes: int | None = None
) -> Op:
    """Return a message that writes ``out`` of ``size`` bytes from ``source``; its gradient may have another size."""
    gradients = None if gradient_bytes is None else {out: gradient_bytes}
    return Op(name, "message", (source,), {out: size}, message=message, gradients=gradients)
