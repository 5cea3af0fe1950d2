"""Activations that are kept in few bits for the backward, where others keep 16 (DeepSeek-V3).

    activation   the input of SwiGLU, from which its output is recomputed     1 byte an element, and scales
    attention    its output, which its own backward reads as well             12 bits (E5M6)

Source: DeepSeek-V3, arXiv:2412.19437 §3.3.3, low-precision storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.planner.counts.operations.linear import count_low_precision_bytes, keeps_casts
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op


def apply_low_precision(local: Local, ops: Sequence[Op]) -> Sequence[Op]:
    """Return a block's ``ops`` with the activations that the stack keeps in low precision."""
    if not (local.job.stack.low_precision_saved and keeps_casts(local)):
        return ops
    return [*_apply_low_precision(local, ops)]


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
                yield Op(
                    cast,
                    "add",
                    (source,),
                    {cast: size},
                    moved_bytes=sizes[source] + size,
                    moved_backward_bytes=0,
                    gradients={cast: sizes[source]},
                    passes_gradient=True,
                )
            yield op._replace(
                reads=tuple(low_precision_names.get(name, name) for name in op.reads),
                keeps=tuple(low_precision_names.get(name, name) for name in op.keeps),
            )
        else:
            yield op
