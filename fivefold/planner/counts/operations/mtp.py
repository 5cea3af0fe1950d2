"""The operations of the head: norm, losses, and before these the multi-token prediction modules, if there are any.

x → norm → h ─ per module: (embedding of the next target token → norm, h → norm) → project → block → norm → h' h and
every h' → output projection → loss (``trainer/model/mtp.py``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fivefold.planner.counts.operations.autocast import apply_autocast
from fivefold.planner.counts.operations.layer import build_block_unit, list_block, list_embedding, list_head
from fivefold.planner.counts.operations.linear import LinearInput, drop_wgrad
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise, is_weight_cast, norm
from fivefold.planner.counts.operations.recompute import UnitOperations

Rename = Callable[[str], str]
Finish = Callable[[Op], Op]


def build_head_unit(
    local: Local,
    *,
    inside: Callable[[int], UnitOperations] | None = None,
    finish: Finish = lambda op: op,
    named: bool = True,
) -> UnitOperations:
    """Return the head as one unit; it is ``head`` of ``layer.py`` if it predicts one token.

    ``inside``: the block of a module by its layer, finished; ``finish``: applied to the other operations;
    ``named=False``: tensors keep the names of their own block, and operations are those of ``inside`` themselves.
    """
    head_ops, depth = list(map(finish, list_head(local))), local.model.mtp_depth
    if not depth:
        return UnitOperations(tuple(head_ops))
    rename = rename_tensors if named else _keep_ops
    norms, stream = (1, "h") if local.model.final_norm else (0, "x")  # the modules read the normed stream
    ops, losses = head_ops[:norms], head_ops[norms:]
    dropped, hidden = set[str](), [stream]
    for depth_index in range(depth):
        layer = local.model.layers + depth_index
        inner_block = inside(layer) if inside else build_block_unit(list_block(local, layer=layer), local)
        module = _build_module(local, inner_block, finish, rename)
        rename_inner = _make_prefix_renaming(f"mtp{depth_index}.", {"h": hidden[-1], "ids": _name_ids(depth_index)})
        ops += rename(module.ops, rename_inner)
        dropped |= {rename_inner(name) for name in module.dropped}
        hidden.append(rename_inner("out"))
    loss_tensors = []
    casts = {name: name for op in losses if is_weight_cast(op) for name in op.writes}  # cast once for all losses
    for depth_index, source in enumerate(hidden):
        known_names = casts | {stream: source}
        known_names |= {"targets": _name_ids(depth_index)} if depth_index < depth else {}  # the same copy of the batch
        loss_ops = [op for op in losses if not (depth_index and is_weight_cast(op))]
        renamed_loss = list(rename(loss_ops, _make_prefix_renaming(f"loss{depth_index}.", known_names)))
        ops += [
            op._replace(writes={name: size for name, size in op.writes.items() if name != _name_ids(depth_index)})
            for op in renamed_loss
        ]
        loss_tensors.append(next(iter(renamed_loss[-1].writes)))
    size = 4 * (1 + depth)
    return UnitOperations(
        (*ops, elementwise("loss.join", "add", tuple(loss_tensors), "losses", size=size)), frozenset(dropped)
    )


def _name_ids(place: int) -> str:
    """Return the name of a module's token ids, which are also the targets of the previous loss."""
    return f"ids{place}"


def _build_module(
    local: Local, inside: UnitOperations, finish: Finish, rename: Callable[[Iterable[Op], Rename], Iterable[Op]]
) -> UnitOperations:
    """Return a module around the block ``inside``: ``h`` and token ids ``ids`` → ``out``."""
    model, job, width = local.model, local.job, local.width
    rows, size = local.stream_rows, local.stream_bytes

    def make_norm(name: str, source: str, out: str) -> Op:
        return norm(f"mtp.{name}", source, out, rows=rows, dim=model.width, width=width, kind=local.norm)

    tokens, *reduce_ops = (op for op in list_embedding(local) if op.name in ("embed.tokens", "embed.reduce"))
    tokens = tokens._replace(reads=("h", "ids"), writes=tokens.writes | {"ids": local.ids_bytes})
    join = elementwise("mtp.join", "add", ("en", "hn"), "both", size=2 * size)
    entry = LinearInput(local, "both", in_features=2 * model.width, rows=rows, needs_all_rows=False)
    project = drop_wgrad(entry.column("mtp.project", "p", out_features=model.width), job)
    rename_in_block = _make_prefix_renaming("block.", {"x": "p"})
    joined_ops = make_norm("embed_norm", "e", "en"), make_norm("hidden_norm", "h", "hn"), join, *entry.ops, project
    ops_before = (
        *rename((tokens, *reduce_ops), _make_prefix_renaming("", {"x": "e"})),
        *apply_autocast(local, joined_ops),
    )
    ops_after = apply_autocast(local, [make_norm("norm", rename_in_block("z"), "out")], stream_in_16_bits=True)
    ops = *map(finish, ops_before), *rename(inside.ops, rename_in_block), *map(finish, ops_after)
    return UnitOperations(
        ops, frozenset(rename_in_block(name) for name in inside.dropped if name != "z")
    )  # z is kept by the norm


def _make_prefix_renaming(words: str, known: dict[str, str]) -> Rename:
    """Return a renaming of tensors: ``known`` names are mapped, others get a prefix."""
    return lambda name: known.get(name, f"{words}{name}")


def _keep_ops(ops: Iterable[Op], _: Rename) -> Iterable[Op]:
    return ops


def rename_tensors(ops: Iterable[Op], rename: Rename) -> Iterable[Op]:
    """Yield ``ops`` with new names for the tensors that they read, write and keep."""
    for op in ops:
        yield op._replace(
            reads=tuple(map(rename, op.reads)),
            keeps=tuple(map(rename, op.keeps)),
            always_kept=tuple(map(rename, op.always_kept)),
            writes={rename(name): size for name, size in op.writes.items()},
            differentiates=None if op.differentiates is None else tuple(map(rename, op.differentiates)),
            gradients=None if op.gradients is None else {rename(name): size for name, size in op.gradients.items()},
        )
