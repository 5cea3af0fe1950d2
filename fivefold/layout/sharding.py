"""What lies where: which weights travel together, how ZeRO cuts them, and what each ZeRO stage keeps.

ZeRO cuts every weight along dim 0 into as many equal chunks of rows as there are shards; the last may be short or
empty and are padded in messages. Weights travel in *units*: the embedding, each block, the head with its norm.
Source: ZeRO, arXiv:1910.02054. The planner counts bytes from here and the engine places tensors by it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, block_weights, embedding_weights, head_weights
from fivefold.units import ceil_div


class Unit(NamedTuple):
    """Weights that are gathered and reduced in one message. ``weights`` carry their full names."""

    name: str
    weights: tuple[Weight, ...]


def units(model: Model) -> list[Unit]:
    """The units of the whole model in the order of the forward pass."""
    blocks = [
        Unit(f"blocks.{i}", tuple(w._replace(name=f"blocks.{i}.{w.name}") for w in block_weights(model, i)))
        for i in range(model.layers)
    ]
    embedding = Unit("embed", tuple(embedding_weights(model)))
    return [embedding, *blocks, Unit("head", tuple(head_weights(model)))]


class Policy(NamedTuple):
    """A ZeRO stage as data: what one unit keeps between its uses."""

    weights_stay: bool  # gathered weights outlive the unit's forward and backward
    gradients_stay: bool  # whole gradients outlive their reduction, up to the update


# stage: weights whole from step to step, or only while their unit computes; gradients whole until the update, or
# only until their unit is reduced. From stage 1 on the optimizer's states are cut.
POLICIES = {0: Policy(True, True), 1: Policy(True, True), 2: Policy(True, False), 3: Policy(False, False)}


def policy(layout: Layout) -> Policy:
    """The policy of the layout's ZeRO stage; one shard alone has nothing to let go of."""
    return POLICIES[layout.zero if layout.shards > 1 else 0]


def chunk_rows(rows: int, *, shards: int) -> int:
    """Rows of one shard of dim 0, padding included."""
    return ceil_div(rows, shards)


def local_weight(weight: Weight, *, model: Model, layout: Layout, vocab: int) -> Weight:
    """The part of a weight that one rank of tp, ep and etp holds, before ZeRO cuts it. ``vocab``: padded.

    column and vocabulary: rows over tp (kv heads fewer than tp: copies) · row: columns over tp · experts over ep, their
    feed-forward over etp · norms, router, latent down-projections and the biases of row layers: whole everywhere
    """
    name, shape, tp = weight.name, weight.shape, layout.tp
    if weight.kind.startswith("expert"):
        held = ceil_div(shape[0], layout.ep)
        if weight.kind == "expert_column":
            return weight._replace(shape=(held, shape[1] // layout.etp, *shape[2:]))
        return weight._replace(shape=(held, *shape[1:-1], shape[-1] // (layout.etp if len(shape) == 3 else 1)))
    if name.startswith(("embed.tokens", "head.out")):
        return weight._replace(shape=(vocab // tp, *shape[1:]))
    if weight.kind == "row":
        return weight._replace(shape=(shape[0], shape[1] // tp))
    wide_norm = model.qk_norm == "full" and name.endswith(("attention.q_norm.weight", "attention.k_norm.weight"))
    cut = weight.kind in ("column", "vector", "bias") and not any(part in name for part in WHOLE)
    if cut or wide_norm:
        if tp > model.kv_heads and any(part in name for part in ("attention.k.", "attention.v.", "k_norm")):
            return weight._replace(shape=(shape[0] // model.kv_heads, *shape[1:]))
        return weight._replace(shape=(shape[0] // tp, *shape[1:]))
    return weight


WHOLE = (
    "q_down",
    "kv_down",
    "attention.out.bias",
    "down.bias",
    "embed.positions",
)  # biases of row layers are added once


def extra_reduce_axis(weight: Weight, *, model: Model, layout: Layout) -> Literal["", "tp", "kv"]:
    """Whose gradients of a weight must be added up beside data parallelism's, since each has seen a part of its use.

    tp: all tensor ranks hold the weight, but under sequence parallelism each sees only its rows, and of norms over
    single heads always only its heads · kv: as many tensor ranks as hold the same key head, each with other queries
    """
    if layout.tp == 1 or weight.kind.startswith("expert"):
        return ""
    full = model.qk_norm == "full"
    key = weight.name.endswith(KEYS) or (full and "attention.k_norm" in weight.name)
    if model.mla is None and key and layout.tp > model.kv_heads:
        return "kv"
    if model.mla is None and weight.name.endswith(HEAD_NORMS):
        return "" if full else "tp"
    whole = weight.kind in ("norm", "router") or any(part in weight.name for part in WHOLE)
    return "tp" if whole and layout.sp else ""


KEYS = tuple(f"attention.{part}.{each}" for part in "kv" for each in ("weight", "bias"))
HEAD_NORMS = tuple(f"attention.{part}_norm.{each}" for part in "qk" for each in ("weight", "bias"))


def shard_numel(weight: Weight, *, shards: int) -> int:
    """Elements of the first rank's shard, which is the largest; with padding, of every rank's.

    Experts are cut along their rows too, not between experts alone.
    """
    rows = weight.shape[0] * (weight.shape[1] if len(weight.shape) == 3 else 1)
    return chunk_rows(rows, shards=shards) * (weight.numel // rows)


def multiplies(weight: Weight) -> bool:
    """Whether rows are multiplied by it in a block, in whatever the recipe computes: no router, no bias."""
    return weight.kind in ("column", "row", "expert_column", "expert_row") and not weight.name.endswith("_bias")


def padded_numel(unit: Unit, *, shards: int) -> int:
    """Elements of a unit as it travels: ``shards`` equal chunks of every weight."""
    return sum(shard_numel(weight, shards=shards) for weight in unit.weights) * shards
