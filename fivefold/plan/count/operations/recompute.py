"""Recomputation: which operations of a layer run again in its backward, and what need not be kept for that.

A run of chosen operations keeps what it reads from outside and lets go what it writes for its own use. What others
keep of it stays kept, except for cheap groups (norm, act, rope, up), whose output is let go and made anew.
Sources: arXiv:1604.06174; selective: Korthikanti 2022, arXiv:2205.05198 §5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.layout.spec import CHEAP
from fivefold.plan.count.operations.op import Op


class Unit(NamedTuple):
    """Operations that run in order, and the tensors that are let go between forward and backward."""

    ops: tuple[Op, ...]
    dropped: frozenset[str] = frozenset()


def groups(op: Op) -> frozenset[str]:
    """The groups of ``layout.spec.RECOMPUTABLE`` to which an operation belongs."""
    first, _, second = op.name.partition(".")
    found = {"layer"}
    if op.kind == "norm":
        found.add("norm")
    if first == "attention" and second.startswith("core"):
        found.add("core")
    elif first == "attention" and op.kind == "matmul":
        found.add("out" if second == "out" else "qkv")
        if second.endswith("_up"):
            found.add("up")
    if first in ("mlp", "moe", "rope") and op.name not in ("mlp.add", "mlp.dropout", "moe.add"):  # sums with others
        found.add(first)
    if second.startswith("shared"):
        found = (found - {"moe"}) | {"shared"}
    if second == "router":
        found.add("router")
    if second.endswith("act"):
        found.add("act")
    return frozenset(found)


def recompute(ops: Sequence[Op], wanted: frozenset[str], *, early_stop: bool = False) -> Unit:
    """``ops`` with what the ``wanted`` groups let go, and those that run again marked.

    ``early_stop``: what makes nothing that the backward reads, nor is needed for it, does not run again.
    """
    chosen = [bool(groups(op) & wanted) for op in ops]
    if not any(chosen):
        return Unit(tuple(ops))
    _bring(ops, chosen)
    written = {name for op, again in zip(ops, chosen, strict=True) if again for name in op.writes}
    cheap = {name for op, again in zip(ops, chosen, strict=True) if again and groups(op) & wanted & CHEAP
             for name in op.writes}  # fmt: skip
    kept_by_others = {name for op, again in zip(ops, chosen, strict=True) if not again for name in op.keeps}
    dropped = written - (kept_by_others - cheap) - {name for op in ops for name in op.stays}
    marked = [
        op._replace(
            recomputed=True, keeps=tuple(dict.fromkeys((*op.keeps, *(n for n in op.reads if n not in written))))
        )
        if again
        else op
        for op, again in zip(ops, chosen, strict=True)
    ]
    if early_stop:
        marked = _asked_for(marked, frozenset(dropped), whole="layer" in wanted)
    return Unit(tuple(marked), frozenset(dropped))


def _asked_for(ops: Sequence[Op], dropped: frozenset[str], *, whole: bool) -> list[Op]:
    """Without the marks of operations of which nothing is asked: neither what was kept and let go, nor what is read to
    make that, nor an input that is gathered within them. ``whole``: all that come before one of which something is
    asked run too.
    """
    asked = {name for op in ops for name in op.keeps} & dropped
    entered = {name for op in ops if op.message and op.message.regather for name in op.writes}
    found: list[Op] = []
    running = False
    for op in reversed(ops):
        wanted = not asked.isdisjoint(op.writes) or not entered.isdisjoint(op.reads)
        running = op.recomputed and ((running and whole) or wanted)
        found.append(op._replace(recomputed=running))
        if running:
            asked |= dropped.intersection(op.reads)
    return found[::-1]


def _bring(ops: Sequence[Op], chosen: list[bool]) -> None:
    """Choose too the messages and casts that serve chosen operations alone: what goes in is kept, not what comes. Not
    the sums of what operations before them made, nor what comes as large as it goes (heads against tokens).
    """
    for index in reversed(range(len(ops))):
        op = ops[index]
        serves = op.kind in ("message", "cast") and not op.name.endswith((".reduce", ".swap", ".share"))
        if serves and not chosen[index]:
            readers = [chosen[later] for later, other in enumerate(ops) if set(other.reads) & op.writes.keys()]
            chosen[index] = bool(readers) and all(readers)
