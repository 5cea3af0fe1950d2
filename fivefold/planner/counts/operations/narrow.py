"""Activations that are kept in few bits for the backward, where others keep 16.

    activation      the input of SwiGLU, from which its output is recomputed     1 byte an element, and scales
    attention       its output, which its own backward reads as well             12 bits (E5M6)
    fp8_attention   queries, keys and values, and its own copy of its output     1 byte an element

Sources: DeepSeek-V3, arXiv:2412.19437 §3.3.3, low-precision storage; attention in fp8: FusedAttnFunc in
NVIDIA/TransformerEngine@v2.8:transformer_engine/pytorch/attention/dot_product_attention/backends.py, which casts q, k
and v, and saves these casts and its output in fp8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.planner.counts.operations.linear import count_low_precision_bytes, keeps_casts
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op


def apply_low_precision(local: Local, ops: Sequence[Op]) -> Sequence[Op]:
    """Return a block's ``ops`` with the activations that the stack keeps in low precision."""
    stack = local.job.stack
    if stack.fp8_attention and local.job.precision.is_low_precision:
        ops = [*_cast_attention(local, ops)]
    if not (stack.low_precision_saved and keeps_casts(local)):
        return ops
    return [*_apply_low_precision(local, ops)]


def _cast_attention(local: Local, ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the operations, with attention's inputs cast to fp8 before it, and its output kept in fp8."""
    sizes = dict[str, int]()
    for op in ops:
        sizes |= op.writes
        if op.name != "attention.core" or op.kind != "attention":
            yield op
            continue
        names = {name: f"{name}.fp8" for name in op.keeps if name in op.reads}
        outputs = {name: f"{name}.fp8" for name in op.keeps if name in op.writes and name != "lse"}
        copies = {cast: sizes[name] // local.width for name, cast in (names | outputs).items()}
        for name, cast in names.items():
            yield _cast(name, cast, n_bytes=sizes[name], cast_bytes=copies[cast])._replace(name="attention.core.cast")
        yield op._replace(
            reads=tuple(names.get(name, name) for name in op.reads),
            writes=op.writes | {cast: copies[cast] for cast in outputs.values()},
            keeps=tuple((names | outputs).get(name, name) for name in op.keeps),
        )


def _cast(source: str, cast: str, *, n_bytes: int, cast_bytes: int) -> Op:
    """Return the cast of the tensor ``source`` to fewer bits, whose gradient stays in 16."""
    return Op(
        cast,
        "add",
        (source,),
        {cast: cast_bytes},
        moved_bytes=n_bytes + cast_bytes,
        moved_backward_bytes=0,
        gradients={cast: n_bytes},
        passes_gradient=True,
    )


def _apply_low_precision(local: Local, ops: Sequence[Op]) -> Iterator[Op]:
    """Yield the operations, those in ``stack.low_precision_saved`` with 8-bit copies of the tensors that they save."""
    kept_groups, sizes = local.job.stack.low_precision_saved, dict[str, int]()
    for op in ops:
        sizes |= op.writes
        if "attention" in kept_groups and op.name == "attention.core":
            yield op._replace(keeps=tuple(name for name in op.keeps if name != "o"))
        elif "attention" in kept_groups and op.kind == "cast" and op.reads == ("o",):
            (out,) = op.writes
            yield op._replace(writes={out: op.writes[out] + sizes["o"] // local.width // 2})
        elif "activation" in kept_groups and op.name.endswith(".act"):
            # the inputs that it keeps: gate and up, as one tensor or two; or up alone
            low_precision_names = {name: f"{name}.narrow" for name in op.keeps if name in op.reads}
            for source, cast in low_precision_names.items():
                size = count_low_precision_bytes(local, sizes[source] // local.width)
                yield _cast(source, cast, n_bytes=sizes[source], cast_bytes=size)
            yield op._replace(
                reads=tuple(low_precision_names.get(name, name) for name in op.reads),
                keeps=tuple(low_precision_names.get(name, name) for name in op.keeps),
            )
        else:
            yield op
