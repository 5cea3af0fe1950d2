"""Liveness of one unit: plays its operations forward and backward, as autograd does, and counts live bytes.

    play                     F and BW: what a unit keeps, the peak of its forward and of its backward
    play_split, play_graph   B and W: the same with weight gradients put off

A tensor is freed after its last reader unless an operation keeps it; a kept tensor after the backward of the last
operation that keeps it; a dropped one lives again from when the first backward needs it. An addition passes its
gradient on without a copy; a tensor with two readers gets the sum of both gradients in a third buffer. Gradients of
weights go to sums, wait for W, or stay until the unit's backward has ended (``Sums``).
``tests/agree`` compares with the real run, byte by byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from fivefold.planner.counts.operations.op import Op, is_weight_cast
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


NO_SUMS, NO_WAITS = Sums(), Waits()


class Gradient:
    """A gradient in memory: an addition's two inputs share one. ``keeper``: the operation whose W reads it last."""

    __slots__ = ("bytes", "keeper", "users")

    def __init__(self, size: int) -> None:
        self.bytes, self.users = size, 1
        self.keeper: int | None = None

    def drop(self) -> int:
        """Remove one user; return the bytes that this frees."""
        self.users -= 1
        return 0 if self.users else self.bytes


class EnteredUnit(NamedTuple):
    """A unit as a pass runs it. ``entry``: the tensor that it reads; ``gradient_width``: bytes per element of a weight
    gradient.
    """

    unit: Unit
    entry: str
    entry_bytes: int
    gradient_width: int


class PlayedForward(NamedTuple):
    """What the forward of a unit leaves to its backward, in bytes by tensor, and its peak."""

    sizes: dict[str, int]
    keepers: Counter[str]  # number of operations that keep each tensor
    peak: int
    kept: int  # without the output
    cached: int  # dropped casts of weights


class Profile(NamedTuple):
    """Live bytes of one unit above what was live before it; its input counts as its own."""

    kept_bytes: int  # activations kept between forward and backward, without the output
    forward_peak_bytes: int
    backward_peak_bytes: int  # with weight gradients and, if the unit allocates them, their sums
    backward_cause: str  # the operation at that peak
    backward_kept_bytes: int  # kept and recomputed activations that live at that peak
    backward_sums_bytes: int  # gradient sums allocated here that live at that peak
    after_loss_bytes: int = 0  # the backward's peak once the loss of the unit is differentiated; 0: it has none
    cached_bytes: int = 0  # of weights' casts that the unit drops and that live until the forward of all units ends


class SplitProfile(NamedTuple):
    """As ``Profile``, for a backward split into B and W (deferred weight gradients)."""

    backward_peak_bytes: int
    backward_cause: str
    backward_kept_bytes: int  # with what is kept for W so far
    backward_sums_bytes: int
    late_bytes: int  # inputs and output gradients kept between B and W
    weights_peak_bytes: int  # peak of the rest of W, with what still lives of ``late_bytes``
    closing_bytes: int  # live when the last gradient of W is made
    experts_bytes: int  # live when the last of the experts' gradients is made
    made_bytes: int  # of the weight gradients that W makes
    released_bytes: int = 0  # kept until the stage's B has ended, and no longer
    table_peak_bytes: int = 0  # peak of W while it makes gradients of a tied table alone
    experts_peak_bytes: int = 0  # peak of W while it makes those of experts, if these come first: then no other's


def kept_bytes(unit: Unit, *, sizes: dict[str, int]) -> list[int]:
    """Bytes that each operation keeps and none before it does; ``sizes``: bytes of tensors from outside the unit."""
    known = sizes | {name: size for op in unit.ops for name, size in op.writes.items()}
    seen: set[str] = set(unit.dropped)
    found = []
    for op in unit.ops:
        found.append(sum(known.get(name, 0) for name in set(op.keeps) - seen))
        seen |= set(op.keeps)
    return found


def play(entered: EnteredUnit, *, sums: Sums) -> Profile:
    """Return the live bytes of one unit; ``sums``: what the first gradients allocate, nothing if it is allocated
    already.
    """
    ahead = _play_forward(entered)
    back = Backward(entered, ahead, sums=sums)
    back.run()
    return Profile(
        ahead.kept, ahead.peak, back.peak, back.cause, back.kept_then, back.sums_then, back.after_loss, ahead.cached
    )


def play_graph(entered: EnteredUnit, *, sums: Sums) -> SplitProfile:
    """As ``play_split`` where PyTorch keeps the graph between both halves: in B nothing that the forward kept is freed
    but, at its end, what lies above the last weight; W makes the gradients from the first weight to the last.
    """
    unit, width, ahead = entered.unit, entered.gradient_width, _play_forward(entered)
    back = Backward(entered, ahead, sums=sums, split=True, graph=True)
    back.run()
    late = sorted(back.held)
    top = max(late, default=-1)
    below = {name for op in unit.ops[: top + 1] for name in op.keeps}
    released = sum(ahead.sizes[name] for name in set(ahead.keepers) - below - back.overwritten)
    left = whole = back.kept - released
    weights_peak = closing = 0
    for place in late:
        widths = unit.ops[place].gradient_widths
        closing = left + max(widths) * width
        weights_peak = max(weights_peak, left + sum(widths) * width)
        left -= back.held[place]
    made = sum(sum(unit.ops[place].gradient_widths) for place in late) * width
    return SplitProfile(
        back.peak, back.cause, back.kept_then, back.sums_then, whole, weights_peak, closing, closing, made, released
    )


def play_split(entered: EnteredUnit, *, sums: Sums, waits: Waits = NO_WAITS) -> SplitProfile:
    """As ``play``, with the weight gradients of linear layers deferred, for which their operands stay live.
    ``waits``: which gradients that are made in B wait for them until W.
    """
    unit, width = entered.unit, entered.gradient_width
    back = Backward(entered, _play_forward(entered), sums=sums, split=True, waits=waits)
    back.run()
    late, weights_peak, table_peak, experts_peak, closing, experts, every = back.late, 0, 0, 0, 0, 0, 0
    left = late
    for place, op in reversed([*enumerate(unit.ops)]):
        if place in back.waiting:
            if not is_expert(op):
                weights_peak = max(weights_peak, left)
            closing = left
            left -= back.waiting[place]
        if is_put_off(op):
            made = max(op.gradient_widths) if op.delivers else sum(op.gradient_widths)
            again = 0 if op.recomputed else op.regathered
            here = left + again + made * width + op.scratch_of_casts[1]
            if op.name in back.into_table and not weights_peak:
                table_peak = max(table_peak, here)
            elif is_expert(op) and not weights_peak:
                experts_peak = max(experts_peak, here)
            else:
                weights_peak = max(weights_peak, here)
            closing = left + again + max(op.gradient_widths[-2:]) * width  # of a weight and its bias the larger
            experts = closing if is_expert(op) else experts
            every += sum(op.gradient_widths) * width
            left -= back.held[place]
    return SplitProfile(
        back.peak,
        back.cause,
        back.kept_then,
        back.sums_then,
        late,
        weights_peak,
        closing,
        experts,
        every,
        table_peak_bytes=table_peak,
        experts_peak_bytes=experts_peak,
    )


def _play_forward(entered: EnteredUnit) -> PlayedForward:
    """Play the forward of a unit. Dropped casts of weights live as long as the forward of all units, in autocast's
    cache.
    """
    ops, dropped = entered.unit.ops, entered.unit.dropped
    sizes = {entered.entry: entered.entry_bytes} | {name: size for op in ops for name, size in op.writes.items()}
    result = next(iter(ops[-1].writes))
    keepers = Counter(name for op in ops for name in op.keeps)
    cached = {name for op in ops if op.recomputed and is_weight_cast(op) for name in op.writes} & dropped
    held = {*keepers, result} - (dropped - cached - {result})
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.writes)}
    live = peak = sizes[ops[0].reads[0]]
    for index, op in enumerate(ops):
        live += sum(op.writes.values())
        peak = max(peak, live + op.forward_scratch)
        live -= sum(sizes[name] for name in {*op.reads, *op.writes} - held if last_use[name] == index)
    late = sum(sizes[name] for name in cached)
    return PlayedForward(sizes, keepers, peak, live - sizes[result] - late, late)


class Backward:
    """Plays the backward of a unit; operations are told apart by their place in it."""

    def __init__(
        self,
        entered: EnteredUnit,
        ahead: PlayedForward,
        *,
        sums: Sums,
        split: bool = False,
        waits: Waits = NO_WAITS,
        graph: bool = False,
    ) -> None:
        unit = entered.unit
        self.ops, self.sizes, self.keepers = unit.ops, ahead.sizes, ahead.keepers.copy()
        self.width, self.split, self.graph, self.stay = entered.gradient_width, split, graph, sums.held
        self.unborn = {"dense": sums.dense, "experts": sums.experts} | ({"table": sums.table} if sums.table else {})
        tables = ("embedding",) if sums.table or sums.tied else ()
        self.into_table = (*tables, *(("head.out", "loss") if sums.tied else ()))
        self.reduction = sums.reduced, sums.gone
        closing = (op.name for op in unit.ops if op.gradient_widths and (is_expert(op) or op.kind == "loss"))
        self.closing = next(closing, "")
        self.held: dict[int, int] = {}  # bytes kept for W, by operation
        self.together, self.biases_wait = waits.others and any(map(is_put_off, unit.ops)), waits.biases
        self.waiting: dict[int, int] = {}  # bytes of gradients that wait for W, by operation
        self.kept_for_w: set[str] = set()  # kept tensors that W reads
        self.late = 0
        self.overwritten: set[str] = set()  # kept tensors that became gradients
        self.gradient = ahead.sizes | {
            name: size for op in unit.ops if op.gradients for name, size in op.gradients.items()
        }
        self.revived = _recomputed_before(unit)
        self.grads: dict[str, Gradient] = {}
        self.live = self.peak = self.sums = 0
        self.kept = self.kept_then = ahead.kept
        self.cause, self.sums_then = "", 0
        self.lossy, self.after_loss = False, 0  # the peak once a loss is differentiated

    def run(self) -> None:
        """Find the peak, its operation, and the kept bytes and sums that live then."""
        result = next(iter(self.ops[-1].writes))
        self.grads[result] = Gradient(self.gradient[result])
        self.live = self.peak = self.kept + self.gradient[result]
        for index in reversed(range(len(self.ops))):
            revived = sum(self.sizes[name] for name in self.revived.get(index, ()) if name != result)
            self.live += revived
            self.kept += revived
            self._note(self.live, self.ops[index].name)
            self._step(index, self.ops[index])
            self.lossy |= self.ops[index].kind == "loss"

    def _note(self, live: int, cause: str) -> None:
        """Update the peak."""
        if self.lossy:
            self.after_loss = max(self.after_loss, live)
        if live > self.peak:
            self.peak, self.cause, self.kept_then, self.sums_then = live, cause, self.kept, self.sums

    def _step(self, place: int, op: Op) -> None:
        """Play the backward of one operation."""
        grads, sizes = self.grads, self.gradient
        received = [grads.pop(name) for name in op.writes if name in grads]
        if not received:  # of a weight's cast, whose gradient the matmul made as the weight's
            self._free_kept(op, ())
            return
        incoming = received[0]
        targets = op.reads if op.differentiates is None else op.differentiates
        weights, scratch = sum(op.gradient_widths) * self.width, op.backward_scratch
        if op.biases:
            self._add_biases(place, op)
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
                incoming.users += 1
                buffer = incoming
            else:
                buffer = Gradient(sizes[name])
            if name in grads:
                self._note(self.live + sizes[name], op.name)
                self.live += sizes[name] - buffer.drop() - grads[name].drop()
                buffer = Gradient(sizes[name])
            grads[name] = buffer
        if late:
            self._defer(place, op, received)
        else:
            self.live -= sum(buffer.drop() for buffer in received)
        self._free_kept(op, targets)
        if weights:
            self._keep_weights(place, op, weights)

    def _keep_weights(self, place: int, op: Op, weights: int) -> None:
        """What becomes of the gradients of an operation's weights, of which ``weights`` bytes live at once."""
        if self.together and op.kind != "embedding":  # a table is a unit of its own
            self._wait(place, weights)
        elif not op.delivers:
            self._allocate_sums(op)
            self._note(self.live + weights, op.name)
        if self.stay:
            every = sum(op.gradient_widths) * self.width
            self.live += every
            self.sums += every

    def _add_biases(self, place: int, op: Op) -> None:
        """The gradients of experts' biases, which an operation of their own makes before dx."""
        made = op.biases * self.width
        if not self.biases_wait:
            self._allocate_sums(op)
        self._note(self.live + made, op.name)
        if self.biases_wait:
            self._wait(place, made)

    def _wait(self, place: int, made: int) -> None:
        """Gradients of ``made`` bytes wait for W."""
        self.waiting[place] = made
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

    def _defer(self, place: int, op: Op, received: list[Gradient]) -> None:
        """Keep a linear's input and output gradients (those received, or gathered ones) until W; in a graph that stays
        the latter alone.
        """
        if self.graph:
            self.held[place] = sum(self._claim(buffer, place) for buffer in received)
            self.kept += self.held[place]
            return
        gradients = op.product_bytes
        self.live += gradients
        if not gradients or (op.kind == "matmul" and len(op.gradient_widths) > 1):  # the bias reads those received
            gradients += sum(self._claim(buffer, place) for buffer in received)
        else:
            self.live -= sum(buffer.drop() for buffer in received)
        read = op.keeps[:1] if op.kind == "matmul" else op.keeps  # not what recomputation keeps
        new = [name for name in read if name not in self.kept_for_w]
        self.kept_for_w.update(new)
        ends = 4 * op.batch if op.name == "moe.experts.down" else 0  # end of each expert's rows
        self.live += ends
        self.kept += gradients + ends
        self.held[place] = gradients + ends + sum(self.sizes[name] for name in new)
        self.late += self.held[place]

    def _claim(self, gradient: Gradient, place: int) -> int:
        """Return the bytes that a gradient adds to what is kept for W: those of one that another operation keeps go
        over to this one, whose W is later (in parallel blocks attention and feed-forward put out to one sum).
        """
        former, gradient.keeper = gradient.keeper, place
        if former is not None:
            self.held[former] -= gradient.bytes
            self.late -= gradient.bytes
            self.kept -= gradient.bytes
        return gradient.bytes

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
