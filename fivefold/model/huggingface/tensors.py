"""Maps our weights to the tensors of a Hugging Face folder: names, shapes, experts, and order of rotary rows.

    blocks.3.moe.experts.gate [E, F, D] = E times model.layers.3.mlp.experts.0.gate_proj.weight [F, D]
                                or the upper half of model.layers.3.mlp.experts.gate_up_proj [E, 2F, D] (stacked)

Source: modelling code and ``conversion_mapping.py`` of transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.huggingface.family import Fused, Names
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, block_name, layer_of, weights
from fivefold.record import nearest


class Part(NamedTuple):
    """Where our weight ``ours``, or one expert of it, lies in a tensor of the folder: alone, or fused with others.

    Our rows lie along ``dim`` of the tensor from row ``first`` on: all in a row, or ``run`` of them every ``stride``.
    """

    name: str
    shape: tuple[int, ...]
    ours: str
    expert: int | None = None  # index of the expert
    dim: int = 0
    first: int = 0
    rows: int | None = None  # of our weight; None: as many as the tensor has
    run: int = 1
    stride: int = 1
    transposed: bool = False  # the last two dims change places
    head: tuple[int, int, int] | None = None  # (rows per head; the first, and how many, interleaved rotary pairs have)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def alone(self) -> bool:
        """Whether the tensor is our weight as it is."""
        return self.rows in (None, self.shape[self.dim]) and not self.transposed and self.head is None

    def order(self) -> Sequence[int]:
        """Index of the folder's row for each of our rows: fused ones lie apart, rotary pairs are interleaved there."""
        rows = self.shape[self.dim] if self.rows is None else self.rows
        if self.head is not None:
            size, first, turned = self.head
            last = first + turned
            one = [*range(first), *range(first, last, 2), *range(first + 1, last, 2), *range(last, size)]
            return [start + row for start in range(0, rows, size) for row in one]
        if self.run == self.stride:
            return range(self.first, self.first + rows)
        return [self.first + row // self.run * self.stride + row % self.run for row in range(rows)]


COPIES = {"embed_tokens.weight": "embed.tokens.weight", "shared_head.head.weight": "head.out.weight"}
STACKED_SIGN = ".experts.gate_up_proj"


def parts(
    model: Model, *, family: str, stacked: bool = False, interleaved: bool = True, copies: bool = False
) -> Iterator[Part]:
    """The tensors of a folder of ``family``, in module order, with the routing biases of experts.

    ``stacked``: experts in one tensor per layer. ``interleaved``: rotary pairs of latent attention are interleaved, as
    in every published file (``rope_interleave``). ``copies``: also those of embedding and head in modules of
    multi-token prediction, which share them. Raises ``Mistake`` for a family whose names are unknown.
    """
    if family not in FAMILIES:
        raise nearest(family, list(FAMILIES), kind="family of weights")
    record = FAMILIES[family]
    names = {
        **record.tensors,
        **record.block_tensors.get(model.block, {}),
        **(record.stacked_tensors if stacked else {}),
    }
    every = {weight.name: weight for weight in weights(model)}
    turned = interleaved if model.mla else record.interleaved_rotary
    for weight in every.values():
        yield from _parts_of(weight, model, names, every, interleaved=turned)
    for layer in range(model.layers, model.layers + model.predicted) if copies else ():
        for inner, ours in COPIES.items():
            weight = every.get(ours, every["embed.tokens.weight"])
            yield Part(f"{str(names['blocks']).format(layer)}.{inner}", weight.shape, weight.name)
    if model.moe is not None and "moe.bias" in names:
        for layer in filter(model.is_moe, range(model.layers + model.predicted)):
            theirs = f"{str(names['blocks']).format(layer)}.{names['moe.bias']}"
            yield Part(theirs, (model.moe.experts,), bias_name(model, layer))


def bias_name(model: Model, layer: int) -> str:
    """Our name of the routing bias of ``layer`` (numbered on in multi-token prediction), which is no listed weight."""
    return f"{block_name(model, layer)}.moe.bias"


def _parts_of(
    weight: Weight, model: Model, names: Names, every: Mapping[str, Weight], *, interleaved: bool
) -> Iterator[Part]:
    """The tensors that hold ``weight``: one, or one for each expert."""
    prefix, block, inner = "", "", weight.name
    if inner.startswith(("blocks.", "head.mtp.")):
        layer = layer_of(model, inner)
        block = f"{block_name(model, layer)}."
        prefix = f"{str(names['blocks']).format(layer)}."
        inner = inner.removeprefix(block)
        inner = re.sub(r"^head\.mtp\.\d+", "mtp", inner)
    stem, leaf = (inner, "") if inner in names else inner.rsplit(".", 1)
    place, leaf = names[stem], f".{leaf}" if leaf else ""
    if isinstance(place, Fused):
        beside = [every[f"{block}{name}{leaf}"] for name in place.weights]
        groups = model.kv_heads if place.groups == "kv_heads" else place.groups
        yield _fused(weight, beside, place._replace(groups=groups), f"{prefix}{place.name}{leaf}")
    elif "{}" in place:
        for expert in range(weight.shape[0]):
            yield Part(prefix + place.format(expert), weight.shape[1:], weight.name, expert)
    else:
        head = _rotary_rows(stem, model) if interleaved else None
        yield Part(f"{prefix}{place}{leaf}", weight.shape, weight.name, head=head, dim=_dim_of_heads(stem, weight))


def _fused(weight: Weight, beside: list[Weight], place: Fused, name: str) -> Part:
    """The part of ``weight`` in a tensor that holds all of ``beside``."""
    shape = list(weight.shape)
    stacked = weight.kind.startswith("expert")
    dim = 1 if stacked else 0
    sizes = [each.shape[dim] for each in beside]
    groups = int(place.groups) or sizes[0]
    at = [each.name for each in beside].index(weight.name)
    shape[dim] = sum(sizes)
    if place.transposed and len(shape) > dim + 1:
        shape[-1], shape[-2] = shape[-2], shape[-1]
        dim += 1
    return Part(
        name, tuple(shape), weight.name, dim=dim, first=sum(sizes[:at]) // groups, rows=sizes[at],
        run=sizes[at] // groups, stride=sizes[at] if groups == 1 else sum(sizes) // groups,
        transposed=dim != int(stacked),
    )  # fmt: skip


def _dim_of_heads(stem: str, weight: Weight) -> int:
    """The dim of a weight with rotary rows along which these lie."""
    return len(weight.shape) - 1 if stem.endswith("_norm") else 0


def _rotary_rows(stem: str, model: Model) -> tuple[int, int, int] | None:
    """(Rows per head, the first of its rotary rows, how many) if a weight has rotary rows; else None."""
    turned = model.rope_dim
    if model.mla is None:
        return (model.head_dim, 0, turned) if stem.removesuffix("_norm") in ("attention.q", "attention.k") else None
    sizes = {
        "attention.q": model.mla.nope_dim,
        "attention.q_up": model.mla.nope_dim,
        "attention.kv_down": model.mla.kv_rank,
    }
    return (sizes[stem] + turned, sizes[stem], turned) if stem in sizes else None
