"""PyTorch's autocast over fp32 weights: matmuls in 16 bits, the residual stream in fp32, and casts between them.

    linear layer     casts its input, for itself only, and its weight; keeps both for its backward, and the weight's to
                     the end of the forward in any case (autocast's cache); attention casts fp32 queries, keys, values
    norm, rotary     have fp32 weights and angles, and so fp32 results; tp gathers the stream before it is cast: in fp32
    x + branch       is fp32; the gradient of the branch is cast back to 16 bits
    frozen weights   are stored in 16 bits (``Job.freeze``): they need no cast, and a frozen embedding makes a residual
                     stream and angles in 16 bits, which a norm with fp32 weights widens for its own layers alone
Source: pytorch/pytorch@v2.13.0:aten/src/ATen/autocast_mode.h (formats of operations), autocast_mode.cpp (the cache).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, OpMessage


def apply_autocast(local: Local, ops: Sequence[Op], *, stream_in_16_bits: bool = False) -> list[Op]:
    """Return ``ops``, which are listed in 16 bits, as they run if the job's precision is autocast.

    ``stream_in_16_bits`` says that the stream they read is in 16 bits, because a matmul writes it (the projection
    before a multi-token prediction block).
    """
    return [
        *(
            _apply_autocast(ops, local, stream_in_16_bits=stream_in_16_bits or not local.has_fp32_stream)
            if local.autocast
            else ops
        )
    ]


def _apply_autocast(ops: Sequence[Op], local: Local, *, stream_in_16_bits: bool) -> Iterator[Op]:
    """Yield the operations with the casts that autocast adds around matmuls and attention."""
    stream = {name for op in ops for name in op.reads} - {name for op in ops for name in op.writes}
    fp32_tensors = set[str]() if stream_in_16_bits else {*stream}  # in fp32
    sizes = dict.fromkeys(stream, local.stream_bytes)  # as listed
    for op in ops:
        sizes |= op.writes
        result = next(iter(op.writes))
        read = [name for name in dict.fromkeys(op.reads) if name in fp32_tensors]
        if op.kind in ("matmul", "attention") and op.name != "moe.router":
            casts = {name: f"{op.name}.{name}" for name in read}
            for name, cast in casts.items():
                yield _cast(name, cast, size=sizes[name])
            op = op._replace(reads=_rename(op.reads, casts), keeps=_rename(op.keeps, casts))
            if op.kind == "matmul" and local.trains(op.name):
                weight = f"{op.name}.weight"
                yield _cast(op.reads[0], weight, size=2 * op.batch * op.shape[1] * op.shape[2])._replace(
                    differentiates=()
                )
                op = op._replace(keeps=(*op.keeps, weight), differentiates=op.differentiates or op.reads)
            yield op
            continue
        if op.passes_gradient and read:
            branches = {name: f"{name}.wide" for name in op.reads if name not in fp32_tensors}
            for name, widened in branches.items():
                yield _cast_gradient(name, widened, size=sizes[name])
            op = op._replace(
                reads=(*_rename(op.reads, branches), *branches), differentiates=_rename(op.reads, branches)
            )
        if op.kind == "norm" and local.norm.norm.is_one_kernel and not read:
            widened = f"{op.name}.{op.reads[0]}"
            yield _widen(op.reads[0], widened, size=2 * sizes[op.reads[0]])
            names = {op.reads[0]: widened}
            op = _cast_norm(op._replace(reads=(widened,), keeps=_rename(op.keeps, names)), reads_fp32=True)
        elif op.kind == "norm" and (read or local.trains(op.name)):
            op = _cast_norm(op, reads_fp32=bool(read))
        elif op.kind == "norm":
            pass  # its frozen weights are in 16 bits, and so is its result
        elif f"{op.reads[0]}.cube" in op.writes:
            op = _cast_activation(op)
        elif (read and op.kind != "loss") or (op.kind in ("rope", "embedding") and local.has_fp32_stream):
            op = _upcast(op, result)
        if op.writes[result] > sizes[result]:
            fp32_tensors.add(result)
        yield op


def _cast(source: str, out: str, *, size: int) -> Op:
    """Return the cast of an fp32 tensor, or of the weight multiplied with ``source``, to ``size`` bytes.

    The backward widens its gradient.
    """
    return Op(out, "cast", (source,), {out: size}, moved_bytes=3 * size, moved_backward_bytes=3 * size)


def _widen(source: str, out: str, *, size: int) -> Op:
    """Return the cast of a 16-bit tensor to ``size`` bytes in fp32; the backward casts its gradient back."""
    return Op(out, "cast", (source,), {out: size}, moved_bytes=3 * size // 2, moved_backward_bytes=3 * size // 2)


def _cast_gradient(source: str, out: str, *, size: int) -> Op:
    """Return the cast of a gradient to 16 bits, for a 16-bit tensor of ``size`` bytes that is added to an fp32 one.

    The addition reads the tensor as it is.
    """
    return Op(out, "cast", (source,), {out: 0}, moved_backward_bytes=3 * size)


def _cast_norm(op: Op, *, reads_fp32: bool) -> Op:
    """Return a norm with an fp32 result; if ``reads_fp32`` it keeps the input itself instead of an fp32 copy."""
    result = next(iter(op.writes))
    copy, normal = f"{result}.wide", f"{result}.normal"
    writes = op.writes | {result: 2 * op.writes[result]}
    if not reads_fp32:
        return op._replace(writes=writes, moved_bytes=op.moved_bytes * 3 // 2)
    keeps = tuple(op.reads[0] if name == copy else name for name in op.keeps)
    writes = {name: size for name, size in writes.items() if name != copy}
    if normal in writes:
        writes[normal] *= 2
    return op._replace(
        writes=writes,
        keeps=keeps,
        forward_scratch=0,
        moved_bytes=2 * op.moved_bytes,
        moved_backward_bytes=2 * op.moved_backward_bytes,
    )


def _cast_activation(op: Op) -> Op:
    """Return an activation with a power of its input in fp32: autocast computes it from an fp32 copy."""
    (u,) = op.reads
    writes = {name: size if name.endswith(".half") else 2 * size for name, size in op.writes.items()}
    writes[f"{u}.cube"] = writes[next(iter(writes))]  # the copy, which is kept in place of the input
    keeps = (f"{u}.cube", *(name for name in op.keeps if name != u))
    wider = {name: 2 * getattr(op, name) for name in ("backward_scratch", "moved_bytes", "moved_backward_bytes")}
    return op._replace(writes=writes, keeps=keeps, **wider)


def _upcast(op: Op, result: str) -> Op:
    """Return an operation or message in fp32; what it writes other than its result stays as it was."""
    return op._replace(
        writes=op.writes | {result: 2 * op.writes[result]},
        message=op.message and _to_fp32(op.message),
        gradients=op.gradients and {name: 2 * size for name, size in op.gradients.items()},
        forward_scratch=2 * op.forward_scratch,
        backward_scratch=2 * op.backward_scratch,
        scratch_tensor=2 * op.scratch_tensor,
        moved_bytes=2 * op.moved_bytes,
        moved_backward_bytes=2 * op.moved_backward_bytes,
    )


def _to_fp32(message: OpMessage) -> OpMessage:
    """Return a message of 16-bit elements, and its gradient's, with elements twice as large."""
    backward = message.backward_payload
    return message._replace(payload=2 * message.payload, backward_payload=None if backward is None else 2 * backward)


def _rename(names: Sequence[str], to: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(to.get(name, name) for name in names)
