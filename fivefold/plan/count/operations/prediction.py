"""The operations of the head: norm, losses, and before these the modules of multi-token prediction, if there are any.

x → norm → h ─ per module: (embedding of the token further on → norm, h → norm) → project → block → norm → h'
h and every h' → output projection → loss        (``train/model/mtp.py``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fivefold.plan.count.operations.layer import block, embedding, head
from fivefold.plan.count.operations.linear import Source, settled
from fivefold.plan.count.operations.op import Op, elementwise, norm
from fivefold.plan.count.operations.part import Local
from fivefold.plan.count.operations.recompute import Unit, recompute

Rename = Callable[[str], str]


def head_unit(local: Local) -> Unit:
    """The head as one unit; ``head`` of ``layer.py`` if it predicts one token."""
    first, *losses = head(local)
    depth = local.model.predicted
    if not depth:
        return Unit((first, *losses))
    ops, dropped, hidden = [first], set[str](), ["h"]
    for place in range(depth):
        module = _module(local, place)
        inner = _prefix(f"mtp{place}.", {"h": hidden[-1], "ids": _ids(place)})
        ops += renamed(module.ops, inner)
        dropped |= {inner(name) for name in module.dropped}
        hidden.append(inner("out"))
    ends = []
    for place, source in enumerate(hidden):
        known = {"h": source} | ({"targets": _ids(place)} if place < depth else {})  # the same copy of the batch
        mine = list(renamed(losses, _prefix(f"loss{place}.", known)))
        ops += [
            op._replace(writes={name: size for name, size in op.writes.items() if name != _ids(place)}) for op in mine
        ]
        ends.append(next(iter(mine[-1].writes)))
    size = 4 * (1 + depth)
    return Unit((*ops, elementwise("loss.join", "add", tuple(ends), "losses", size=size)), frozenset(dropped))


def _ids(place: int) -> str:
    """Name of the token ids of a module, which are the targets of the loss before its own."""
    return f"ids{place}"


def _module(local: Local, place: int) -> Unit:
    """A module: ``h`` and token ids ``ids`` → ``out``."""
    model, job, part, width = local.model, local.job, local.part, local.width
    rows, size = local.stream_rows, local.stream_bytes

    def normed(name: str, source: str, out: str) -> Op:
        return norm(f"mtp.{name}", source, out, rows=rows, dim=model.width, width=width, kind=local.norm)

    tokens, *reduce = (op for op in embedding(local) if op.name in ("embed.tokens", "embed.reduce"))
    tokens = tokens._replace(reads=("h", "ids"), writes=tokens.writes | {"ids": local.ids_bytes})
    join = elementwise("mtp.join", "add", ("en", "hn"), "both", size=2 * size)
    entry = Source(local, "both", into=2 * model.width, rows=rows, gathered=False)
    project = settled(entry.column("mtp.project", "p", outof=model.width), job)
    inside = recompute(
        block(local, layer=model.layers + place), part.recomputed, early_stop=job.stack.early_stop,
        fused=job.stack.linears == "fanned",
    )  # fmt: skip
    of_block = _prefix("block.", {"x": "p"})
    ops = (
        *renamed((tokens, *reduce), _prefix("", {"x": "e"})),
        normed("embed_norm", "e", "en"), normed("hidden_norm", "h", "hn"), join, *entry.ops, project,
        *renamed(inside.ops, of_block), normed("norm", of_block("z"), "out"),
    )  # fmt: skip
    return Unit(ops, frozenset(of_block(name) for name in inside.dropped if name != "z"))  # which its norm keeps


def _prefix(words: str, known: dict[str, str]) -> Rename:
    """A renaming of tensors: those ``known``, others by a prefix."""
    return lambda name: known.get(name, f"{words}{name}")


def renamed(ops: Iterable[Op], rename: Rename) -> Iterable[Op]:
    """``ops`` with other names of the tensors that they read, write and keep."""
    for op in ops:
        yield op._replace(
            reads=tuple(map(rename, op.reads)), keeps=tuple(map(rename, op.keeps)), stays=tuple(map(rename, op.stays)),
            writes={rename(name): size for name, size in op.writes.items()},
            differentiates=None if op.differentiates is None else tuple(map(rename, op.differentiates)),
            gradients=None if op.gradients is None else {rename(name): size for name, size in op.gradients.items()},
        )  # fmt: skip
