"""Fivefold's own linear layers for the liveness count: linears on one input, with their messages, as one operation.

    gather? → q, k, v        matmul → reduce?        backward: gradients of all outputs in, one dx, then each dW in turn

Inputs, output gradients and dx live until the last dW has been accumulated (``trainer/model/linear.py``). A recomputed
one keeps its gathered input instead of gathering it a third time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.recompute import Unit, fuses, is_linear


def fuse_linears(unit: Unit, *, width: int) -> Unit:
    """The unit with every linear layer merged with those on the same input and with its tp messages.

    ``width``: bytes per element of a weight's gradient.
    """
    found: list[Op] = []
    at = 0
    while at < len(unit.ops):
        size = _group_size(unit.ops[at:])
        found.append(_fused(unit.ops[at : at + size], width=width) if size else unit.ops[at])
        at += max(1, size)
    return Unit(tuple(found), unit.dropped)


def _group_size(ops: Sequence[Op]) -> int:
    """How many of the first operations form one group of fused linears; 0: the first is no linear."""
    start = 1 if _is_tp_message(ops[0]) and len(ops) > 1 and ops[1].reads == tuple(ops[0].writes) else 0
    if not is_linear(ops[start]):
        return 0
    end = start + 1
    while end < len(ops) and fuses(ops[end], ops[start]):
        end += 1
    after = ops[end].message if end < len(ops) and ops[end].name == f"{ops[start].name}.reduce" else None
    # the sums over the inner ranks of 2D tensor parallelism are a message for each output
    return end + (after is not None and after.axis != "tp_inner")


def _is_tp_message(op: Op) -> bool:
    return op.message is not None and op.kind == "message" and op.message.axis in ("tp", "tp_outer", "tp_inner")


def _fused(ops: Sequence[Op], *, width: int) -> Op:
    """One operation for a group of linears with an optional gather before and reduce after."""
    linears = [op for op in ops if op.kind == "matmul"]
    entry, leave = (op if op.kind == "message" else None for op in (ops[0], ops[-1]))
    first, last = linears[0], linears[-1]
    writes = {name: size for op in linears for name, size in op.writes.items()}
    keeps, forward, backward, product = first.keeps, 0, first.backward_scratch, 0
    if entry is not None:  # the gathered input, and its gradient before the reduce-scatter
        ((whole, size),) = entry.writes.items()
        backward += (entry.gradients or entry.writes)[whole]
        if first.recomputed and size:  # kept instead of the rank's own rows
            keeps, writes, backward = (
                (whole, *first.keeps[1:]),
                writes | {whole: size},
                backward - first.backward_scratch,
            )
        elif entry.message is None or entry.message.wide_payload is None:  # else no more than the cast is gathered
            forward = size
    if leave is not None:  # the partial output, and its gathered gradient
        (partial,), (size,) = last.writes.values(), leave.writes.values()
        writes = leave.writes | {name: each for name, each in writes.items() if name not in last.writes}
        if size < partial:  # a reduce-scatter: its result is another tensor
            forward, backward, product = forward + partial, backward + partial, partial
    forward += _casts_forward(linears, cut=leave is not None and size < partial)
    keeps = tuple(dict.fromkeys((*keeps, *(entry.keeps if entry else ()), *(leave.keeps if leave else ()))))
    return first._replace(
        reads=(entry or first).reads, writes=writes, keeps=keeps,
        parameters=sum(op.parameters for op in linears),
        gradient_widths=tuple(size for op in linears for size in op.gradient_widths),
        biases=sum(op.biases for op in linears),
        flops=sum(op.flops for op in linears), causal_flops=sum(op.causal_flops for op in linears),
        forward_scratch=forward, backward_scratch=backward, product_bytes=product, recomputed=first.recomputed,
        delivers=True, scratch_of_casts=_casts_backward(linears, width=width),
    )  # fmt: skip


def _casts_forward(linears: Sequence[Op], *, cut: bool) -> int:
    """Peak bytes of casts beyond what is written: the input's, and a weight's while later outputs do not exist yet.

    ``cut``: a reduce-scatter follows.
    """
    most = later = 0
    for op in reversed(linears):
        (size,) = op.writes.values()
        later += size if cut else 0
        most = max(most, op.casts.weight - later)
        later += 0 if cut else size
    return linears[0].casts.x + most


def _casts_backward(linears: Sequence[Op], *, width: int) -> tuple[int, int]:
    """Bytes of casts while dx is computed (each layer after the first adds a dx), and beside the largest dW."""
    casts = [op.casts for op in linears]
    into = max(each.gradient + each.transposed + (each.product if at else 0) for at, each in enumerate(casts))
    made = [width * max(op.gradient_widths, default=0) for op in linears]
    weights = max(op.casts.gradient_columns + size for op, size in zip(linears, made, strict=True)) - max(made)
    return into, linears[0].casts.columns + weights
