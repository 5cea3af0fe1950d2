"""Liveness of one unit: it simulates its operations forward and backward, as autograd does, and counts live bytes.

    play                     F and BW: what a unit keeps, the peak of its forward and of its backward
    play_split, play_graph   B and W: the same with deferred weight gradients

A tensor is freed after its last reader unless an operation keeps it; a kept tensor after the backward of the last
operation that keeps it; a dropped one is allocated again when the first backward needs it. An addition passes its
gradient on without a copy; a tensor with two readers gets the sum of both gradients in a third buffer. Gradients of
weights go to sums, wait for W, or are kept until the unit's backward has ended (``GradientSums``). ``tests/agree``
compares with the real run, byte by byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.planner.counts.operations.op import Op, is_weight_cast
from fivefold.planner.counts.operations.recompute import UnitOperations


class GradientSums(NamedTuple):
    """Bytes of gradient sums that a unit's backward allocates, with the first gradient of each family of weights.

    ``table``: of the embedding in which a head looks up further tokens (multi-token prediction); ``tied``: the output
    projection's gradient is added to it too. With the experts' last gradient ``reduced`` bytes, this rank's shard, are
    allocated; then ``gone`` bytes are freed. ``held``: there are no sums, and the gradients are kept until the unit's
    backward has ended.
    """

    dense: int = 0
    experts: int = 0
    reduced: int = 0
    gone: int = 0
    table: int = 0
    tied: bool = False
    held: bool = False


class Waits(NamedTuple):
    """The gradients made in B that wait for those of W, to be reduced with them."""

    others: bool = False  # other than of matrices, in a unit whose W makes any
    biases: bool = False  # of experts' biases


NO_SUMS, NO_WAITS = GradientSums(), Waits()
OUTPUTS = ("head.out", "loss")  # operations that make the output projection's gradient, once for each predicted token


class LiveGradient:
    """A gradient in memory; both inputs of an addition share one. ``keeper``: the operation whose W reads it last."""

    __slots__ = ("bytes", "keeper", "users")

    def __init__(self, size: int) -> None:
        self.bytes, self.users = size, 1
        self.keeper: int | None = None

    def drop(self) -> int:
        """Remove one user and return the bytes that this frees."""
        self.users -= 1
        return 0 if self.users else self.bytes


@dataclass(frozen=True)
class EnteredUnit:
    """A unit as a pass runs it, with what every backward of it begins from.

    ``entry``: the tensor that it reads; ``gradient_width``: bytes per element of a weight gradient.
    """

    unit: UnitOperations
    entry: str
    entry_bytes: int
    gradient_width: int

    @cached_property
    def forward(self) -> PlayedForward:
        """Return the result of its forward."""
        return _play_forward(self)

    @cached_property
    def gradient_sizes(self) -> dict[str, int]:
        """Return the bytes of the gradient of each tensor."""
        sizes = {name: size for op in self.unit.ops if op.gradients for name, size in op.gradients.items()}
        return self.forward.sizes | sizes

    @cached_property
    def recomputed_before(self) -> dict[int, list[str]]:
        """Return the dropped tensors recomputed before the backward of an operation, by its index."""
        return _map_recomputed(self.unit)

    @cached_property
    def last_reduced(self) -> str:
        """Return the operation that makes the last gradient of its experts, or of a loss; "" if there is none."""
        return next(
            (op.name for op in self.unit.ops if op.gradient_widths and (is_expert(op) or op.kind == "loss")), ""
        )


class PlayedForward(NamedTuple):
    """The result of a unit's forward: the bytes by tensor that are left to its backward, and its peak."""

    sizes: dict[str, int]
    keepers: dict[str, int]  # number of operations that keep each tensor
    peak: int
    kept: int  # kept for the backward, without the output
    cached: int  # dropped casts of weights


class Profile(NamedTuple):
    """Live bytes of one unit above those before it; its input counts as its own."""

    kept_bytes: int  # activations kept between forward and backward, without the output
    forward_peak_bytes: int
    backward_peak_bytes: int  # with weight gradients and, if the unit allocates them, their sums
    backward_cause: str  # the operation at that peak
    backward_kept_bytes: int  # kept and recomputed activations at that peak
    backward_sums_bytes: int  # gradient sums allocated here at that peak
    after_loss_bytes: int = 0  # the backward's peak once the loss of the unit is differentiated; 0: it has none
    cached_bytes: int = 0  # weight casts that the unit drops, kept until the forward of all units ends


class SplitProfile(NamedTuple):
    """Live bytes as in ``Profile``, for a backward split into B and W (deferred weight gradients)."""

    backward_peak_bytes: int
    backward_cause: str
    backward_kept_bytes: int  # including what is kept for W so far
    backward_sums_bytes: int
    late_bytes: int  # inputs and output gradients kept between B and W
    weights_peak_bytes: int  # peak of the rest of W, with the rest of ``deferred_bytes``
    closing_bytes: int  # live when the last gradient of W is made
    experts_bytes: int  # live when the last of the experts' gradients is made
    made_bytes: int  # bytes of the weight gradients that W makes
    released_bytes: int = 0  # kept only until the stage's B has ended
    table_peak_bytes: int = 0  # peak of W while it makes only gradients of a tied table
    experts_peak_bytes: int = 0  # peak of W while it makes only those of experts, if these come first


def kept_bytes(unit: UnitOperations, *, sizes: dict[str, int]) -> list[int]:
    """Return the bytes that each operation keeps and no earlier one does.

    ``sizes``: bytes of tensors from outside the unit.
    """
    known_sizes = sizes | {name: size for op in unit.ops for name, size in op.writes.items()}
    seen: set[str] = set(unit.dropped)
    kept_by_op = []
    for op in unit.ops:
        kept_by_op.append(sum(known_sizes.get(name, 0) for name in set(op.keeps) - seen))
        seen |= set(op.keeps)
    return kept_by_op


def play(entered: EnteredUnit, *, sums: GradientSums) -> Profile:
    """Return the live bytes of one unit; ``sums``: allocated by the first gradients, empty if allocated before."""
    forward = entered.forward
    backward = Backward(entered, sums=sums)
    backward.run()
    return Profile(
        forward.kept,
        forward.peak,
        backward.peak,
        backward.cause,
        backward.kept_then,
        backward.sums_then,
        backward.after_loss,
        forward.cached,
    )


def play_graph(entered: EnteredUnit, *, sums: GradientSums) -> SplitProfile:
    """Return ``play_split`` for PyTorch, which keeps the autograd graph between both halves.

    In B nothing that the forward kept is freed, except, at its end, what lies above the last weight; W makes the
    gradients from the first weight to the last.
    """
    unit, width, forward = entered.unit, entered.gradient_width, entered.forward
    backward = Backward(entered, sums=sums, split=True, graph=True)
    backward.run()
    deferred_ops = sorted(backward.held)
    last_deferred = max(deferred_ops, default=-1)
    kept_below = {name for op in unit.ops[: last_deferred + 1] for name in op.keeps}
    released = sum(forward.sizes[name] for name in set(forward.keepers) - kept_below - backward.overwritten)
    remaining = deferred_bytes = backward.kept - released
    weights_peak = last_bytes = 0
    for index in deferred_ops:
        gradient_elements = unit.ops[index].gradient_widths
        last_bytes = remaining + max(gradient_elements) * width
        weights_peak = max(weights_peak, remaining + sum(gradient_elements) * width)
        remaining -= backward.held[index]
    made_bytes = sum(sum(unit.ops[index].gradient_widths) for index in deferred_ops) * width
    return SplitProfile(
        backward.peak,
        backward.cause,
        backward.kept_then,
        backward.sums_then,
        deferred_bytes,
        weights_peak,
        last_bytes,
        last_bytes,
        made_bytes,
        released,
    )


def play_split(entered: EnteredUnit, *, sums: GradientSums, waits: Waits = NO_WAITS) -> SplitProfile:
    """Return ``play`` with the weight gradients of linear layers deferred, so their operands stay allocated.

    ``waits``: gradients made in B that wait for W.
    """
    unit, width = entered.unit, entered.gradient_width
    backward = Backward(entered, sums=sums, split=True, waits=waits)
    backward.run()
    deferred_bytes, weights_peak, table_peak, experts_peak, last_bytes, expert_bytes, made_bytes = (
        backward.late,
        0,
        0,
        0,
        0,
        0,
        0,
    )
    remaining = deferred_bytes
    for index, op in reversed([*enumerate(unit.ops)]):
        if index in backward.waiting:
            if not is_expert(op):
                weights_peak = max(weights_peak, remaining)
            last_bytes = remaining
            remaining -= backward.waiting[index]
        if is_put_off(op):
            elements = max(op.gradient_widths) if op.delivers else sum(op.gradient_widths)
            regathered = 0 if op.recomputed else op.regathered
            op_peak = remaining + regathered + elements * width + op.scratch_of_casts[1]
            if op.name in backward.into_table and not weights_peak:
                table_peak = max(table_peak, op_peak)
            elif is_expert(op) and not weights_peak:
                experts_peak = max(experts_peak, op_peak)
            else:
                weights_peak = max(weights_peak, op_peak)
            last_bytes = (
                remaining + regathered + max(op.gradient_widths[-2:]) * width
            )  # the larger of a weight and its bias
            expert_bytes = last_bytes if is_expert(op) else expert_bytes
            made_bytes += sum(op.gradient_widths) * width
            remaining -= backward.held[index]
    return SplitProfile(
        backward.peak,
        backward.cause,
        backward.kept_then,
        backward.sums_then,
        deferred_bytes,
        weights_peak,
        last_bytes,
        expert_bytes,
        made_bytes,
        table_peak_bytes=table_peak,
        experts_peak_bytes=experts_peak,
    )


def _play_forward(entered: EnteredUnit) -> PlayedForward:
    """Simulate the forward of a unit; dropped weight casts stay in autocast's cache for the forward of all units."""
    ops, dropped = entered.unit.ops, entered.unit.dropped
    sizes = {entered.entry: entered.entry_bytes} | {name: size for op in ops for name, size in op.writes.items()}
    result = next(iter(ops[-1].writes))
    keepers = Counter(name for op in ops for name in op.keeps)
    cached = {name for op in ops if op.recomputed and is_weight_cast(op) for name in op.writes} & dropped
    held_names = {*keepers, result} - (dropped - cached - {result})
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.writes)}
    live = peak = sizes[ops[0].reads[0]]
    for index, op in enumerate(ops):
        live += sum(op.writes.values())
        peak = max(peak, live + op.forward_scratch)
        live -= sum(sizes[name] for name in {*op.reads, *op.writes} - held_names if last_use[name] == index)
    cached_bytes = sum(sizes[name] for name in cached)
    return PlayedForward(sizes, dict(keepers), peak, live - sizes[result] - cached_bytes, cached_bytes)


class Backward:
    """A simulation of the backward of a unit; operations are identified by their index in it."""

    def __init__(
        self,
        entered: EnteredUnit,
        *,
        sums: GradientSums,
        split: bool = False,
        waits: Waits = NO_WAITS,
        graph: bool = False,
    ) -> None:
        unit, ahead = entered.unit, entered.forward
        self.ops, self.sizes, self.keepers = unit.ops, ahead.sizes, ahead.keepers.copy()
        self.width, self.split, self.graph, self.stay = entered.gradient_width, split, graph, sums.held
        self.unborn = {"dense": sums.dense, "experts": sums.experts} | ({"table": sums.table} if sums.table else {})
        tables = ("embedding",) if sums.table or sums.tied else ()
        self.into_table = (*tables, *(OUTPUTS if sums.tied else ()))
        self.kept_tables: set[str] = set()  # whose gradient is kept until the unit's backward has ended
        self.reduction = sums.reduced, sums.gone
        self.closing = entered.last_reduced
        self.held: dict[int, int] = {}  # bytes kept for W, by operation
        self.together, self.biases_wait = waits.others and any(map(is_put_off, unit.ops)), waits.biases
        self.waiting: dict[int, int] = {}  # bytes of gradients that wait for W, by operation
        self.kept_for_w: set[str] = set()  # kept tensors that W reads
        self.late = 0
        self.overwritten: set[str] = set()  # kept tensors that became gradients
        self.gradient, self.revived = entered.gradient_sizes, entered.recomputed_before
        self.grads: dict[str, LiveGradient] = {}
        self.live = self.peak = self.sums = 0
        self.kept = self.kept_then = ahead.kept
        self.cause, self.sums_then = "", 0
        self.lossy, self.after_loss = False, 0  # the peak once a loss is differentiated

    def run(self) -> None:
        """Find the peak, its operation, and the kept bytes and sums at it."""
        result = next(iter(self.ops[-1].writes))
        self.grads[result] = LiveGradient(self.gradient[result])
        self.live = self.peak = self.kept + self.gradient[result]
        for index in reversed(range(len(self.ops))):
            revived_bytes = sum(self.sizes[name] for name in self.revived.get(index, ()) if name != result)
            self.live += revived_bytes
            self.kept += revived_bytes
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
        """Simulate the backward of one operation."""
        grads, sizes = self.grads, self.gradient
        received = [grads.pop(name) for name in op.writes if name in grads]
        if not received:  # a weight's cast: the matmul made its gradient as the weight's
            self._free_kept(op, ())
            return
        first_received = received[0]
        targets = op.reads if op.differentiates is None else op.differentiates
        weights, scratch = sum(op.gradient_widths) * self.width, op.backward_scratch
        if op.biases:
            self._add_biases(place, op)
        if op.accumulates:
            targets = tuple(name for name in targets if name not in grads)
        made_bytes = 0 if op.passes or op.in_place else sum(sizes[name] for name in targets)
        is_deferred = bool(op.gradient_widths) and op.kind != "loss" if self.graph else self.split and is_put_off(op)
        makes_weights = bool(op.gradient_widths) and not is_deferred
        if is_deferred:
            weights, scratch = 0, scratch - (0 if op.recomputed else op.regathered)
        elif makes_weights and (op.delivers or not weights):  # accumulated before the next one is made
            weights = max(op.gradient_widths) * self.width
            if op.kind == "loss":  # chunked: accumulates after the last chunk
                self._note(self.live + made_bytes + weights + scratch, op.name)
                scratch = op.regathered
            self._allocate_sums(op)
        casts_of_dgrad, casts_of_wgrad = op.scratch_of_casts
        casts = max(casts_of_dgrad - weights, casts_of_wgrad if makes_weights else 0)
        self._note(self.live + made_bytes + weights + scratch + casts, op.name)
        if op.delivers and op.name == self.closing:
            self._reduce(made_bytes + weights + scratch)
        self.live += made_bytes
        for name in targets:
            if op.passes:
                first_received.users += 1
                buffer = first_received
            else:
                buffer = LiveGradient(sizes[name])
            if name in grads:
                self._note(self.live + sizes[name], op.name)
                self.live += sizes[name] - buffer.drop() - grads[name].drop()
                buffer = LiveGradient(sizes[name])
            grads[name] = buffer
        if is_deferred:
            self._defer(place, op, received)
        else:
            self.live -= sum(buffer.drop() for buffer in received)
        self._free_kept(op, targets)
        if weights:
            self._keep_weights(place, op, weights)

    def _keep_weights(self, place: int, op: Op, weights: int) -> None:
        """Handle the gradients of an operation's weights, of which ``weights`` bytes are allocated at once."""
        if self.together and op.kind != "embedding":  # a table is a separate unit
            self._wait(place, weights)
        elif not op.delivers:
            self._allocate_sums(op)
            self._note(self.live + weights, op.name)
        table = "table" if self._uses_table(op) or op.kind == "embedding" else "output" if op.name in OUTPUTS else ""
        if self.stay and table not in self.kept_tables:  # else autograd adds it to the gradient of an earlier use
            all_weights = sum(op.gradient_widths) * self.width
            self.live += all_weights
            self.sums += all_weights
            self.kept_tables |= {table} - {""}

    def _add_biases(self, place: int, op: Op) -> None:
        """Make the gradients of experts' biases, which a separate operation makes before dx."""
        bias_bytes = op.biases * self.width
        if not self.biases_wait:
            self._allocate_sums(op)
        self._note(self.live + bias_bytes, op.name)
        if self.biases_wait:
            self._wait(place, bias_bytes)

    def _wait(self, place: int, made: int) -> None:
        """Keep gradients of ``made`` bytes until W."""
        self.waiting[place] = made
        self.live += made
        self.kept += made
        self.late += made

    def _free_kept(self, op: Op, targets: Sequence[str]) -> None:
        """Free the tensors that no later operation of the backward keeps; in place, one becomes a gradient."""
        for name in op.keeps:
            self.keepers[name] -= 1
        if self.graph:  # the graph keeps everything that no gradient overwrites
            self.overwritten |= set(op.keeps) & set(targets) if op.in_place else set()
            self.kept -= sum(self.sizes[name] for name in set(op.keeps) & set(targets)) if op.in_place else 0
            return
        for name in op.keeps:
            if not self.keepers[name] and name not in self.kept_for_w:
                self.kept -= self.sizes[name]
                if not (op.in_place and name in targets):
                    self.live -= self.sizes[name]

    def _defer(self, place: int, op: Op, received: list[LiveGradient]) -> None:
        """Keep a linear's input and output gradients (received or gathered) until W.

        If the graph is retained, only the output gradients are kept.
        """
        if self.graph:
            self.held[place] = sum(self._claim(buffer, place) for buffer in received)
            self.kept += self.held[place]
            return
        gradients = op.product_bytes
        self.live += gradients
        if not gradients or (op.kind == "matmul" and len(op.gradient_widths) > 1):  # the bias reads the received ones
            gradients += sum(self._claim(buffer, place) for buffer in received)
        else:
            self.live -= sum(buffer.drop() for buffer in received)
        saved_inputs = op.keeps[:1] if op.kind == "matmul" else op.keeps  # not what recomputation keeps
        new_names = [name for name in saved_inputs if name not in self.kept_for_w]
        self.kept_for_w.update(new_names)
        ends_bytes = 4 * op.batch if op.name == "moe.experts.down" else 0  # end of each expert's rows
        self.live += ends_bytes
        self.kept += gradients + ends_bytes
        self.held[place] = gradients + ends_bytes + sum(self.sizes[name] for name in new_names)
        self.late += self.held[place]

    def _claim(self, gradient: LiveGradient, place: int) -> int:
        """Return the bytes that a gradient adds to what is kept for W.

        A gradient that another operation keeps moves to this one, whose W is later (in parallel blocks, attention and
        feed-forward add to one sum).
        """
        former_keeper, gradient.keeper = gradient.keeper, place
        if former_keeper is not None:
            self.held[former_keeper] -= gradient.bytes
            self.late -= gradient.bytes
            self.kept -= gradient.bytes
        return gradient.bytes

    def _allocate_sums(self, op: Op) -> None:
        """Allocate the gradient sums of the operation's family (experts or dense), if this is its first gradient."""
        new_sums = self.unborn.pop("table" if self._uses_table(op) else "experts" if is_expert(op) else "dense", 0)
        self.live += new_sums
        self.sums += new_sums

    def _uses_table(self, op: Op) -> bool:
        """Return True if the operation makes a gradient of the embedding's table in a head that looks up tokens."""
        return op.kind in self.into_table or op.name in self.into_table

    def _reduce(self, backward_bytes: int) -> None:
        """Reduce the experts' gradients, which are complete before the rest of the unit's backward."""
        reduced, freed = self.reduction
        self.live += reduced
        self.sums += reduced
        self._note(self.live + backward_bytes, self.closing)
        self.live -= freed
        self.sums -= freed


def is_put_off(op: Op) -> bool:
    """Return True if zero-bubble schedules defer the operation's weight gradients to W."""
    return bool(op.gradient_widths) and (op.kind == "matmul" or op.name == "moe.arrive")


def is_expert(op: Op) -> bool:
    """Return True if the operation computes or receives rows of experts."""
    return op.name.startswith(("moe.experts", "moe.arrive"))


def _map_recomputed(unit: UnitOperations) -> dict[int, list[str]]:
    """Map the index of an operation to the dropped tensors recomputed before its backward; each run of them at once."""
    if not unit.dropped:
        return {}
    keeper = {name: index for index, op in enumerate(unit.ops) for name in op.keeps}
    recomputed_before: dict[int, list[str]] = {}
    recomputed_run: list[str] = []
    for op, next_op in zip(unit.ops, (*unit.ops[1:], None), strict=True):
        if op.recomputed:
            recomputed_run += [name for name in op.writes if name in unit.dropped and name in keeper]
        if recomputed_run and (next_op is None or not next_op.recomputed):
            recomputed_before.setdefault(max(keeper[name] for name in recomputed_run), []).extend(recomputed_run)
            recomputed_run = []
    return recomputed_before
