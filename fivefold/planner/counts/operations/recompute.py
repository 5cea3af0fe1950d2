"""Activation recomputation: the operations of a layer that run again in its backward, and the tensors it frees.

A sequence of recomputed operations keeps its inputs from outside and drops what it writes. A written tensor that other
operations keep stays kept, except in the cheap groups (norm, act, rope, up), whose output, and its cast to fp8 or fp4,
is dropped and recomputed. Sources: arXiv:1604.06174; selective: Korthikanti 2022, arXiv:2205.05198 §5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from fivefold.layout.recomputation import CHEAP, list_groups
from fivefold.planner.counts.operations.op import Op

STRUCTURES = 4096  # cached choices of what is recomputed


class UnitOperations(NamedTuple):
    """The operations of a unit in order, and the tensors that are dropped after forward and recomputed in backward."""

    ops: tuple[Op, ...]
    dropped: frozenset[str] = frozenset()


def recompute(
    ops: Sequence[Op], recomputed_groups: frozenset[str], *, early_stop: bool = False, fused: bool = False
) -> UnitOperations:
    """Return ``ops`` with those of ``recomputed_groups`` marked as recomputed, and the tensors that are dropped.

    ``early_stop``: operations whose results the backward does not need are not recomputed. ``fused``: linear layers on
    one input are one operation, which is recomputed as one or not at all.
    """
    marks = (
        _choose(_Structure(ops), recomputed_groups, early_stop=early_stop, fused=fused) if recomputed_groups else None
    )
    if marks is None:
        return UnitOperations(tuple(ops))
    marked = [
        op if keeps is None else op._replace(recomputed=recomputed, keeps=keeps)
        for op, (recomputed, keeps) in zip(ops, marks.ops, strict=True)
    ]
    return UnitOperations(tuple(marked), marks.dropped)


class _Marks(NamedTuple):
    """The mark of each operation and what it keeps (None: nothing changes), and the tensors that are dropped."""

    ops: tuple[tuple[bool, tuple[str, ...] | None], ...]
    dropped: frozenset[str]


class _Structure:
    """The names and tensors of operations without their sizes, which decide what is recomputed."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self._key = tuple(
            [
                (
                    (op.name, op.kind, op.reads, *op.writes, op.keeps, op.always_kept),
                    (op.message and op.message.regather, _has_backward(op)),
                )
                for op in ops
            ]
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self._key == other._key


@lru_cache(maxsize=STRUCTURES)
def _choose(
    structure: _Structure, recomputed_groups: frozenset[str], *, early_stop: bool, fused: bool
) -> _Marks | None:
    """Return the marks of ``recompute``; None if no operation is recomputed."""
    ops = structure.ops
    kept_names = {name for op in ops for name in op.keeps}
    is_recomputed = [
        "layer" in recomputed_groups
        or (
            not list_groups(op.name).isdisjoint(recomputed_groups)
            and (_has_backward(op) or not kept_names.isdisjoint(op.writes))
        )
        for op in ops
    ]
    if not any(is_recomputed):
        return None
    _mark_messages(ops, is_recomputed)
    cheap = {
        name
        for op, recomputed in zip(ops, is_recomputed, strict=True)
        if recomputed and list_groups(op.name) & recomputed_groups & CHEAP
        for name in op.writes
    }
    _mark_casts(ops, is_recomputed, cheap)
    written_names = {
        name for op, recomputed in zip(ops, is_recomputed, strict=True) if recomputed for name in op.writes
    }
    kept_by_others = {
        name for op, recomputed in zip(ops, is_recomputed, strict=True) if not recomputed for name in op.keeps
    }
    dropped = written_names - (kept_by_others - cheap) - {name for op in ops for name in op.always_kept}
    marked = [
        op._replace(
            recomputed=True, keeps=tuple(dict.fromkeys((*op.keeps, *(n for n in op.reads if n not in written_names))))
        )
        if recomputed
        else op
        for op, recomputed in zip(ops, is_recomputed, strict=True)
    ]
    if early_stop:
        last = _find_last_saving(ops) if "layer" in recomputed_groups else None
        stopped = _stop_early(marked, frozenset(dropped), last=last, fused=fused)
        # what does not run again keeps no inputs to do so
        marked = [op if op.recomputed else op._replace(keeps=old.keeps) for op, old in zip(stopped, ops, strict=True)]
    changes = [(new.recomputed, None if new is op else new.keeps) for op, new in zip(ops, marked, strict=True)]
    return _Marks(tuple(changes), frozenset(dropped))


def is_linear(op: Op) -> bool:
    """Return True if ``op`` is a linear layer that the trainer may fuse with others on its input.

    A router is not, nor the layers of an indexer, which run without a gradient.
    """
    return op.kind == "matmul" and op.name != "moe.router" and ".indexer." not in op.name


def is_fused_with(op: Op, first: Op) -> bool:
    """Return True if the trainer runs ``op`` in one operation with ``first``.

    The query of MLA runs by itself, and so does A of the adapters of experts, before their product.
    """
    runs_alone = first.name == "attention.q" and op.name == "attention.kv_down"
    runs_alone = runs_alone or (first.name.startswith("moe.experts.") and first.name.endswith(".lora_a"))
    return is_linear(op) and is_linear(first) and op.reads == first.reads and not runs_alone


def _group_linears(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Yield ``ops`` in order, as lists: fused linear layers together, every other operation by itself."""
    fused_ops: list[Op] = []
    for op in ops:
        if fused_ops and not is_fused_with(op, fused_ops[0]):
            yield fused_ops
            fused_ops = []
        fused_ops.append(op)
    if fused_ops:
        yield fused_ops


def _find_last_saving(ops: Sequence[Op]) -> Op | None:
    """Return the last operation that saves a tensor other than those that outlive any recomputation.

    The products with W and with B of an adapter are one operation, which begins with W.
    """
    kept_names = {name for op in ops for name in op.always_kept}
    last = next((op for op in reversed(ops) if not kept_names.issuperset(op.keeps)), None)
    if last is None or not last.name.endswith(".lora_b"):
        return last
    return next(op for op in ops if op.name == last.name.removesuffix(".lora_b"))


def _stop_early(ops: Sequence[Op], dropped: frozenset[str], *, last: Op | None, fused: bool) -> list[Op]:
    """Return ``ops`` without the mark on those whose results are not needed.

    Needed are a dropped tensor that the backward keeps or that is read to recompute one, and the input of an operation
    that gathers again. ``last``: the operation before which everything runs again, as the full layer is recomputed.
    """
    needed = {name for op in ops for name in op.keeps} & dropped
    regathered_inputs = {name for op in ops if op.message and op.message.regather for name in op.writes}
    stopped_ops: list[Op] = []
    precedes_last = False
    for group in reversed(list(_group_linears(ops) if fused else ([op] for op in ops))):
        first = group[0]  # all belong to the same groups
        is_needed = not regathered_inputs.isdisjoint(first.reads) or any(
            not needed.isdisjoint(op.writes) for op in group
        )
        running = first.recomputed and (precedes_last or is_needed)
        precedes_last = last is not None and (precedes_last or running or any(op.name == last.name for op in group))
        stopped_ops += [op if op.recomputed == running else op._replace(recomputed=running) for op in reversed(group)]
        if running:
            needed |= dropped.intersection(first.reads)
    return stopped_ops[::-1]


def _has_backward(op: Op) -> bool:
    """Tell whether autograd differentiates an operation, as something below it is trained, or it itself."""
    return op.differentiates != () or bool(op.wgrad_numels) or op.kind == "cast"


def _mark_casts(ops: Sequence[Op], is_recomputed: list[bool], cheap: set[str]) -> None:
    """Mark the casts of the outputs of cheap groups, which are dropped with them.

    The linear layer saves its input as it was given, and casts it again
    (NVIDIA/Megatron-LM:megatron/core/transformer/moe/experts.py and transformer_layer.py, set_save_original_input).
    """
    for index, op in enumerate(ops):
        if op.kind == "cast" and cheap.issuperset(op.reads):
            is_recomputed[index] = True
            cheap.update(op.writes)


def _mark_messages(ops: Sequence[Op], is_recomputed: list[bool]) -> None:
    """Mark also messages and casts that only recomputed operations read, so that their input is kept, not their output.

    Reductions of earlier operations' results are excluded, all_to_alls, whose output is as large as their input, and
    the gather of an indexer's choice, which is kept.
    """
    for index in reversed(range(len(ops))):
        op = ops[index]
        is_kept = op.name.endswith((".reduce", ".swap", ".share")) or ".indexer." in op.name
        can_recompute = op.kind in ("message", "cast") and not is_kept
        if can_recompute and not is_recomputed[index]:
            readers = [is_recomputed[later] for later, other in enumerate(ops) if set(other.reads) & op.writes.keys()]
            is_recomputed[index] = bool(readers) and all(readers)
