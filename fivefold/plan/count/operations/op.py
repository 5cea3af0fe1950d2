"""One operation of the forward pass: what it computes, reads, writes, and keeps for its backward.

A layer is a list of these, written once (``layer.py``) and read as FLOPs, bytes moved, bytes kept and, by playing
it forward and backward (``rank_memory.py``), as live bytes over time. All numbers are exact integers for one rank and
one micro-batch; nothing here knows a machine.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["matmul", "attention", "norm", "rope", "activation", "add", "embedding", "loss", "cast", "message"]


class Message(NamedTuple):
    """What an operation says to the ranks of ``axis``: a collective forward, one backward, one sent again there.

    ``payload`` is the full tensor in bytes (all_to_all, p2p: what one rank holds), ``times`` per forward.
    """

    axis: str
    forward: str
    backward: str
    payload: int
    times: int = 1
    regather: str = ""  # before the backward: what the forward had gathered was let go
    backward_payload: int | None = None  # None: as forward
    backward_parts: int = 1  # messages side by side that this payload goes in


class Casts(NamedTuple):
    """Bytes of what a linear layer of ours casts to eight bits around its products, and of a second dx beside a first.

    ``x`` and ``columns``, of the input for y and for dW, live while all layers on it are computed.
    """

    x: int = 0
    weight: int = 0  # for y
    gradient: int = 0  # for dx
    transposed: int = 0  # the weight for dx
    product: int = 0
    columns: int = 0
    gradient_columns: int = 0  # for dW


class Op(NamedTuple):
    """``reads`` and ``writes`` name tensors; ``writes`` and ``keeps`` give bytes of storage of their own.

    ``keeps`` lists tensors (by name) whose storage must live until this operation's backward has run.
    Scratch is what the operation holds at its fullest moment besides its inputs and outputs.
    """

    name: str
    kind: Kind
    reads: tuple[str, ...]
    writes: dict[str, int]
    keeps: tuple[str, ...] = ()
    parameters: int = 0  # trainable elements used
    # Elements of each weight that gets a gradient here, in order; 0: the product is added to the sums, and no tensor.
    gradient_widths: tuple[int, ...] = ()
    flops: int = 0  # forward, attention as the full square
    causal_flops: int = 0  # forward, only what a causal mask lets through
    shape: tuple[int, int, int] = (0, 0, 0)  # m, n, k of a matmul; sequences, tokens, head dim of attention
    moved_bytes: int = 0  # read and written by the forward
    moved_backward_bytes: int = 0
    forward_scratch: int = 0
    backward_scratch: int = 0
    regathered: int = 0  # of this, the input that is gathered once more for the weights' gradients
    product_bytes: int = 0  # of the gradients of what a linear layer multiplies out, where they are not those it gets
    differentiates: tuple[str, ...] | None = None  # inputs that get a gradient; None: all of ``reads``
    in_place: bool = False  # the gradient of the input takes the place of what was kept
    batch: int = 1  # matmuls of this shape side by side (experts)
    message: Message | None = None
    gradients: dict[str, int] | None = None  # bytes of the gradients of what is written, where they are not as large
    recomputed: bool = False  # runs a second time, in the backward
    stays: tuple[str, ...] = ()  # of what is written, what is kept even where this is recomputed
    casts: Casts = Casts()
    moved_by_casts: tuple[int, int, int] = (0, 0, 0)  # bytes for y, dx, dW
    scratch_of_casts: tuple[int, int] = (0, 0)  # backward: while dx is made; beside the largest dW while these are
    delivers: bool = False  # hands over its weights' gradients, one after another, before it lets anything go


def split(name: str, source: str, parts: dict[str, int]) -> Op:
    """Copies of the parts of ``source``, by name with their bytes; backward joins their gradients."""
    size = sum(parts.values())
    return Op(name, "cast", (source,), parts, moved_bytes=2 * size, moved_backward_bytes=2 * size)


def matmul(
    name: str, source: str, out: str, *, rows: int, into: int, outof: int, width: int, bias: bool = False
) -> Op:  # fmt: skip
    """``out[rows, outof] = source[rows, into] @ weight.T`` in ``width`` bytes per element."""
    flops = 2 * rows * into * outof
    touched = (rows * into + into * outof + rows * outof) * width
    return Op(
        name, "matmul", (source,), {out: rows * outof * width}, keeps=(source,),
        parameters=into * outof + (outof if bias else 0),
        gradient_widths=(into * outof, outof) if bias else (into * outof,),
        flops=flops, causal_flops=flops, shape=(rows, outof, into),
        moved_bytes=touched, moved_backward_bytes=2 * touched,
    )  # fmt: skip


def norm(
    name: str, source: str, out: str, *, rows: int, dim: int, width: int, kind: Literal["rmsnorm", "layernorm"],
    plain: bool = False,
) -> Op:  # fmt: skip
    """A norm over ``dim`` that keeps its input and one fp32 statistic per row (two for LayerNorm).

    ``plain``: an RMSNorm of separate kernels, which keeps its input in fp32 and the normal before the weight.
    """
    numel = rows * dim
    wide = 0 if width == 4 else 4  # a 16-bit input is widened first
    layernorm = kind == "layernorm"
    op = Op(
        name, "norm", (source,), {out: numel * width, f"{out}.stat": rows * (8 if layernorm else 4)},
        keeps=(source, f"{out}.stat"),
        parameters=dim * (2 if layernorm else 1), gradient_widths=(dim, dim) if layernorm else (dim,),
        moved_bytes=2 * numel * width, moved_backward_bytes=3 * numel * width,
        # rms_norm of train/model/kernels.py: forward x·rstd in fp32; backward x̂ and a product in fp32, of which the
        # result takes one over when nothing is to be narrowed. LayerNorm is a fused kernel.
        forward_scratch=0 if layernorm else numel * wide,
        backward_scratch=0 if layernorm else numel * (8 if wide else 4),
    )  # fmt: skip
    if not plain or layernorm:
        return op
    normal, widened = {f"{out}.normal": numel * width}, {f"{out}.wide": numel * 4} if wide else {}
    keeps = (*(widened or (source,)), *normal, f"{out}.stat")
    return op._replace(writes=op.writes | normal | widened, keeps=keeps, backward_scratch=numel * 12)


def rope(name: str, source: str, out: str, *, numel: int, width: int) -> Op:
    """Rotary embedding: four half-width products, then joined; keeps nothing."""
    size = numel * width
    return Op(
        name, "rope", (source,), {out: size}, moved_bytes=2 * size, moved_backward_bytes=2 * size,
        forward_scratch=size, backward_scratch=size,
    )  # fmt: skip


def elementwise(
    name: str, kind: Kind, reads: tuple[str, ...], out: str, *, size: int, keeps: tuple[str, ...] = (),
    backward_scratch: int = 0, mask: int = 0,
) -> Op:  # fmt: skip
    """An operation that reads tensors of ``size`` bytes and writes one; ``mask``: bytes of a dropout mask kept."""
    writes = {out: size} | ({f"{out}.mask": mask} if mask else {})
    return Op(
        name, kind, reads, writes, keeps=(*keeps, *([f"{out}.mask"] if mask else ())),
        moved_bytes=(len(reads) + 1) * size + mask, moved_backward_bytes=(len(reads) + len(keeps) + 1) * size + mask,
        backward_scratch=backward_scratch,
    )  # fmt: skip


def dropout(name: str, source: str, out: str, *, size: int, mask: int) -> Op:
    """Dropout over ``mask`` elements, whose mask of one byte each is kept."""
    return elementwise(name, "activation", (source,), out, size=size, mask=mask)


def exchange(
    name: str, source: str, out: str, *, size: int, message: Message, gradient_bytes: int | None = None
) -> Op:  # fmt: skip
    """A message that makes ``out`` of ``size`` bytes from ``source``."""
    gradients = None if gradient_bytes is None else {out: gradient_bytes}
    return Op(name, "message", (source,), {out: size}, message=message, gradients=gradients)
