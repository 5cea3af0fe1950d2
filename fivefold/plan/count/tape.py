"""Plays a list of operations forward and backward, as autograd does, and watches the bytes that are live.

A tensor dies after its last reader unless an operation keeps it; what is kept dies when the backward of the last
operation that keeps it has run. A sum passes its gradient on without a copy; a tensor with two readers gets the sum
of two gradients in a third buffer. Held against the real run, byte by byte, in ``tests/agree``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.plan.count.ops import Op


class Profile(NamedTuple):
    """Live bytes of one unit above what was live before it; its input is counted in, as it is handed over."""

    kept_bytes: int  # from the end of its forward to its backward, its output not
    forward_peak_bytes: int
    backward_peak_bytes: int  # with the weights' gradients and, if they are born here, their sums
    backward_cause: str


def kept_bytes(ops: Sequence[Op], *, sizes: dict[str, int]) -> list[int]:
    """Bytes that each operation is the first of its unit to keep; ``sizes`` of the tensors that come from outside."""
    known = sizes | {name: size for op in ops for name, size in op.writes.items()}
    seen: set[str] = set()
    found = []
    for op in ops:
        found.append(sum(known.get(name, 0) for name in set(op.keeps) - seen))
        seen |= set(op.keeps)
    return found


def play(ops: Sequence[Op], *, entry: str, entry_bytes: int, width: int, sums_bytes: int) -> Profile:
    """Play one unit that reads ``entry``. ``width``: bytes per element of a weight's own gradient; ``sums_bytes``:
    the buffer that the unit's first gradient brings to life, 0 if it lives already.
    """
    sizes = {entry: entry_bytes} | {name: size for op in ops for name, size in op.writes.items()}
    result = next(iter(ops[-1].writes))
    keepers = Counter(name for op in ops for name in op.keeps)
    live, forward_peak = _forward(ops, sizes=sizes, held={*keepers, result})
    kept = live - sizes[result]
    backward_peak, cause = _backward(ops, kept, sizes=sizes, keepers=keepers, width=width, sums_bytes=sums_bytes)
    return Profile(kept, forward_peak, backward_peak, cause)


def _forward(ops: Sequence[Op], *, sizes: dict[str, int], held: set[str]) -> tuple[int, int]:
    """Live bytes at the end and at the fullest moment."""
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.writes)}
    live = peak = sizes[ops[0].reads[0]]
    for index, op in enumerate(ops):
        live += sum(op.writes.values())
        peak = max(peak, live + op.forward_scratch)
        live -= sum(sizes[name] for name in {*op.reads, *op.writes} - held if last_use[name] == index)
    return live, peak


def _backward(
    ops: Sequence[Op], kept: int, *, sizes: dict[str, int], keepers: Counter[str], width: int, sums_bytes: int
) -> tuple[int, str]:
    """The fullest moment and its operation. A gradient is a buffer [bytes, users]: a sum's two inputs share one."""
    result = next(iter(ops[-1].writes))
    grads: dict[str, list[int]] = {result: [sizes[result], 1]}
    live = peak = kept + sizes[result]
    cause, keepers = "", keepers.copy()

    def drop(buffer: list[int]) -> int:
        buffer[1] -= 1
        return 0 if buffer[1] else buffer[0]

    for op in reversed(ops):
        incoming = grads.pop(next(name for name in op.writes if name in grads))
        targets = op.reads if op.differentiates is None else op.differentiates
        weights = sum(op.gradient_widths) * width
        made = 0 if op.kind == "add" or op.in_place else sum(sizes[name] for name in targets)
        moments = [live + made + weights + op.backward_scratch]
        live += made
        for name in targets:
            if op.kind == "add":
                incoming[1] += 1
                buffer = incoming
            else:
                buffer = [sizes[name], 1]
            if name in grads:
                moments.append(live + sizes[name])
                live += sizes[name] - drop(buffer) - drop(grads[name])
                buffer = [sizes[name], 1]
            grads[name] = buffer
        live -= drop(incoming)
        keepers.subtract(op.keeps)
        for name in op.keeps:
            if not keepers[name] and not (op.in_place and name in targets):
                live -= sizes[name]
        if weights:
            live += sums_bytes
            sums_bytes = 0
            moments.append(live + weights)
        if max(moments) > peak:
            peak, cause = max(moments), op.name
    return peak, cause
