"""Fivefold's own linear layers for the liveness count: linears on one input, with their messages, as one operation.

    gather? → q, k, v        matmul → reduce?        backward: gradients of all outputs in, one dx, then each dW in turn

Inputs, output gradients and dx stay allocated until the last dW has been accumulated (``trainer/model/linear.py``). A
recomputed one keeps its gathered input instead of gathering it a third time.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.recompute import UnitOperations, is_fused_with, is_linear


def fuse_linears(unit: UnitOperations, *, width: int) -> UnitOperations:
    """Return the unit with every linear layer merged with those on the same input and with its tp messages.

    ``width``: bytes per element of a weight's gradient.
    """
    fused_ops: list[Op] = []
    start = 0
    while start < len(unit.ops):
        size = _group_size(unit.ops[start:])
        fused_ops.append(_fuse(unit.ops[start : start + size], width=width) if size else unit.ops[start])
        start += max(1, size)
    return UnitOperations(tuple(fused_ops), unit.dropped)


def _group_size(ops: Sequence[Op]) -> int:
    """Return how many of the first operations form one group of fused linears; 0 if the first is not a linear."""
    start = 1 if _is_tp_message(ops[0]) and len(ops) > 1 and ops[1].reads == tuple(ops[0].writes) else 0
    if not is_linear(ops[start]):
        return 0
    end = start + 1
    while end < len(ops) and is_fused_with(ops[end], ops[start]):
        end += 1
    reduce_message = ops[end].message if end < len(ops) and ops[end].name == f"{ops[start].name}.reduce" else None
    # the sums over the inner ranks of 2D tensor parallelism are a message for each output
    return end + (reduce_message is not None and reduce_message.axis != "tp_inner")


def _is_tp_message(op: Op) -> bool:
    return op.message is not None and op.kind == "message" and op.message.axis in ("tp", "tp_outer", "tp_inner")


def _fuse(ops: Sequence[Op], *, width: int) -> Op:
    """Return one operation for ``ops``: linears, after an optional all-gather and before an optional reduction.

    ``width``: bytes per element of a weight's gradient.
    """
    linears = [op for op in ops if op.kind == "matmul"]
    gather, reduce = (op if op.kind == "message" else None for op in (ops[0], ops[-1]))
    first, last = linears[0], linears[-1]
    writes = {name: size for op in linears for name, size in op.writes.items()}
    reader = next((op for op in linears if op.wgrad_numels), first)  # frozen ones keep and gather nothing for dW
    keeps, forward, backward, product = reader.keeps, 0, reader.backward_scratch, 0
    if gather is not None:  # the gathered input, and its gradient before the reduce-scatter
        ((gathered_name, size),) = gather.writes.items()
        backward += (gather.gradients or gather.writes)[gathered_name]
        if first.recomputed and size and reader.wgrad_numels:  # kept instead of the rank's local rows
            keeps = (gathered_name, *reader.keeps[1:])
            writes = writes | {gathered_name: size}
            backward = backward - reader.backward_scratch
        elif gather.message is None or gather.message.uncast_payload is None:  # else only the cast is gathered
            forward = size
    if reduce is not None:  # the partial output, and its gathered gradient
        (partial,), (size,) = last.writes.values(), reduce.writes.values()
        writes = reduce.writes | {
            name: written_bytes for name, written_bytes in writes.items() if name not in last.writes
        }
        if size < partial:  # a reduce-scatter: its result is another tensor
            forward = forward + partial
            backward = backward + partial
            product = partial
    forward += _forward_cast_bytes(linears, cut=reduce is not None and size < partial)
    keeps = tuple(dict.fromkeys((*keeps, *(gather.keeps if gather else ()), *(reduce.keeps if reduce else ()))))
    return first._replace(
        reads=(gather or first).reads,
        writes=writes,
        keeps=keeps,
        parameters=sum(op.parameters for op in linears),
        wgrad_numels=tuple(size for op in linears for size in op.wgrad_numels),
        bias_wgrad_numel=sum(op.bias_wgrad_numel for op in linears),
        flops=sum(op.flops for op in linears),
        causal_flops=sum(op.causal_flops for op in linears),
        forward_scratch=forward,
        backward_scratch=backward,
        regathered_bytes=reader.regathered_bytes,
        wgrad_operand_bytes=product,
        recomputed=first.recomputed,
        differentiates=(gather or first).differentiates,
        accumulates_wgrads=True,
        cast_scratch_bytes=_backward_cast_bytes(linears, width=width),
    )


def _forward_cast_bytes(linears: Sequence[Op], *, cut: bool) -> int:
    """Return the peak bytes of the forward's casts beyond what is written.

    They are the input's, and a weight's while later outputs do not exist yet. ``cut``: a reduce-scatter follows.
    """
    weight_bytes = later_outputs = 0
    for op in reversed(linears):
        (size,) = op.writes.values()
        later_outputs += size if cut else 0
        weight_bytes = max(weight_bytes, op.casts.weight - later_outputs)
        later_outputs += 0 if cut else size
    return linears[0].casts.x + weight_bytes


def _backward_cast_bytes(linears: Sequence[Op], *, width: int) -> tuple[int, int]:
    """Return the bytes of casts while dx is computed (layers after the first add theirs), and during the largest dW."""
    casts = [op.casts for op in linears]
    dgrad_bytes = max(
        cast.gradient + cast.transposed + (cast.product if index else 0) for index, cast in enumerate(casts)
    )
    wgrad_bytes = [width * max(op.wgrad_numels, default=0) for op in linears]
    extra_wgrad_bytes = max(
        op.casts.gradient_columns + size for op, size in zip(linears, wgrad_bytes, strict=True)
    ) - max(wgrad_bytes)
    return dgrad_bytes, linears[0].casts.columns + extra_wgrad_bytes
