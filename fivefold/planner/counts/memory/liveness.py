"""Liveness of one unit: it simulates its operations forward and backward, as autograd does, and counts live bytes.

    simulate_unit                                     F and BW: kept bytes, peaks of the forward and of the backward
    simulate_split_backward, simulate_graph_backward  B and W: the same with deferred weight gradients

A tensor is freed after its last reader unless an operation keeps it; a kept tensor after the backward of the last
operation that keeps it; a dropped one is allocated again when the first backward needs it. An addition passes its
gradient on without a copy; a tensor with two readers gets the sum of both gradients in a third buffer. Gradients of
weights go to sums, wait for W, or are kept until the unit's backward has ended (``GradientSums``). ``tests/agree``
compares with the real run, byte by byte.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fivefold.planner.counts.operations.op import Op, is_weight_cast
from fivefold.planner.counts.operations.recompute import UnitOperations


class GradientSums(NamedTuple):
    """Bytes of gradient sums that a unit's backward allocates, with the first gradient of each family of weights.

    ``table``: of the embedding in which a head looks up further tokens (multi-token prediction); ``tied``: the output
    projection's gradient is added to it too. With the experts' last gradient, this rank's shard of
    ``shard_bytes`` is allocated; then ``freed_bytes`` are freed. ``keeps_gradients``: there are no sums, and the
    gradients are kept until the unit's backward has ended.
    """

    dense: int = 0
    experts: int = 0
    shard_bytes: int = 0
    freed_bytes: int = 0
    table: int = 0
    tied: bool = False
    keeps_gradients: bool = False


class WaitingGradients(NamedTuple):
    """The gradients made in B that wait for those of W, to be reduced with them."""

    others_wait: bool = False  # other than of matrices, in a unit whose W makes any
    expert_biases_wait: bool = False  # of experts' biases


NO_SUMS, NO_WAITING = GradientSums(), WaitingGradients()
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
class SimulatedUnit:
    """A unit as a pass runs it, with what every backward of it begins from.

    ``input_name``: the tensor that it reads; ``wgrad_element_bytes``: bytes per element of a weight gradient;
    ``borrower``: the unit above if it adds to its result what this one lends.
    """

    unit: UnitOperations
    input_name: str
    input_bytes: int
    wgrad_element_bytes: int
    borrower: SimulatedUnit | None = None

    @cached_property
    def forward(self) -> ForwardProfile:
        """Return the result of its forward."""
        return _simulate_forward(self)

    @cached_property
    def gradient_sizes(self) -> dict[str, int]:
        """Return the bytes of the gradient of each tensor."""
        sizes = {name: size for op in self.unit.ops if op.gradients for name, size in op.gradients.items()}
        return self.forward.sizes | sizes

    @cached_property
    def split_gradient_sizes(self) -> dict[str, int]:
        """Return ``gradient_sizes`` in B: a gradient that the borrower keeps for W is counted there."""
        if self.borrower is None or not self.borrower.defers_result_gradient:
            return self.gradient_sizes
        lent = {name: 0 for op in self.unit.ops if op.name == "moe.lend" for name in op.reads}
        return self.gradient_sizes | lent

    @cached_property
    def defers_result_gradient(self) -> bool:
        """Tell whether W reads the gradient that the unit receives, which is not freed before."""
        backward = BackwardSimulation(self, sums=NO_SUMS, split=True)
        backward.run()
        return backward.result_gradient.keeper is not None

    @cached_property
    def recomputations(self) -> dict[int, Recomputation]:
        """Return what is recomputed before the backward of an operation, by its index."""
        return _simulate_recomputations(self.unit, self.forward.sizes)

    @cached_property
    def last_reduced(self) -> str:
        """Return the operation that makes the last gradient of its experts, or of a loss; "" if there is none."""
        return next((op.name for op in self.unit.ops if op.wgrad_numels and (is_expert(op) or op.kind == "loss")), "")


class ForwardProfile(NamedTuple):
    """The result of a unit's forward: the bytes by tensor that are left to its backward, and its peak."""

    sizes: dict[str, int]
    keeper_counts: dict[str, int]  # number of operations that keep each tensor
    peak_bytes: int
    kept_bytes: int  # kept for the backward, without the output
    cached_bytes: int  # dropped casts of weights


class Recomputation(NamedTuple):
    """The dropped tensors that are recomputed before the backward of an operation, and the peak while they are."""

    names: tuple[str, ...]
    peak_bytes: int


class UnitProfile(NamedTuple):
    """Live bytes of one unit above those before it; its input counts as its own."""

    kept_bytes: int  # activations kept between forward and backward, without the output
    forward_peak_bytes: int
    backward_peak_bytes: int  # with weight gradients and, if the unit allocates them, their sums
    backward_cause: str  # the operation at that peak
    backward_kept_bytes: int  # kept and recomputed activations at that peak
    backward_sums_bytes: int  # gradient sums allocated here at that peak
    after_loss_bytes: int = 0  # the backward's peak once the loss of the unit is differentiated; 0: it has none
    # the backward's peaks until the operation that recomputes the unit is differentiated, and after it; 0: none does
    recompute_bytes: int = 0
    after_recompute_bytes: int = 0
    cached_bytes: int = 0  # weight casts that the unit drops, kept until the forward of all units ends


class SplitUnitProfile(NamedTuple):
    """Live bytes as in ``UnitProfile``, for a backward split into B and W (deferred weight gradients)."""

    backward_peak_bytes: int
    backward_cause: str
    backward_kept_bytes: int  # including what is kept for W so far
    backward_sums_bytes: int
    deferred_bytes: int  # inputs and output gradients kept between B and W
    weights_peak_bytes: int  # peak of the rest of W, with the rest of ``deferred_bytes``
    last_wgrad_bytes: int  # live when the last gradient of W is made
    last_expert_wgrad_bytes: int  # live when the last of the experts' gradients is made
    wgrad_bytes: int  # bytes of the weight gradients that W makes
    released_bytes: int = 0  # kept only until the stage's B has ended
    table_peak_bytes: int = 0  # peak of W while it makes only gradients of a tied table
    experts_peak_bytes: int = 0  # peak of W while it makes only those of experts, if these come first


def count_kept_bytes(unit: UnitOperations, *, sizes: dict[str, int]) -> list[int]:
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


def simulate_unit(simulated: SimulatedUnit, *, sums: GradientSums) -> UnitProfile:
    """Return the live bytes of one unit; ``sums``: allocated by the first gradients, empty if allocated before."""
    forward = simulated.forward
    backward = BackwardSimulation(simulated, sums=sums)
    backward.run()
    return UnitProfile(
        forward.kept_bytes,
        forward.peak_bytes,
        backward.peak,
        backward.cause,
        backward.kept_at_peak,
        backward.sums_at_peak,
        backward.peak_after_loss,
        backward.recompute_peaks[0],
        backward.recompute_peaks[1],
        forward.cached_bytes,
    )


def simulate_graph_backward(simulated: SimulatedUnit, *, sums: GradientSums) -> SplitUnitProfile:
    """Return ``simulate_split_backward`` for PyTorch, which keeps the autograd graph between both halves.

    In B nothing that the forward kept is freed, except, at its end, what lies above the last weight; W makes the
    gradients from the first weight to the last.
    """
    unit, width, forward = simulated.unit, simulated.wgrad_element_bytes, simulated.forward
    backward = BackwardSimulation(simulated, sums=sums, split=True, graph=True)
    backward.run()
    deferred_ops = sorted(backward.deferred_by_op)
    last_deferred = max(deferred_ops, default=-1)
    kept_below = {name for op in unit.ops[: last_deferred + 1] for name in op.keeps}
    released = sum(forward.sizes[name] for name in set(forward.keeper_counts) - kept_below - backward.overwritten)
    remaining = deferred_bytes = backward.kept - released
    weights_peak = last_wgrad_bytes = 0
    for index in deferred_ops:
        gradient_elements = unit.ops[index].wgrad_numels
        last_wgrad_bytes = remaining + max(gradient_elements) * width
        weights_peak = max(weights_peak, remaining + sum(gradient_elements) * width)
        remaining -= backward.deferred_by_op[index]
    wgrad_bytes = sum(sum(unit.ops[index].wgrad_numels) for index in deferred_ops) * width
    return SplitUnitProfile(
        backward.peak,
        backward.cause,
        backward.kept_at_peak,
        backward.sums_at_peak,
        deferred_bytes,
        weights_peak,
        last_wgrad_bytes,
        last_wgrad_bytes,
        wgrad_bytes,
        released,
    )


def simulate_split_backward(
    simulated: SimulatedUnit, *, sums: GradientSums, waiting: WaitingGradients = NO_WAITING
) -> SplitUnitProfile:
    """Return ``simulate_unit`` with the weight gradients of linear layers deferred, so their operands stay allocated.

    ``waiting``: gradients made in B that wait for W.
    """
    unit, width = simulated.unit, simulated.wgrad_element_bytes
    backward = BackwardSimulation(simulated, sums=sums, split=True, waiting=waiting)
    backward.run()
    deferred_bytes = backward.deferred_bytes
    weights_peak = 0
    table_peak = 0
    experts_peak = 0
    last_wgrad_bytes = 0
    last_expert_wgrad_bytes = 0
    wgrad_bytes = 0
    remaining = deferred_bytes
    for index, op in reversed([*enumerate(unit.ops)]):
        if index in backward.waiting_by_op:
            if not is_expert(op):
                weights_peak = max(weights_peak, remaining)
            last_wgrad_bytes = remaining
            remaining -= backward.waiting_by_op[index]
        if index in backward.deferred_by_op:  # not the matmuls of an indexer, which no gradient reaches
            elements = max(op.wgrad_numels) if op.accumulates_wgrads else sum(op.wgrad_numels)
            regathered = 0 if op.recomputed else op.regathered_bytes
            op_peak = remaining + regathered + elements * width + op.cast_scratch_bytes[1]
            if op.name in backward.table_ops and not weights_peak:
                table_peak = max(table_peak, op_peak)
            elif is_expert(op) and not weights_peak:
                experts_peak = max(experts_peak, op_peak)
            else:
                weights_peak = max(weights_peak, op_peak)
            last_wgrad_bytes = (
                remaining + regathered + max(op.wgrad_numels[-2:]) * width
            )  # the larger of a weight and its bias
            last_expert_wgrad_bytes = last_wgrad_bytes if is_expert(op) else last_expert_wgrad_bytes
            wgrad_bytes += sum(op.wgrad_numels) * width
            remaining -= backward.deferred_by_op[index]
    return SplitUnitProfile(
        backward.peak,
        backward.cause,
        backward.kept_at_peak,
        backward.sums_at_peak,
        deferred_bytes,
        weights_peak,
        last_wgrad_bytes,
        last_expert_wgrad_bytes,
        wgrad_bytes,
        table_peak_bytes=table_peak,
        experts_peak_bytes=experts_peak,
    )


def _simulate_forward(simulated: SimulatedUnit) -> ForwardProfile:
    """Simulate the forward of a unit; dropped weight casts stay in autocast's cache for the forward of all units."""
    ops, dropped = simulated.unit.ops, simulated.unit.dropped
    sizes = {simulated.input_name: simulated.input_bytes} | {
        name: size for op in ops for name, size in op.writes.items()
    }
    result = next(iter(ops[-1].writes))
    keepers = Counter(name for op in ops for name in op.keeps)
    cached = {name for op in ops if op.recomputed and is_weight_cast(op) for name in op.writes} & dropped
    held_names = {*keepers, result} - (dropped - cached - {result})
    peak, live = _simulate_allocations(ops, held_names, inputs={simulated.input_name: simulated.input_bytes})
    cached_bytes = sum(sizes[name] for name in cached)
    return ForwardProfile(sizes, dict(keepers), peak, live - sizes[result] - cached_bytes, cached_bytes)


class BackwardSimulation:
    """A simulation of the backward of a unit; operations are identified by their index in it."""

    def __init__(
        self,
        simulated: SimulatedUnit,
        *,
        sums: GradientSums,
        split: bool = False,
        waiting: WaitingGradients = NO_WAITING,
        graph: bool = False,
    ) -> None:
        unit, forward = simulated.unit, simulated.forward
        self.ops, self.sizes, self.keepers = unit.ops, forward.sizes, forward.keeper_counts.copy()
        self.wgrad_element_bytes, self.split, self.graph, self.keeps_gradients = (
            simulated.wgrad_element_bytes,
            split,
            graph,
            sums.keeps_gradients,
        )
        self.unallocated_sums = {"dense": sums.dense, "experts": sums.experts} | (
            {"table": sums.table} if sums.table else {}
        )
        tables = ("embedding",) if sums.table or sums.tied else ()
        self.table_ops = (*tables, *(OUTPUTS if sums.tied else ()))
        self.kept_tables: set[str] = set()  # whose gradient is kept until the unit's backward has ended
        self.expert_reduction = sums.shard_bytes, sums.freed_bytes
        self.last_reduced_op = simulated.last_reduced
        self.deferred_by_op: dict[int, int] = {}  # bytes kept for W, by operation
        self.defers_other_gradients, self.defers_expert_biases = (
            waiting.others_wait and any(map(defers_wgrad, unit.ops)),
            waiting.expert_biases_wait,
        )
        self.waiting_by_op: dict[int, int] = {}  # bytes of gradients that wait for W, by operation
        self.kept_for_w: set[str] = set()  # kept tensors that W reads
        self.deferred_bytes = 0
        self.overwritten: set[str] = set()  # kept tensors that became gradients
        self.gradient_bytes = simulated.split_gradient_sizes if split else simulated.gradient_sizes
        self.recomputations = simulated.recomputations
        self.result = next(iter(unit.ops[-1].writes))
        self.result_gradient = LiveGradient(self.gradient_bytes[self.result])
        self.grads = {self.result: self.result_gradient}
        self.live = self.peak = self.sums = self.index = 0
        self.kept = self.kept_at_peak = forward.kept_bytes
        self.cause, self.sums_at_peak = "", 0
        self.is_past_loss, self.peak_after_loss = False, 0  # the peak once a loss is differentiated
        self.recompute_peaks = [0, 0]  # the peaks until the recomputation has ended, and after it
        self.recomputing_index = max(self.recomputations, default=len(unit.ops))

    def run(self) -> None:
        """Find the peak, its operation, and the kept bytes and sums at it."""
        self.live = self.peak = self.kept + self.result_gradient.bytes
        for index in reversed(range(len(self.ops))):
            self.index = index
            if recomputation := self.recomputations.get(index):
                self._update_peak(self.live + recomputation.peak_bytes, self.ops[index].name)
                recomputed_bytes = sum(self.sizes[name] for name in recomputation.names if name != self.result)
                self.live += recomputed_bytes
                self.kept += recomputed_bytes
            self._run_op(index, self.ops[index])
            self.is_past_loss |= self.ops[index].kind == "loss"

    def _update_peak(self, live: int, cause: str) -> None:
        """Update the peak."""
        if self.is_past_loss:
            self.peak_after_loss = max(self.peak_after_loss, live)
        if self.recomputations:
            part = self.index < self.recomputing_index
            self.recompute_peaks[part] = max(self.recompute_peaks[part], live)
        if live > self.peak:
            self.peak, self.cause, self.kept_at_peak, self.sums_at_peak = live, cause, self.kept, self.sums

    def _run_op(self, index: int, op: Op) -> None:
        """Simulate the backward of one operation."""
        grads, sizes = self.grads, self.gradient_bytes
        received = [grads.pop(name) for name in op.writes if name in grads]
        if not received:  # a weight's cast: the matmul made its gradient as the weight's
            self._free_kept(op, ())
            return
        first_received = received[0]
        targets = op.reads if op.differentiates is None else op.differentiates
        weights = sum(op.wgrad_numels) * self.wgrad_element_bytes
        scratch = op.backward_scratch
        if op.bias_scratch[1] or op.bias_wgrad_numel:
            self._add_biases(index, op)
        if op.accumulates_dgrad:
            targets = tuple(name for name in targets if name not in grads)
        made_bytes = 0 if op.passes_gradient or op.in_place else sum(sizes[name] for name in targets)
        is_deferred = bool(op.wgrad_numels) and op.kind != "loss" if self.graph else self.split and defers_wgrad(op)
        makes_weights = bool(op.wgrad_numels) and not is_deferred
        if is_deferred:
            weights = 0
            scratch = scratch - (0 if op.recomputed else op.regathered_bytes)
        casts_of_dgrad, casts_of_wgrad = op.cast_scratch_bytes
        self._update_peak(self.live + made_bytes + scratch + casts_of_dgrad, op.name)
        if makes_weights and (op.accumulates_wgrads or not weights):  # accumulated before the next one is made
            weights = max(op.wgrad_numels) * self.wgrad_element_bytes
            if op.kind == "loss":  # chunked: accumulates after the last chunk
                self._update_peak(self.live + made_bytes + weights + scratch, op.name)
                weights = sum(op.wgrad_numels) * self.wgrad_element_bytes
                scratch = op.regathered_bytes
            self._allocate_sums(op)
        casts = casts_of_wgrad if makes_weights else 0
        self._update_peak(self.live + made_bytes + weights + scratch + casts, op.name)
        if op.accumulates_wgrads and op.name == self.last_reduced_op:
            self._reduce(made_bytes + weights + scratch)
        self.live += made_bytes
        for name in targets:
            if op.passes_gradient:
                first_received.users += 1
                buffer = first_received
            else:
                buffer = LiveGradient(sizes[name])
            if name in grads:
                self._update_peak(self.live + sizes[name], op.name)
                self.live += sizes[name] - buffer.drop() - grads[name].drop()
                buffer = LiveGradient(sizes[name])
            grads[name] = buffer
        if is_deferred:
            self._defer(index, op, received)
        else:
            self.live -= sum(buffer.drop() for buffer in received)
        self._free_kept(op, targets)
        if weights:
            self._keep_weights(index, op, weights)

    def _keep_weights(self, index: int, op: Op, weights: int) -> None:
        """Handle the gradients of an operation's weights, of which ``weights`` bytes are allocated at once."""
        all_weights = sum(op.wgrad_numels) * self.wgrad_element_bytes
        if self.defers_other_gradients and op.kind != "embedding":  # a table is a separate unit
            self._keep_until_w(index, all_weights)
        elif not op.accumulates_wgrads:
            self._allocate_sums(op)
            self._update_peak(self.live + weights, op.name)
        table = "table" if self._uses_table(op) or op.kind == "embedding" else "output" if op.name in OUTPUTS else ""
        if (
            self.keeps_gradients and table not in self.kept_tables
        ):  # else autograd adds it to the gradient of an earlier use
            self.live += all_weights
            self.sums += all_weights
            self.kept_tables |= {table} - {""}

    def _add_biases(self, index: int, op: Op) -> None:
        """Make the gradients of experts' biases and of the weights of their rows: a separate operation, before dx."""
        bias_bytes = op.bias_wgrad_numel * self.wgrad_element_bytes
        if bias_bytes and not self.defers_expert_biases:
            self._allocate_sums(op)
        self._update_peak(self.live + bias_bytes + op.bias_scratch[1], op.name)
        if self.defers_expert_biases:
            self._keep_until_w(index, bias_bytes)

    def _keep_until_w(self, index: int, made_bytes: int) -> None:
        """Keep gradients of ``made_bytes`` bytes until W."""
        self.waiting_by_op[index] = made_bytes
        self.live += made_bytes
        self.kept += made_bytes
        self.deferred_bytes += made_bytes

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

    def _defer(self, index: int, op: Op, received: list[LiveGradient]) -> None:
        """Keep a linear's input and output gradients (received or gathered) until W.

        If the graph is retained, only the output gradients are kept.
        """
        if self.graph:
            self.deferred_by_op[index] = sum(self._take_over(buffer, index) for buffer in received)
            self.kept += self.deferred_by_op[index]
            return
        gradients = op.wgrad_operand_bytes
        self.live += gradients
        if not gradients or (op.kind == "matmul" and len(op.wgrad_numels) > 1):  # the bias reads the received ones
            gradients += sum(self._take_over(buffer, index) for buffer in received)
        else:
            self.live -= sum(buffer.drop() for buffer in received)
        saved_inputs = op.keeps[:1] if op.kind == "matmul" else op.keeps  # not what recomputation keeps
        new_names = [name for name in saved_inputs if name not in self.kept_for_w]
        self.kept_for_w.update(new_names)
        is_first = op.name in ("moe.experts.down", "attention.experts.out")  # of the grouped matmuls of its experts
        ends_bytes = 4 * op.batch if is_first else 0  # end of each expert's rows
        self.live += ends_bytes
        self.kept += gradients + ends_bytes
        self.deferred_by_op[index] = gradients + ends_bytes + sum(self.sizes[name] for name in new_names)
        self.deferred_bytes += self.deferred_by_op[index]

    def _take_over(self, gradient: LiveGradient, index: int) -> int:
        """Return the bytes that a gradient adds to what is kept for W.

        A gradient that another operation keeps moves to this one, whose W is later (in parallel blocks, attention and
        feed-forward add to one sum).
        """
        former_keeper, gradient.keeper = gradient.keeper, index
        if former_keeper is not None:
            self.deferred_by_op[former_keeper] -= gradient.bytes
            self.deferred_bytes -= gradient.bytes
            self.kept -= gradient.bytes
        return gradient.bytes

    def _allocate_sums(self, op: Op) -> None:
        """Allocate the gradient sums of the operation's families, if these are their first gradients.

        The bias of logits is a weight of the head, whether or not their matrix is a tied table.
        """
        families = ["table" if self._uses_table(op) else "experts" if is_expert(op) else "dense"]
        if op.name in OUTPUTS and len(op.wgrad_numels) > 1:
            families.append("dense")
        new_sums = sum(self.unallocated_sums.pop(family, 0) for family in families)
        self.live += new_sums
        self.sums += new_sums

    def _uses_table(self, op: Op) -> bool:
        """Return True if the operation makes a gradient of the embedding's table in a head that looks up tokens."""
        return op.kind in self.table_ops or op.name in self.table_ops

    def _reduce(self, backward_bytes: int) -> None:
        """Reduce the experts' gradients, which are complete before the rest of the unit's backward."""
        reduced, freed = self.expert_reduction
        self.live += reduced
        self.sums += reduced
        self._update_peak(self.live + backward_bytes, self.last_reduced_op)
        self.live -= freed
        self.sums -= freed


def defers_wgrad(op: Op) -> bool:
    """Return True if zero-bubble schedules defer the operation's weight gradients to W."""
    return bool(op.wgrad_numels) and (op.kind == "matmul" or op.name == "moe.arrive")


def is_expert(op: Op) -> bool:
    """Return True if the operation computes or receives rows of experts."""
    return op.name.startswith(("moe.experts", "moe.arrive"))


def _simulate_recomputations(unit: UnitOperations, sizes: Mapping[str, int]) -> dict[int, Recomputation]:
    """Simulate the recomputations of a unit, by the index of the operation before whose backward each runs.

    Operations that follow one another are recomputed at once, when the first backward needs one of their tensors.
    """
    if not unit.dropped:
        return {}
    keeper = {name: index for index, op in enumerate(unit.ops) for name in op.keeps}
    last_use = _find_last_uses(unit.ops)
    recomputations: dict[int, Recomputation] = {}
    for is_recomputed, group in itertools.groupby(enumerate(unit.ops), key=lambda item: item[1].recomputed):
        indices, ops = zip(*group, strict=True)
        names = [name for op in ops for name in op.writes if name in unit.dropped and name in keeper]
        if not is_recomputed or not names:
            continue
        index = max(keeper[name] for name in names)
        before = recomputations.get(index, Recomputation((), 0))
        held_bytes = sum(sizes[name] for name in before.names)
        held = {name for op in ops for name in op.writes if last_use[name] > indices[-1]}
        held |= {*names, *(name for op in ops for name in op.always_kept)}
        peak_bytes = held_bytes + _simulate_allocations(ops, held, inputs={})[0]
        recomputations[index] = Recomputation((*before.names, *names), max(before.peak_bytes, peak_bytes))
    return recomputations


def _simulate_allocations(ops: Sequence[Op], held: Set[str], *, inputs: Mapping[str, int]) -> tuple[int, int]:
    """Return the peak of a forward of ``ops`` and the bytes left after it; ``held``: tensors that it does not free.

    ``inputs``: the bytes of those that it reads and that count; others are allocated elsewhere.
    """
    sizes = dict(inputs) | {name: size for op in ops for name, size in op.writes.items()}
    last_use = _find_last_uses(ops)
    live = peak = sum(inputs.values())
    for index, op in enumerate(ops):
        live += sum(op.writes.values())
        peak = max(peak, live + max(op.forward_scratch, op.bias_scratch[0]))
        live -= sum(sizes.get(name, 0) for name in {*op.reads, *op.writes} - held if last_use[name] == index)
    return peak, live


def _find_last_uses(ops: Sequence[Op]) -> dict[str, int]:
    """Return the index of the last operation that reads or writes each tensor."""
    return {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.writes)}
