"""Plays a unit's operations forward and backward, as autograd does, and watches the bytes that are live.

A tensor dies after its last reader unless an operation keeps it; what is kept dies when the backward of the last
operation that keeps it has run; what recomputation let go comes back when the first backward asks for it. A sum
passes its gradient on without a copy; a tensor with two readers gets the sum of two gradients in a third buffer.
Held against the real run, byte by byte, in ``tests/agree``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.plan.count.ops import Op
from fivefold.plan.count.recompute import Unit


class Profile(NamedTuple):
    """Live bytes of one unit above what was live before it; its input is counted in, as it is handed over."""

    kept_bytes: int  # from the end of its forward to its backward, its output not
    forward_peak_bytes: int
    backward_peak_bytes: int  # with the weights' gradients and, if they are born here, their sums
    backward_cause: str
    weight_bytes: int  # of what is kept or made anew, and of gradients of outputs: what the weights' gradients need
    backward_kept_bytes: int  # of what is kept, what still lives at the backward's peak, with what was made anew
    backward_sums_bytes: int  # of the sums born here, those that live at that peak


def kept_bytes(unit: Unit, *, sizes: dict[str, int]) -> list[int]:
    """Bytes that each operation is the first of its unit to keep; ``sizes`` of the tensors that come from outside."""
    known = sizes | {name: size for op in unit.ops for name, size in op.writes.items()}
    seen: set[str] = set(unit.dropped)
    found = []
    for op in unit.ops:
        found.append(sum(known.get(name, 0) for name in set(op.keeps) - seen))
        seen |= set(op.keeps)
    return found


def play(unit: Unit, *, entry: str, entry_bytes: int, width: int, sums_bytes: int) -> Profile:
    """Play one unit that reads ``entry``. ``width``: bytes per element of a weight's own gradient; ``sums_bytes``:
    the buffer that the unit's first gradient brings to life, 0 if it lives already.
    """
    ops = unit.ops
    sizes = {entry: entry_bytes} | {name: size for op in ops for name, size in op.writes.items()}
    result = next(iter(ops[-1].writes))
    keepers = Counter(name for op in ops for name in op.keeps)
    live, forward_peak = _forward(ops, sizes=sizes, held={*keepers, result} - (unit.dropped - {result}))
    kept = live - sizes[result]
    tape = _Backward(unit, sizes=sizes, keepers=keepers, width=width, sums_bytes=sums_bytes)
    tape.run(kept)
    products = {name for op in ops if op.kind == "matmul" for name in op.keeps}
    outputs = sum(size for op in ops if op.kind == "matmul" for name, size in op.writes.items() if name not in op.keeps)
    weights = sum(sizes[name] for name in products) + outputs
    return Profile(kept, forward_peak, tape.peak, tape.cause, weights, tape.kept_then, tape.sums_then)


def _forward(ops: Sequence[Op], *, sizes: dict[str, int], held: set[str]) -> tuple[int, int]:
    """Live bytes at the end and at the fullest moment."""
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.writes)}
    live = peak = sizes[ops[0].reads[0]]
    for index, op in enumerate(ops):
        live += sum(op.writes.values())
        peak = max(peak, live + op.forward_scratch)
        live -= sum(sizes[name] for name in {*op.reads, *op.writes} - held if last_use[name] == index)
    return live, peak


class _Backward:
    """A gradient is a buffer [bytes, users]: a sum's two inputs share one."""

    def __init__(
        self, unit: Unit, *, sizes: dict[str, int], keepers: Counter[str], width: int, sums_bytes: int
    ) -> None:
        self.ops, self.sizes, self.keepers = unit.ops, sizes, keepers.copy()
        self.width, self.sums_bytes = width, sums_bytes
        self.gradient = sizes | {
            name: size for op in unit.ops if op.gradients for name, size in op.gradients.items()
        }
        self.revived = _revived(unit)
        self.grads: dict[str, list[int]] = {}
        self.live = self.peak = self.kept = self.sums = 0
        self.cause, self.kept_then, self.sums_then = "", 0, 0

    def run(self, kept: int) -> None:
        """Find the fullest moment, its operation, and what lived then."""
        result = next(iter(self.ops[-1].writes))
        self.grads[result] = [self.gradient[result], 1]
        self.kept = self.kept_then = kept
        self.live = self.peak = kept + self.gradient[result]
        for index in reversed(range(len(self.ops))):
            revived = sum(self.sizes[name] for name in self.revived.get(index, ()) if name != result)
            self.live += revived
            self.kept += revived
            self._note(self.live, self.ops[index].name)
            self._step(self.ops[index])

    def _note(self, live: int, cause: str) -> None:
        if live > self.peak:
            self.peak, self.cause, self.kept_then, self.sums_then = live, cause, self.kept, self.sums

    def _step(self, op: Op) -> None:
        grads, sizes = self.grads, self.gradient
        received = [grads.pop(name) for name in op.writes if name in grads]
        incoming = received[0]
        targets = op.reads if op.differentiates is None else op.differentiates
        weights = sum(op.gradient_widths) * self.width
        made = 0 if op.kind == "add" or op.in_place else sum(sizes[name] for name in targets)
        if op.delivers and weights:
            weights = max(op.gradient_widths) * self.width
            self._bear()
        self._note(self.live + made + weights + op.backward_scratch, op.name)
        self.live += made
        for name in targets:
            if op.kind == "add":
                incoming[1] += 1
                buffer = incoming
            else:
                buffer = [sizes[name], 1]
            if name in grads:
                self._note(self.live + sizes[name], op.name)
                self.live += sizes[name] - _drop(buffer) - _drop(grads[name])
                buffer = [sizes[name], 1]
            grads[name] = buffer
        self.live -= sum(_drop(buffer) for buffer in received)
        self.keepers.subtract(op.keeps)
        for name in op.keeps:
            if not self.keepers[name]:
                self.kept -= self.sizes[name]
                if not (op.in_place and name in targets):
                    self.live -= self.sizes[name]
        if weights and not op.delivers:
            self._bear()
            self._note(self.live + weights, op.name)

    def _bear(self) -> None:
        """The unit's first gradient brings the sums to life."""
        self.live += self.sums_bytes
        self.sums += self.sums_bytes
        self.sums_bytes = 0


def _drop(buffer: list[int]) -> int:
    buffer[1] -= 1
    return 0 if buffer[1] else buffer[0]


def _revived(unit: Unit) -> dict[int, list[str]]:
    """Index of an operation → dropped tensors that are made anew before its backward: all of one run at once."""
    if not unit.dropped:
        return {}
    keeper = {name: index for index, op in enumerate(unit.ops) for name in op.keeps}
    found: dict[int, list[str]] = {}
    run: list[str] = []
    for op, after in zip(unit.ops, (*unit.ops[1:], None), strict=True):
        if op.again:
            run += [name for name in op.writes if name in unit.dropped and name in keeper]
        if run and (after is None or not after.again):
            found.setdefault(max(keeper[name] for name in run), []).extend(run)
            run = []
    return found
