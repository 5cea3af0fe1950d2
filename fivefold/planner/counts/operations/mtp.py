"""The operations of the head: norm, losses, and before these the modules of multi-token prediction, if there are any.

x → norm → h ─ per module: (embedding of the token further on → norm, h → norm) → project → block → norm → h'
h and every h' → output projection → loss        (``trainer/model/mtp.py``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fivefold.planner.counts.operations.autocast import autocasted
from fivefold.planner.counts.operations.layer import block, block_unit, embedding, head
from fivefold.planner.counts.operations.linear import Source, settled
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise, is_weight_cast, norm
from fivefold.planner.counts.operations.recompute import Unit

Rename = Callable[[str], str]
Finish = Callable[[Op], Op]


def head_unit(
    local: Local, *, inside: Callable[[int], Unit] | None = None, finish: Finish = lambda op: op, named: bool = True
) -> Unit:
    """The head as one unit; ``head`` of ``layer.py`` if it predicts one token.

    ``inside``: the block of a module by its layer, finished; ``finish``: what is done to the other operations;
    ``named=False``: tensors keep the names of their own block, and operations are those of ``inside`` themselves.
    """
    first, *losses = map(finish, head(local))
    depth = local.model.predicted
    if not depth:
        return Unit((first, *losses))
    rename = renamed if named else _unchanged
    ops, dropped, hidden = [first], set[str](), ["h"]
    for place in range(depth):
        layer = local.model.layers + place
        within = inside(layer) if inside else block_unit(block(local, layer=layer), local)
        module = _module(local, within, finish, rename)
        inner = _prefix(f"mtp{place}.", {"h": hidden[-1], "ids": _ids(place)})
        ops += rename(module.ops, inner)
        dropped |= {inner(name) for name in module.dropped}
        hidden.append(inner("out"))
    ends = []
    casts = {name: name for op in losses if is_weight_cast(op) for name in op.writes}  # made once for all losses
    for place, source in enumerate(hidden):
        known = casts | {"h": source}
        known |= {"targets": _ids(place)} if place < depth else {}  # the same copy of the batch
        each = [op for op in losses if not (place and is_weight_cast(op))]
        mine = list(rename(each, _prefix(f"loss{place}.", known)))
        ops += [
            op._replace(writes={name: size for name, size in op.writes.items() if name != _ids(place)}) for op in mine
        ]
        ends.append(next(iter(mine[-1].writes)))
    size = 4 * (1 + depth)
    return Unit((*ops, elementwise("loss.join", "add", tuple(ends), "losses", size=size)), frozenset(dropped))


def _ids(place: int) -> str:
    """Name of the token ids of a module, which are the targets of the loss before its own."""
    return f"ids{place}"


def _module(local: Local, inside: Unit, finish: Finish, rename: Callable[[Iterable[Op], Rename], Iterable[Op]]) -> Unit:
    """A module around the block ``inside``: ``h`` and token ids ``ids`` → ``out``."""
    model, job, width = local.model, local.job, local.width
    rows, size = local.stream_rows, local.stream_bytes

    def normed(name: str, source: str, out: str) -> Op:
        return norm(f"mtp.{name}", source, out, rows=rows, dim=model.width, width=width, kind=local.norm)

    tokens, *reduce = (op for op in embedding(local) if op.name in ("embed.tokens", "embed.reduce"))
    tokens = tokens._replace(reads=("h", "ids"), writes=tokens.writes | {"ids": local.ids_bytes})
    join = elementwise("mtp.join", "add", ("en", "hn"), "both", size=2 * size)
    entry = Source(local, "both", into=2 * model.width, rows=rows, gathered=False)
    project = settled(entry.column("mtp.project", "p", outof=model.width), job)
    of_block = _prefix("block.", {"x": "p"})
    joined = normed("embed_norm", "e", "en"), normed("hidden_norm", "h", "hn"), join, *entry.ops, project
    before = *rename((tokens, *reduce), _prefix("", {"x": "e"})), *autocasted(local, joined)
    after = autocasted(local, [normed("norm", of_block("z"), "out")], narrow=True)
    ops = *map(finish, before), *rename(inside.ops, of_block), *map(finish, after)
    return Unit(ops, frozenset(of_block(name) for name in inside.dropped if name != "z"))  # which its norm keeps


def _prefix(words: str, known: dict[str, str]) -> Rename:
    """A renaming of tensors: those ``known``, others by a prefix."""
    return lambda name: known.get(name, f"{words}{name}")


def _unchanged(ops: Iterable[Op], _: Rename) -> Iterable[Op]:
    return ops


def renamed(ops: Iterable[Op], rename: Rename) -> Iterable[Op]:
    """``ops`` with other names of the tensors that they read, write and keep."""
    for op in ops:
        yield op._replace(
            reads=tuple(map(rename, op.reads)), keeps=tuple(map(rename, op.keeps)), stays=tuple(map(rename, op.stays)),
            writes={rename(name): size for name, size in op.writes.items()},
            differentiates=None if op.differentiates is None else tuple(map(rename, op.differentiates)),
            gradients=None if op.gradients is None else {rename(name): size for name, size in op.gradients.items()},
        )  # fmt: skip
