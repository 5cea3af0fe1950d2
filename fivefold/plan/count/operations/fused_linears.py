"""Our own linear layers as the tape plays them: several on one input, with their messages, are one operation.

    gather? → q, k, v        matmul → reduce?        backward: gradients of all outputs in, one dx, then each dW in turn

What has come in and what was made lives until the last dW has been handed over (``train/model/linear.py``). One
that runs again for the backward keeps what it has gathered instead of gathering it a third time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.plan.count.operations.op import Op
from fivefold.plan.count.operations.recompute import Unit


def fuse_linears(unit: Unit, *, width: int) -> Unit:
    """The unit with every linear layer joined to those beside it and to its messages.

    ``width``: bytes per element of a weight's own gradient.
    """
    found: list[Op] = []
    at = 0
    while at < len(unit.ops):
        size = _together(unit.ops[at:])
        found.append(_joined(unit.ops[at : at + size], width=width) if size else unit.ops[at])
        at += max(1, size)
    return Unit(tuple(found), unit.dropped)


def _together(ops: Sequence[Op]) -> int:
    """How many of the first operations are one fan; 0: none."""
    start = 1 if _speaks(ops[0]) and len(ops) > 1 and ops[1].reads == tuple(ops[0].writes) else 0
    if not _is_linear(ops[start]):
        return 0
    end = start + 1
    while end < len(ops) and _is_linear(ops[end]) and ops[end].reads == ops[start].reads:
        end += 1
    after = end < len(ops) and _speaks(ops[end]) and ops[end].name == f"{ops[start].name}.reduce"
    return end + after


def _speaks(op: Op) -> bool:
    return op.message is not None and op.kind == "message" and op.message.axis == "tp"


def _is_linear(op: Op) -> bool:
    return op.kind == "matmul" and op.name != "moe.router"


def _joined(ops: Sequence[Op], *, width: int) -> Op:
    linears = [op for op in ops if op.kind == "matmul"]
    entry, leave = (op if op.kind == "message" else None for op in (ops[0], ops[-1]))
    first, last = linears[0], linears[-1]
    writes = {name: size for op in linears for name, size in op.writes.items()}
    keeps, forward, backward, product = first.keeps, 0, first.backward_scratch, 0
    if entry is not None:  # the whole input forward, and the gradient of it before it is summed
        ((whole, size),) = entry.writes.items()
        backward += (entry.gradients or entry.writes)[whole]
        if first.recomputed and size:  # which is kept instead of what it was gathered from
            keeps, writes, backward = (
                (whole, *first.keeps[1:]),
                writes | {whole: size},
                backward - first.backward_scratch,
            )
        else:
            forward = size
    if leave is not None:  # what is summed, and the gradient of it
        (partial,), (size,) = last.writes.values(), leave.writes.values()
        writes = leave.writes
        if size < partial:  # the sum is cut by rows: a tensor of its own
            forward, backward, product = partial, backward + partial, partial
    forward += _casts_forward(linears, cut=leave is not None and size < partial)
    keeps = tuple(dict.fromkeys((*keeps, *(entry.keeps if entry else ()), *(leave.keeps if leave else ()))))
    return first._replace(
        reads=(entry or first).reads, writes=writes, keeps=keeps,
        parameters=sum(op.parameters for op in linears),
        gradient_widths=tuple(size for op in linears for size in op.gradient_widths),
        flops=sum(op.flops for op in linears), causal_flops=sum(op.causal_flops for op in linears),
        forward_scratch=forward, backward_scratch=backward, product_bytes=product, recomputed=first.recomputed,
        delivers=True, scratch_of_casts=_casts_backward(linears, width=width),
    )  # fmt: skip


def _casts_forward(linears: Sequence[Op], *, cut: bool) -> int:
    """Beside all that is written: the input's cast, and each weight's while what comes after it is not yet there."""
    most = later = 0
    for op in reversed(linears):
        (size,) = op.writes.values()
        later += size if cut else 0
        most = max(most, op.casts.weight - later)
        later += 0 if cut else size
    return linears[0].casts.x + most


def _casts_backward(linears: Sequence[Op], *, width: int) -> tuple[int, int]:
    """While dx is summed, to which each layer after the first adds one of its own; beside the largest dW."""
    casts = [op.casts for op in linears]
    into = max(each.gradient + each.transposed + (each.product if at else 0) for at, each in enumerate(casts))
    made = [width * max(op.gradient_widths, default=0) for op in linears]
    weights = max(op.casts.gradient_columns + size for op, size in zip(linears, made, strict=True)) - max(made)
    return into, linears[0].casts.columns + weights
