"""Map our weights to the tensors of a Hugging Face folder: names, shapes, experts, and order of rotary rows.

    blocks.3.moe.experts.gate [E, F, D] = E times model.layers.3.mlp.experts.0.gate_proj.weight [F, D]
                                or the upper half of model.layers.3.mlp.experts.gate_up_proj [E, 2F, D] (stacked)

Source: modelling code and ``conversion_mapping.py`` of transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from fivefold.model.huggingface.decoder import FusedTensor, Names
from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, get_layer, list_router_tensors, list_weights, name_block
from fivefold.spelling import make_unknown_name_error


class TensorPart(NamedTuple):
    """The place of our weight ``ours``, or one of its experts, in a tensor of the folder: alone, or fused with others.

    Our rows are along ``dim`` of the tensor, from row ``first`` on: contiguous, or ``run`` of them every ``stride``.
    """

    name: str
    shape: tuple[int, ...]
    ours: str
    expert: int | None = None  # index of the expert
    dim: int = 0
    first: int = 0
    rows: int | None = None  # rows of our weight; None: all of the tensor
    run: int = 1
    stride: int = 1
    transposed: bool = False  # the last two dims are swapped
    head: tuple[int, int, int] | None = None  # of rotary pairs: (rows per head, first and number of rotary rows)
    swapped: bool = False  # the two halves of a head's rotary rows are swapped there, instead of interleaved
    moved: bool = False  # a head's rotary rows are its last there, and its first here
    ones: tuple[int, ...] = ()  # dims of size one that our weight does not have, as of filters [channels, 1, taps]
    experts: int = 0  # whose matrices are one below another in a tensor of two dims; 0: not so

    @property
    def numel(self) -> int:
        """Return the number of elements of the full tensor."""
        return prod(self.shape)

    @property
    def is_plain_copy(self) -> bool:
        """Tell whether the tensor equals our weight, with no other weights, reordering or transposition."""
        return self.rows in (None, self.shape[self.dim]) and not (self.transposed or self.head or self.ones)

    def select_expert(self, expert: int) -> TensorPart:
        """Return the part that holds one expert, of a tensor with the matrices of all experts one below another."""
        rows = self.shape[0] // self.experts
        return self._replace(expert=expert, dim=0, first=expert * rows, rows=rows, experts=0)

    def order(self) -> Sequence[int]:
        """Return the index of the tensor's row for each of our rows: fused and rotary rows have another order there."""
        rows = self.shape[self.dim] if self.rows is None else self.rows
        places: Sequence[int] = range(self.first, self.first + rows)
        if self.run != self.stride:
            places = [self.first + row // self.run * self.stride + row % self.run for row in range(rows)]
        if self.head is None:
            return places
        size, first, rotary_rows = self.head
        last, middle = first + rotary_rows, first + rotary_rows // 2
        if self.moved:
            return [places[start + (row - rotary_rows) % size] for start in range(0, rows, size) for row in range(size)]
        if self.swapped:
            head_rows = [*range(first), *range(middle, last), *range(first, middle), *range(last, size)]
            return [places[start + row] for start in range(0, rows, size) for row in head_rows]
        head_rows = [*range(first), *range(first, last, 2), *range(first + 1, last, 2), *range(last, size)]
        return [places[start + row] for start in range(0, rows, size) for row in head_rows]


COPIES = {"embed_tokens.weight": "embed.tokens.weight", "shared_head.head.weight": "head.out.weight"}
INDEXER_STEMS = ("attention.indexer.q", "attention.indexer.k", "attention.indexer.k_norm")  # with rotary rows
STACKED_SIGN = ".experts.gate_up_proj"
# Prefixes in a multimodal model (in memory in transformers 5, and in files), and in its text model on its own.
WRAPPED = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}


def list_tensors(
    model: Model, *, family: str, stacked: bool = False, interleaved: bool = True, copies: bool = False
) -> Iterator[TensorPart]:
    """Yield the tensors of a folder of ``family``, in module order, with biases of routing and tables of experts.

    ``stacked``: experts in one tensor per layer. ``interleaved``: rotary pairs of latent attention are interleaved, as
    in every published file (``rope_interleave``). ``copies``: also the copies of embedding and head in modules of
    multi-token prediction, which share them, if these are layers after the last one. Raises ``UserError`` for a family
    whose names are unknown.
    """
    if family not in FAMILIES:
        raise make_unknown_name_error(family, list(FAMILIES), kind="family of weights")
    record = FAMILIES[family]
    stacked_names = record.stacked_tensors if stacked else {}
    names, pre_names = (
        {**record.tensors, **record.block_tensors.get(block, {}), **stacked_names} for block in (model.block, "pre")
    )
    weight_by_name = {weight.name: weight for weight in list_weights(model)}
    rotates = model.position == "rope"
    reordered = record.interleaved_rotary or record.swapped_rotary
    if model.mla is not None:
        reordered = interleaved and record.interleaved_latent and rotates
    for weight in weight_by_name.values():
        is_pre = weight.name.startswith("blocks.") and model.get_block(get_layer(model, weight.name)) == "pre"
        of_layer = pre_names if is_pre else names
        of_block = record.layers_per_block
        if of_block > 1 and weight.name.startswith("blocks."):
            number, place = divmod(get_layer(model, weight.name), of_block)
            of_layer = {
                ours: theirs.replace("<n>", str(place)) if isinstance(theirs, str) else theirs
                for ours, theirs in of_layer.items()
            } | {"blocks": str(names["blocks"]).format(number)}
        if "gated norm2" in of_layer and weight.name.startswith("blocks."):
            gates = model.gates_norm(get_layer(model, weight.name), "norm2")
            of_layer = of_layer | {"norm2": of_layer["gated norm2" if gates else "norm2"]}
        if record.mtp_tensors and weight.name.startswith("head.mtp."):
            of_layer = _name_module(record.mtp_tensors, get_layer(model, weight.name) - model.layers)
        is_of_indexer = ".indexer." in weight.name
        is_reordered = record.indexer_rows != "ours" if is_of_indexer else reordered
        for part in _list_parts(weight, model, of_layer, weight_by_name, reordered=is_reordered, ones=record.ones):
            is_moved = is_of_indexer and record.indexer_rows == "last"
            yield part._replace(swapped=record.swapped_rotary, moved=is_moved)
    modules = range(model.layers, model.layers + model.mtp_depth)
    for layer in modules if copies and not record.mtp_tensors else ():
        for inner, ours in COPIES.items():
            weight = weight_by_name.get(ours, weight_by_name["embed.tokens.weight"])
            yield TensorPart(f"{str(names['blocks']).format(layer)}.{inner}", weight.shape, weight.name)
    for ours, shape in list_router_tensors(model).items():
        layer, kind = get_layer(model, ours), ours[ours.rindex("moe.") :]
        of_layer = names
        if record.mtp_tensors and layer >= model.layers:
            of_layer = _name_module(record.mtp_tensors, layer - model.layers)
        is_biased = model.moe is not None and model.moe.balance == "free" and not model.hashes_experts(layer)
        if kind in of_layer and (is_biased or kind == "moe.table"):
            block = str(of_layer["blocks"]).format(layer // record.layers_per_block)
            is_row = record.bias_is_row and kind == "moe.bias"
            stored_shape = (1, *shape) if is_row else shape
            yield TensorPart(f"{block}.{of_layer[kind]}", stored_shape, ours, dim=1 if is_row else 0)


def _name_module(names: Mapping[str, str], number: int) -> dict[str, str | FusedTensor]:
    """Return the names of the weights of a module of multi-token prediction, whose two layers are numbered."""
    return {
        ours: theirs.replace("<0>", str(2 * number)).replace("<1>", str(2 * number + 1))
        for ours, theirs in names.items()
    }


def unwrap_name(name: str) -> str:
    """Return the name that a tensor of a multimodal model has in its text model."""
    for wrapped, unwrapped in WRAPPED.items():
        if name.startswith(wrapped):
            return unwrapped + name.removeprefix(wrapped)
    return name


def list_constants(model: Model, *, family: str) -> dict[str, float | tuple[float, ...]]:
    """Return the numbers that a folder of ``family`` holds in addition to weights, by the names of their tensors."""
    record = FAMILIES[family]
    block = str(record.tensors["blocks"])
    return {
        f"{block.format(layer)}.{inner}": value
        for layer in range(model.layers)
        for inner, value in record.constants.items()
    }


def _list_parts(
    weight: Weight,
    model: Model,
    names: Names,
    every: Mapping[str, Weight],
    *,
    reordered: bool,
    ones: Mapping[str, tuple[int, ...]],
) -> Iterator[TensorPart]:
    """Yield the tensors that hold ``weight``: one, or one for each expert."""
    prefix, block, inner, layer = "", "", weight.name, 0
    if inner.startswith(("blocks.", "head.mtp.")):
        layer = get_layer(model, inner)
        block = f"{name_block(model, layer)}."
        prefix = f"{str(names['blocks']).format(layer)}."
        inner = inner.removeprefix(block)
        inner = re.sub(r"^head\.mtp\.\d+", "mtp", inner)
    stem, leaf = (inner, "") if inner in names else inner.rsplit(".", 1)
    place, leaf = names[stem], f".{leaf}" if leaf else ""
    if isinstance(place, FusedTensor):
        siblings = [every[f"{block}{name}{leaf}"] for name in place.weights]
        groups = _count_groups(place, model, layer=layer)
        head = _find_rotary_rows(stem, model, layer=layer) if reordered else None
        yield _make_fused_part(weight, siblings, place._replace(groups=groups), f"{prefix}{place.name}{leaf}")._replace(
            head=head
        )
    elif "{}" in place:
        for expert in range(weight.shape[0]):
            yield TensorPart(prefix + place.format(expert), weight.shape[1:], weight.name, expert)
    elif added := (1,) if weight.kind == "conv" else ones.get(stem, ()):
        shape = list(weight.shape)
        for dim in added:
            shape.insert(dim, 1)
        largest = shape.index(max(shape))
        yield TensorPart(
            f"{prefix}{place}{leaf}", tuple(shape), weight.name, ones=added, dim=0 if 0 not in added else largest
        )
    else:
        head = _find_rotary_rows(stem, model, layer=layer) if reordered else None
        yield TensorPart(
            f"{prefix}{place}{leaf}", weight.shape, weight.name, head=head, dim=_find_head_dim(stem, weight)
        )


def _count_groups(place: FusedTensor, model: Model, *, layer: int) -> int:
    """Return the number of groups of rows of a fused tensor of ``layer``."""
    net, shape = model.gated_delta_net, model.attention(layer)
    by_name = {"heads": shape.heads, "kv_heads": shape.kv_heads, "mixer_key_heads": net.key_heads if net else 1}
    return by_name[place.groups] if isinstance(place.groups, str) else place.groups


def _make_fused_part(weight: Weight, fused_weights: list[Weight], place: FusedTensor, name: str) -> TensorPart:
    """Return the part of ``weight`` in a tensor that holds all weights in ``fused_weights``."""
    shape = list(weight.shape)
    stacked = weight.kind.startswith("expert")
    dim = 1 if stacked else 0
    sizes = [sibling.shape[dim] for sibling in fused_weights]
    groups = int(place.groups) or sizes[0]
    index = [sibling.name for sibling in fused_weights].index(weight.name)
    shape[dim] = sum(sizes)
    if place.transposed and len(shape) > dim + 1:
        shape[-1], shape[-2] = shape[-2], shape[-1]
        dim += 1
    if place.flat:  # of one weight alone
        experts, rows, columns = shape
        flat = (experts * rows, columns)
        return TensorPart(name, flat, weight.name, transposed=place.transposed, experts=experts)
    return TensorPart(
        name,
        tuple(shape),
        weight.name,
        dim=dim,
        first=sum(sizes[:index]) // groups,
        rows=sizes[index],
        run=sizes[index] // groups,
        stride=sizes[index] if groups == 1 else sum(sizes) // groups,
        transposed=dim != int(stacked),
    )


def _find_head_dim(stem: str, weight: Weight) -> int:
    """Return the dim along which the rotary rows of a weight are."""
    return len(weight.shape) - 1 if stem.endswith("_norm") else 0


def _find_rotary_rows(stem: str, model: Model, *, layer: int) -> tuple[int, int, int] | None:
    """Return (rows per head, first rotary row, number of rotary rows) if a weight has rotary rows, else None."""
    shape = model.attention(layer)
    rotary = shape.rope_dim
    mla = model.get_latent(layer)
    if mla is None:
        return (shape.head_dim, 0, rotary) if stem.removesuffix("_norm") in ("attention.q", "attention.k") else None
    if mla.indexer is not None and stem in INDEXER_STEMS:
        return (mla.indexer.head_dim, 0, rotary)
    sizes = {
        "attention.q": mla.nope_dim,
        "attention.q_up": mla.nope_dim,
        "attention.kv_down": mla.kv_rank,
        "attention.key_norm": 0,
    }
    return (sizes[stem] + rotary, sizes[stem], rotary) if stem in sizes else None
