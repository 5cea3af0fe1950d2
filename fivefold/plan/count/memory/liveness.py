"""Liveness of one unit: plays its operations forward and backward, as autograd does, and counts live bytes.

A tensor is freed after its last reader unless an operation keeps it; a kept tensor after the backward of the last
operation that keeps it; a dropped one lives again from when the first backward needs it. An addition passes its
gradient on without a copy; a tensor with two readers gets the sum of both gradients in a third buffer.
``tests/agree`` compares with the real run, byte by byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.plan.count.operations.op import Op
from fivefold.plan.count.operations.recompute import Unit


class Sums(NamedTuple):
    """Bytes of gradient sums that a unit's backward allocates, with the first gradient of each family of weights.

    ``table``: of the embedding in which a head looks up further tokens (multi-token prediction); ``tied``: to which the
    output projection's gradient is added too.
    With the experts' last gradient ``reduced`` bytes, this rank's shard, are allocated; then ``gone`` bytes are freed.
    """

    dense: int = 0
    experts: int = 0
    reduced: int = 0
    gone: int = 0
    table: int = 0
    tied: bool = False


class Profile(NamedTuple):
    """Live bytes of one unit above what was live before it; its input counts as its own."""

    kept_bytes: int  # activations kept between forward and backward, without the output
    forward_peak_bytes: int
    backward_peak_bytes: int  # with weight gradients and, if the unit allocates them, their sums
    backward_cause: str  # the operation at that peak
    backward_kept_bytes: int  # kept and recomputed activations that live at that peak
    backward_sums_bytes: int  # gradient sums allocated here that live at that peak


class SplitProfile(NamedTuple):
    """As ``Profile``, for a backward split into B and W (deferred weight gradients)."""

    backward_peak_bytes: int
    backward_cause: str
    backward_kept_bytes: int  # with what is kept for W so far
    backward_sums_bytes: int
    late_bytes: int  # inputs and output gradients kept between B and W
    weights_peak_bytes: int  # peak of W, with what still lives of ``late_bytes``
    closing_bytes: int  # live when the last gradient of W is made
    experts_bytes: int  # live when the last of the experts' gradients is made
    made_bytes: int  # of the weight gradients that W makes


def kept_bytes(unit: Unit, *, sizes: dict[str, int]) -> list[int]:
    """Bytes that each operation keeps and none before it does; ``sizes``: bytes of tensors from outside the unit."""
    known = sizes | {name: size for op in unit.ops for name, size in op.writes.items()}
    seen: set[str] = set(unit.dropped)
    found = []
    for op in unit.ops:
        found.append(sum(known.get(name, 0) for name in set(op.keeps) - seen))
        seen |= set(op.keeps)
    return found


def play(unit: Unit, *, entry: str, entry_bytes: int, width: int, sums: Sums) -> Profile:
    """Live bytes of one unit that reads ``entry``. ``width``: bytes per element of a weight gradient; ``sums``: what
    the first gradients allocate, nothing if it is allocated already.
    """
    sizes, keepers, forward_peak, kept = _kept(unit, entry=entry, entry_bytes=entry_bytes)
    back = _Backward(unit, sizes=sizes, keepers=keepers, width=width, sums=sums)
    back.run(kept)
    return Profile(kept, forward_peak, back.peak, back.cause, back.kept_then, back.sums_then)


def play_split(
    unit: Unit, *, entry: str, entry_bytes: int, width: int, sums: Sums, together: bool = False
) -> SplitProfile:  # fmt: skip
    """As ``play``, with the weight gradients of linear layers deferred, for which their operands stay live.
    ``together``: those of a unit's other weights are made in B, but wait for them until W.
    """
    sizes, keepers, _, kept = _kept(unit, entry=entry, entry_bytes=entry_bytes)
    back = _Backward(unit, sizes=sizes, keepers=keepers, width=width, sums=sums, split=True, together=together)
    back.run(kept)
    late, weights_peak, closing, experts, every = back.late, 0, 0, 0, 0
    left = late
    for op in reversed(unit.ops):
        if id(op) in back.waiting:
            weights_peak, closing = max(weights_peak, left), left
            left -= back.waiting[id(op)]
        if is_put_off(op):
            made = max(op.gradient_widths) if op.delivers else sum(op.gradient_widths)
            again = 0 if op.recomputed else op.regathered
            weights_peak = max(weights_peak, left + again + made * width + op.scratch_of_casts[1])
            closing = left + again + max(op.gradient_widths[-2:]) * width  # of a weight and its bias the larger
            experts = closing if _is_expert(op) else experts
            every += sum(op.gradient_widths) * width
            left -= back.held[id(op)]
    return SplitProfile(
        back.peak, back.cause, back.kept_then, back.sums_then, late, weights_peak, closing, experts, every
    )


def is_put_off(op: Op) -> bool:
    """Whether zero-bubble schedules defer the operation's weight gradients to W."""
    return bool(op.gradient_widths) and (op.kind == "matmul" or op.name == "moe.arrive")


def _kept(unit: Unit, *, entry: str, entry_bytes: int) -> tuple[dict[str, int], Counter[str], int, int]:
    """Bytes by tensor, number of operations that keep each, the forward's peak, and bytes kept without the output."""
    ops = unit.ops
    sizes = {entry: entry_bytes} | {name: size for op in ops for name, size in op.writes.items()}
    result = next(iter(ops[-1].writes))
    keepers = Counter(name for op in ops for name in op.keeps)
    live, forward_peak = _forward(ops, sizes=sizes, held={*keepers, result} - (unit.dropped - {result}))
    return sizes, keepers, forward_peak, live - sizes[result]


def _forward(ops: Sequence[Op], *, sizes: dict[str, int], held: set[str]) -> tuple[int, int]:
    """Live bytes at the end of the forward and at its peak; ``held``: tensors that are not freed."""
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.writes)}
    live = peak = sizes[ops[0].reads[0]]
    for index, op in enumerate(ops):
        live += sum(op.writes.values())
        peak = max(peak, live + op.forward_scratch)
        live -= sum(sizes[name] for name in {*op.reads, *op.writes} - held if last_use[name] == index)
    return live, peak


class _Backward:
    """Plays the backward of a unit. A gradient is a buffer [bytes, users]: an addition's two inputs share one."""

    def __init__(
        self, unit: Unit, *, sizes: dict[str, int], keepers: Counter[str], width: int,
        sums: Sums, split: bool = False, together: bool = False,
    ) -> None:  # fmt: skip
        self.ops, self.sizes, self.keepers = unit.ops, sizes, keepers.copy()
        self.width, self.split = width, split
        self.unborn = {"dense": sums.dense, "experts": sums.experts} | ({"table": sums.table} if sums.table else {})
        self.into_table = ("embedding", *(("head.out", "loss") if sums.tied else ())) if sums.table else ()
        self.reduction = sums.reduced, sums.gone
        closing = (op.name for op in unit.ops if op.gradient_widths and (_is_expert(op) or op.kind == "loss"))
        self.closing = next(closing, "")
        self.held: dict[int, int] = {}  # bytes kept for W, by operation
        self.claimed: dict[int, int] = {}  # gradient kept for W → the last operation that keeps it
        self.alive: list[list[int]] = []
        self.together = together and any(map(is_put_off, unit.ops))
        self.waiting: dict[int, int] = {}  # bytes of gradients that wait for W, by operation
        self.kept_for_w: set[str] = set()  # kept tensors that W reads
        self.late = 0
        self.gradient = sizes | {name: size for op in unit.ops if op.gradients for name, size in op.gradients.items()}
        self.revived = _recomputed_before(unit)
        self.grads: dict[str, list[int]] = {}
        self.live = self.peak = self.kept = self.sums = 0
        self.cause, self.kept_then, self.sums_then = "", 0, 0

    def run(self, kept: int) -> None:
        """Find the peak, its operation, and the kept bytes and sums that live then."""
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
        """Update the peak."""
        if live > self.peak:
            self.peak, self.cause, self.kept_then, self.sums_then = live, cause, self.kept, self.sums

    def _step(self, op: Op) -> None:
        """The backward of one operation."""
        grads, sizes = self.grads, self.gradient
        received = [grads.pop(name) for name in op.writes if name in grads]
        incoming = received[0]
        targets = op.reads if op.differentiates is None else op.differentiates
        weights, scratch = sum(op.gradient_widths) * self.width, op.backward_scratch
        made = 0 if op.passes or op.in_place else sum(sizes[name] for name in targets)
        late = self.split and is_put_off(op)
        makes = bool(op.gradient_widths) and not late
        if late:
            weights, scratch = 0, scratch - (0 if op.recomputed else op.regathered)
        elif makes and (op.delivers or not weights):  # accumulated before the next one is made
            weights = max(op.gradient_widths) * self.width
            if op.kind == "loss":  # chunked: accumulates after the last chunk
                self._note(self.live + made + weights + scratch, op.name)
                scratch = op.regathered
            self._allocate_sums(op)
        before, beside = op.scratch_of_casts
        casts = max(before - weights, beside if makes else 0)
        self._note(self.live + made + weights + scratch + casts, op.name)
        if op.delivers and op.name == self.closing:
            self._reduce(made + weights + scratch)
        self.live += made
        for name in targets:
            if op.passes:
                incoming[1] += 1
                buffer = incoming
            else:
                buffer = [sizes[name], 1]
            if name in grads:
                self._note(self.live + sizes[name], op.name)
                self.live += sizes[name] - _drop(buffer) - _drop(grads[name])
                buffer = [sizes[name], 1]
            grads[name] = buffer
        if late:
            self._defer(op, received)
        else:
            self.live -= sum(_drop(buffer) for buffer in received)
        self._free_kept(op, targets)
        if weights and self.together and op.kind != "embedding":  # a table is a unit of its own
            self.waiting[id(op)] = weights
            self.live += weights
            self.kept += weights
            self.late += weights
        elif weights and not op.delivers:
            self._allocate_sums(op)
            self._note(self.live + weights, op.name)

    def _free_kept(self, op: Op, targets: Sequence[str]) -> None:
        """Free the tensors that no later operation of the backward keeps; in place, one becomes a gradient."""
        self.keepers.subtract(op.keeps)
        for name in op.keeps:
            if not self.keepers[name] and name not in self.kept_for_w:
                self.kept -= self.sizes[name]
                if not (op.in_place and name in targets):
                    self.live -= self.sizes[name]

    def _defer(self, op: Op, received: list[list[int]]) -> None:
        """Keep a linear's input and output gradients (those received, or gathered ones) until W."""
        gradients = op.product_bytes
        self.live += gradients
        if not gradients or (op.kind == "matmul" and len(op.gradient_widths) > 1):  # the bias reads those received
            gradients += sum(self._claim(buffer, op) for buffer in received)
        else:
            self.live -= sum(_drop(buffer) for buffer in received)
        read = op.keeps[:1] if op.kind == "matmul" else op.keeps  # not what recomputation keeps
        new = [name for name in read if name not in self.kept_for_w]
        self.kept_for_w.update(new)
        ends = 4 * op.batch if op.name == "moe.experts.down" else 0  # end of each expert's rows
        self.live += ends
        self.kept += gradients + ends
        self.held[id(op)] = gradients + ends + sum(self.sizes[name] for name in new)
        self.late += self.held[id(op)]

    def _claim(self, buffer: list[int], op: Op) -> int:
        """Bytes that a gradient adds to what is kept for W: those of one that another operation keeps go over to this
        one, whose W is later (in parallel blocks attention and feed-forward put out to one sum).
        """
        former = self.claimed.get(id(buffer))
        self.claimed[id(buffer)] = id(op)
        self.alive.append(buffer)  # so that its id stays its own
        if former is not None:
            self.held[former] -= buffer[0]
            self.late -= buffer[0]
            self.kept -= buffer[0]
        return buffer[0]

    def _allocate_sums(self, op: Op) -> None:
        """Allocate the gradient sums of the operation's family (experts or dense), if this is its first gradient."""
        table = op.kind in self.into_table or op.name in self.into_table
        born = self.unborn.pop("table" if table else "experts" if _is_expert(op) else "dense", 0)
        self.live += born
        self.sums += born

    def _reduce(self, beside: int) -> None:
        """Reduce the experts' gradients, which are complete before the rest of the unit's backward."""
        reduced, gone = self.reduction
        self.live += reduced
        self.sums += reduced
        self._note(self.live + beside, self.closing)
        self.live -= gone
        self.sums -= gone


def _is_expert(op: Op) -> bool:
    return op.name.startswith(("moe.experts", "moe.arrive"))


def _drop(buffer: list[int]) -> int:
    """Remove one user of a buffer; bytes that this frees."""
    buffer[1] -= 1
    return 0 if buffer[1] else buffer[0]


def _recomputed_before(unit: Unit) -> dict[int, list[str]]:
    """Index of an operation → dropped tensors that are recomputed before its backward, a whole run at once."""
    if not unit.dropped:
        return {}
    keeper = {name: index for index, op in enumerate(unit.ops) for name in op.keeps}
    found: dict[int, list[str]] = {}
    run: list[str] = []
    for op, after in zip(unit.ops, (*unit.ops[1:], None), strict=True):
        if op.recomputed:
            run += [name for name in op.writes if name in unit.dropped and name in keeper]
        if run and (after is None or not after.recomputed):
            found.setdefault(max(keeper[name] for name in run), []).extend(run)
            run = []
    return found
