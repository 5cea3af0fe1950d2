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

from fivefold.planner.counts.memory.backward import NO_WAITS, Backward, Sums, Waits, is_expert, is_put_off
from fivefold.planner.counts.operations.op import Op, is_weight_cast
from fivefold.planner.counts.operations.recompute import Unit


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


def play(unit: Unit, *, entry: str, entry_bytes: int, width: int, sums: Sums) -> Profile:
    """Live bytes of one unit that reads ``entry``. ``width``: bytes per element of a weight gradient; ``sums``: what
    the first gradients allocate, nothing if it is allocated already.
    """
    sizes, keepers, forward_peak, kept, cached = _kept(unit, entry=entry, entry_bytes=entry_bytes)
    back = Backward(unit, sizes=sizes, keepers=keepers, width=width, sums=sums)
    back.run(kept)
    return Profile(kept, forward_peak, back.peak, back.cause, back.kept_then, back.sums_then, back.after_loss, cached)


def play_graph(unit: Unit, *, entry: str, entry_bytes: int, width: int, sums: Sums) -> SplitProfile:
    """As ``play_split`` where PyTorch keeps the graph between both halves: in B nothing that the forward kept is freed
    but, at its end, what lies above the last weight; W makes the gradients from the first weight to the last.
    """
    sizes, keepers, _, kept, _ = _kept(unit, entry=entry, entry_bytes=entry_bytes)
    back = Backward(unit, sizes=sizes, keepers=keepers, width=width, sums=sums, split=True, graph=True)
    back.run(kept)
    late = [op for op in unit.ops if id(op) in back.held]
    top = max((place for place, op in enumerate(unit.ops) if id(op) in back.held), default=-1)
    below = {name for op in unit.ops[: top + 1] for name in op.keeps}
    released = sum(sizes[name] for name in set(keepers) - below - back.overwritten)
    left = whole = back.kept - released
    weights_peak = closing = 0
    for op in late:
        closing = left + max(op.gradient_widths) * width
        weights_peak = max(weights_peak, left + sum(op.gradient_widths) * width)
        left -= back.held[id(op)]
    made = sum(sum(op.gradient_widths) for op in late) * width
    return SplitProfile(
        back.peak, back.cause, back.kept_then, back.sums_then, whole, weights_peak, closing, closing, made, released
    )


def play_split(
    unit: Unit, *, entry: str, entry_bytes: int, width: int, sums: Sums, waits: Waits = NO_WAITS
) -> SplitProfile:  # fmt: skip
    """As ``play``, with the weight gradients of linear layers deferred, for which their operands stay live.
    ``waits``: which gradients that are made in B wait for them until W.
    """
    sizes, keepers, _, kept, _ = _kept(unit, entry=entry, entry_bytes=entry_bytes)
    back = Backward(unit, sizes=sizes, keepers=keepers, width=width, sums=sums, split=True, waits=waits)
    back.run(kept)
    late, weights_peak, table_peak, experts_peak, closing, experts, every = back.late, 0, 0, 0, 0, 0, 0
    left = late
    for op in reversed(unit.ops):
        if id(op) in back.waiting:
            if not is_expert(op):
                weights_peak = max(weights_peak, left)
            closing = left
            left -= back.waiting[id(op)]
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
            left -= back.held[id(op)]
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


def _kept(unit: Unit, *, entry: str, entry_bytes: int) -> tuple[dict[str, int], Counter[str], int, int, int]:
    """Bytes by tensor, number of operations that keep each, the forward's peak, bytes kept without the output, and
    bytes of dropped casts of weights, which autocast's cache keeps as long as the forward of all units."""
    ops = unit.ops
    sizes = {entry: entry_bytes} | {name: size for op in ops for name, size in op.writes.items()}
    result = next(iter(ops[-1].writes))
    keepers = Counter(name for op in ops for name in op.keeps)
    cached = {name for op in ops if op.recomputed and is_weight_cast(op) for name in op.writes} & unit.dropped
    live, forward_peak = _forward(ops, sizes=sizes, held={*keepers, result} - (unit.dropped - cached - {result}))
    late = sum(sizes[name] for name in cached)
    return sizes, keepers, forward_peak, live - sizes[result] - late, late


def _forward(ops: Sequence[Op], *, sizes: dict[str, int], held: set[str]) -> tuple[int, int]:
    """Live bytes at the end of the forward and at its peak; ``held``: tensors that are not freed."""
    last_use = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.writes)}
    live = peak = sizes[ops[0].reads[0]]
    for index, op in enumerate(ops):
        live += sum(op.writes.values())
        peak = max(peak, live + op.forward_scratch)
        live -= sum(sizes[name] for name in {*op.reads, *op.writes} - held if last_use[name] == index)
    return live, peak
