"""The operations of per-layer inputs: one tensor for all layers next to the embedding, of which each reads its part.

    embed    ids → table · √P;  x → project → / √D → norm;  their sum / √2 → pl [rows, L · P]
    block    z.f → gate → act → · pl of this layer → project → norm → (+ z.f) → z

The tensor is kept from the embedding to its backward. Blocks read views of it, and the gradients of those are counted
where all are complete, in the embedding's backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.per_layer_inputs import PerLayerInputs
from fivefold.planner.counts.operations.altup import expand
from fivefold.planner.counts.operations.linear import list_norm
from fivefold.planner.counts.operations.local_shapes import Local
from fivefold.planner.counts.operations.op import Op, elementwise, matmul, norm


def make_inputs(local: Local, ops: Sequence[Op], inputs: PerLayerInputs) -> list[Op]:
    """Return the operations of the embedding with those that make the inputs of all layers from ids and its output."""
    model, rows, width = local.model, local.stream_rows, local.width
    columns = model.layers * inputs.width
    size, table = rows * columns * width, inputs.vocab * columns
    stream = next(iter(ops[-1].writes))
    look_up = elementwise("embed.per_layer", "embedding", ("ids",), "pt", size=size, keeps=("ids",))
    project = matmul("embed.per_layer_project", stream, "pp", rows=rows, in_features=model.width, out_features=columns,
                     width=width)  # fmt: skip
    normed = norm("embed.per_layer_norm", "ps", "pn", rows=rows * model.layers, dim=inputs.width, width=width,
                  kind=local.norm)  # fmt: skip
    unit_ops = [
        *ops,
        look_up._replace(parameters=table, wgrad_numels=(table,), differentiates=()),
        elementwise("embed.per_layer.scale", "activation", ("pt",), "pts", size=size),
        project,
        elementwise("embed.per_layer_project.scale", "activation", ("pp",), "ps", size=size),
        list_norm(local, normed),
        elementwise("embed.per_layer.add", "add", ("pn", "pts"), "p", size=size),
        elementwise("embed.per_layer.halve", "activation", ("p",), "pl", size=size),
    ]
    if model.altup is not None:
        unit_ops += expand(local, model.altup, stream, "xa")
        stream = "xa"
    # the output of the unit is the stream itself, which the last operation hands on
    sizes = {stream: local.entry_bytes}
    unit_ops = [
        op._replace(writes=op.writes | {stream: 0}, gradients=sizes) if stream in op.writes else op for op in unit_ops
    ]
    return [
        *unit_ops,
        Op("embed.per_layer.parts", "message", (stream, "pl"), {"x.out": local.entry_bytes}, keeps=("pl",)),
    ]


def add_input(local: Local, inputs: PerLayerInputs, source: str, out: str, *, onto: str = "") -> list[Op]:
    """List the operations that add what ``source`` and the input of a layer make to the stream, ``onto`` → ``out``.

    ``onto``: by default ``source``.
    """
    model, rows, width = local.model, local.stream_rows, local.width
    size = rows * inputs.width * width
    scratch = ACTIVATIONS[model.activation].plain_scratch * size
    act = elementwise("per_layer.act", "activation", ("pg", "pl"), "pgp", size=size, keeps=("pg", "pl"))
    act = act._replace(forward_scratch=scratch, backward_scratch=scratch + size)
    if local.norm.plain:  # act(gate) is a tensor of its own, kept by the product
        act = act._replace(writes=act.writes | {"pga": size}, keeps=(*act.keeps, "pga"))

    def multiply(name: str, read: str, written: str, *, columns: tuple[int, int]) -> Op:
        into, out_of = columns
        return matmul(name, read, written, rows=rows, in_features=into, out_features=out_of, width=width)

    normed = norm(
        "per_layer.norm", "pd", "per_layer.norm.out", rows=rows, dim=local.stream_width, width=width, kind=local.norm
    )
    return [
        Op("per_layer.part", "message", (source,), {"pl": 0}, gradients={"pl": size}, differentiates=()),
        multiply("per_layer.gate", source, "pg", columns=(model.width, inputs.width)),
        act,
        multiply("per_layer.project", "pgp", "pd", columns=(inputs.width, model.width)),
        list_norm(local, normed),
        elementwise("per_layer.add", "add", (onto or source, "per_layer.norm.out"), out, size=local.entry_bytes),
    ]
