"""The backward of one unit, played operation by operation as autograd runs it, with the bytes that live meanwhile.

A kept tensor is freed after the backward of the last operation that keeps it, a gradient after its last user; gradients
of weights go to sums, wait for W, or stay until the unit's backward has ended (``Sums``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.recompute import Unit


class Sums(NamedTuple):
    """Bytes of gradient sums that a unit's backward allocates, with the first gradient of each family of weights.

    ``table``: of the embedding in which a head looks up further tokens (multi-token prediction); ``tied``: to which the
    output projection's gradient is added too.
    With the experts' last gradient ``reduced`` bytes, this rank's shard, are allocated; then ``gone`` bytes are freed.
    ``held``: there are no sums, and the gradients live until the unit's backward has ended.
    """

    dense: int = 0
    experts: int = 0
    reduced: int = 0
    gone: int = 0
    table: int = 0
    tied: bool = False
    held: bool = False


class Waits(NamedTuple):
    """Which gradients that B makes wait for those of W, to be reduced with them."""

    others: bool = False  # than of matrices, in a unit whose W makes any
    biases: bool = False  # of experts


NO_WAITS = Waits()


class Backward:
    """Plays the backward of a unit. A gradient is a buffer [bytes, users]: an addition's two inputs share one."""

    def __init__(
        self, unit: Unit, *, sizes: dict[str, int], keepers: Counter[str], width: int,
        sums: Sums, split: bool = False, waits: Waits = NO_WAITS, graph: bool = False,
    ) -> None:  # fmt: skip
        self.ops, self.sizes, self.keepers = unit.ops, sizes, keepers.copy()
        self.width, self.split, self.graph, self.stay = width, split, graph, sums.held
        self.unborn = {"dense": sums.dense, "experts": sums.experts} | ({"table": sums.table} if sums.table else {})
        tables = ("embedding",) if sums.table or sums.tied else ()
        self.into_table = (*tables, *(("head.out", "loss") if sums.tied else ()))
        self.reduction = sums.reduced, sums.gone
        closing = (op.name for op in unit.ops if op.gradient_widths and (is_expert(op) or op.kind == "loss"))
        self.closing = next(closing, "")
        self.held: dict[int, int] = {}  # bytes kept for W, by operation
        self.claimed: dict[int, int] = {}  # gradient kept for W → the last operation that keeps it
        self.alive: list[list[int]] = []
        self.together, self.biases_wait = waits.others and any(map(is_put_off, unit.ops)), waits.biases
        self.waiting: dict[int, int] = {}  # bytes of gradients that wait for W, by operation
        self.kept_for_w: set[str] = set()  # kept tensors that W reads
        self.late = 0
        self.overwritten: set[str] = set()  # kept tensors that became gradients
        self.gradient = sizes | {name: size for op in unit.ops if op.gradients for name, size in op.gradients.items()}
        self.revived = _recomputed_before(unit)
        self.grads: dict[str, list[int]] = {}
        self.live = self.peak = self.kept = self.sums = 0
        self.cause, self.kept_then, self.sums_then = "", 0, 0
        self.lossy, self.after_loss = False, 0  # the peak once a loss is differentiated

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
            self.lossy |= self.ops[index].kind == "loss"

    def _note(self, live: int, cause: str) -> None:
        """Update the peak."""
        if self.lossy:
            self.after_loss = max(self.after_loss, live)
        if live > self.peak:
            self.peak, self.cause, self.kept_then, self.sums_then = live, cause, self.kept, self.sums

    def _step(self, op: Op) -> None:
        """The backward of one operation."""
        grads, sizes = self.grads, self.gradient
        received = [grads.pop(name) for name in op.writes if name in grads]
        if not received:  # of a weight's cast, whose gradient the matmul made as the weight's
            self._free_kept(op, ())
            return
        incoming = received[0]
        targets = op.reads if op.differentiates is None else op.differentiates
        weights, scratch = sum(op.gradient_widths) * self.width, op.backward_scratch
        if op.biases:
            self._add_biases(op)
        made = 0 if op.passes or op.in_place else sum(sizes[name] for name in targets)
        late = bool(op.gradient_widths) and op.kind != "loss" if self.graph else self.split and is_put_off(op)
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
        if weights:
            self._keep_weights(op, weights)

    def _keep_weights(self, op: Op, weights: int) -> None:
        """What becomes of the gradients of an operation's weights, of which ``weights`` bytes live at once."""
        if self.together and op.kind != "embedding":  # a table is a unit of its own
            self._wait(op, weights)
        elif not op.delivers:
            self._allocate_sums(op)
            self._note(self.live + weights, op.name)
        if self.stay:
            every = sum(op.gradient_widths) * self.width
            self.live += every
            self.sums += every

    def _add_biases(self, op: Op) -> None:
        """The gradients of experts' biases, which an operation of their own makes before dx."""
        made = op.biases * self.width
        if not self.biases_wait:
            self._allocate_sums(op)
        self._note(self.live + made, op.name)
        if self.biases_wait:
            self._wait(op, made)

    def _wait(self, op: Op, made: int) -> None:
        """Gradients of ``made`` bytes wait for W."""
        self.waiting[id(op)] = made
        self.live += made
        self.kept += made
        self.late += made

    def _free_kept(self, op: Op, targets: Sequence[str]) -> None:
        """Free the tensors that no later operation of the backward keeps; in place, one becomes a gradient."""
        self.keepers.subtract(op.keeps)
        if self.graph:  # which keeps all but what a gradient overwrites
            self.overwritten |= set(op.keeps) & set(targets) if op.in_place else set()
            self.kept -= sum(self.sizes[name] for name in set(op.keeps) & set(targets)) if op.in_place else 0
            return
        for name in op.keeps:
            if not self.keepers[name] and name not in self.kept_for_w:
                self.kept -= self.sizes[name]
                if not (op.in_place and name in targets):
                    self.live -= self.sizes[name]

    def _defer(self, op: Op, received: list[list[int]]) -> None:
        """Keep a linear's input and output gradients (those received, or gathered ones) until W; in a graph that stays
        the latter alone.
        """
        if self.graph:
            self.held[id(op)] = sum(self._claim(buffer, op) for buffer in received)
            self.kept += self.held[id(op)]
            return
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
        born = self.unborn.pop("table" if table else "experts" if is_expert(op) else "dense", 0)
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


def is_put_off(op: Op) -> bool:
    """Whether zero-bubble schedules defer the operation's weight gradients to W."""
    return bool(op.gradient_widths) and (op.kind == "matmul" or op.name == "moe.arrive")


def is_expert(op: Op) -> bool:
    """Whether the operation computes or receives rows of experts."""
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
