"""Sharding rules: how tp, ep and etp shard each weight, how ZeRO shards the rest, and what each ZeRO stage keeps.

ZeRO splits every weight along dim 0 into equal chunks of rows, one per shard; the last may be short or empty and are
padded in messages. Weights are gathered in *units*: the embedding, each block, the head with its norm.
Source: ZeRO, arXiv:1910.02054. The planner counts bytes from here and the engine places tensors by it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weights import Weight, block_weights, embedding_weights, head_weights
from fivefold.units import ceil_div


class Unit(NamedTuple):
    """Weights gathered and reduced in one message, as in FSDP. ``weights`` have their full names."""

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
    """A ZeRO stage as data: what a unit keeps between its uses."""

    weights_stay: bool  # gathered weights are kept after the unit's forward and backward
    gradients_stay: bool  # unreduced gradients are kept after the reduce, until the update


# by stage: weights stay gathered from step to step, or only while their unit computes; full gradients stay until the
# update, or only until their unit is reduced. From stage 1 on the optimizer's states are sharded.
POLICIES = {0: Policy(True, True), 1: Policy(True, True), 2: Policy(True, False), 3: Policy(False, False)}


def policy(layout: Layout, job: Job) -> Policy:
    """The policy of the layout's ZeRO stage; with one shard, that of stage 0; of stage 3, where stage 2 keeps no more
    than shards from step to step.
    """
    once = layout.zero == 2 and layout.pp == 1 and job.stack.shards == "beside"
    return POLICIES[(3 if once else layout.zero) if layout.shards > 1 else 0]


def reduces_each(layout: Layout, job: Job) -> bool:
    """Whether gradients go to their shards after the backward of every one of several micro-batches, not once a step.
    Under ZeRO-0 and -1 whole ones stay until the update anyway.
    """
    often = job.stack.reduce == "micro_batch" or (job.stack.reduce == "unpipelined" and layout.pp == 1)
    return often and layout.micro_batches(job) > 1 and not policy(layout, job).gradients_stay


def regathers(layout: Layout, job: Job) -> bool:
    """Whether gathered weights are let go after a forward, and gathered again for its backward."""
    return not policy(layout, job).weights_stay and layout.zero == 3 and job.stack.reshard == "forward"


def joins_ends(layout: Layout, job: Job) -> bool:
    """Whether embedding and head are one unit, gathered and reduced in one message."""
    return job.stack.gathers_again == "root" and layout.pp == 1


def gathers_again(name: object, layout: Layout, job: Job) -> bool:
    """Whether the weights of a unit are gathered again for its backward: not the head's, which are still gathered, and
    the embedding's, which it does not need, where the stack gathers all.
    """
    embedding = job.stack.gathers_again != "needed" and not joins_ends(layout, job)
    return name != "head" and (name != "embed" or embedding) and regathers(layout, job)


def chunk_rows(rows: int, *, shards: int) -> int:
    """Rows of one ZeRO shard, with padding."""
    return ceil_div(rows, shards)


def local_weight(weight: Weight, *, model: Model, layout: Layout, vocab: int) -> Weight:
    """The shape of a weight on one rank of tp, ep and etp, before ZeRO. ``vocab``: padded vocabulary size.

    column and vocabulary: rows over tp (fewer kv heads than tp: copies) · row: columns over tp · experts over ep, their
    ffn dim over etp · norms, router, latent down-projections, the projection of multi-token prediction and the biases
    of row layers: replicated
    """
    name, shape, tp = weight.name, weight.shape, layout.tp
    if layout.tp_inner > 1:
        return weight._replace(shape=_in_two(weight, layout, vocab=vocab, heads=model.kv_heads))
    if weight.kind.startswith("expert"):
        held = ceil_div(shape[0], layout.ep)
        if weight.kind == "expert_column":
            return weight._replace(shape=(held, shape[1] // layout.etp, *shape[2:]))
        return weight._replace(shape=(held, *shape[1:-1], shape[-1] // (layout.etp if len(shape) == 3 else 1)))
    if name.startswith(("embed.tokens", "head.out")):
        return weight._replace(shape=(vocab // tp, *shape[1:]))
    if weight.kind == "row":
        return weight._replace(shape=(shape[0], shape[1] // tp))
    wide_norm = model.qk_norm in ("full", "heads") and name.endswith(HEAD_NORMS) and model.mla is None
    cut = weight.kind in ("column", "vector", "bias") and not any(part in name for part in WHOLE)
    if cut or wide_norm:
        if tp > model.kv_heads and any(part in name for part in ("attention.k.", "attention.v.", "k_norm")):
            return weight._replace(shape=(shape[0] // model.kv_heads, *shape[1:]))
        return weight._replace(shape=(shape[0] // tp, *shape[1:]))
    return weight


def _in_two(weight: Weight, layout: Layout, *, vocab: int, heads: int) -> tuple[int, ...]:
    """The shape of a dense weight under tp = x·y: what column layers make and row layers read over x, the width of the
    stream over y (2D weight-stationary: arXiv:2211.05102 §3.2.2). ``heads``: of keys.
    """
    x, y, (first, *rest) = layout.tp // layout.tp_inner, layout.tp_inner, weight.shape
    if weight.name.startswith(("embed.tokens", "head.out.weight")):
        return (vocab // x, rest[0] // y)
    if weight.name.startswith("head.out"):
        return (vocab // layout.tp,)
    if weight.kind == "row":
        return (first // y, rest[0] // x)
    if weight.name.endswith(HEAD_NORMS):
        return weight.shape
    if weight.kind == "column" and rest:
        return (first // x, rest[0] // y)
    if weight.kind == "norm" or any(part in weight.name for part in WHOLE):
        return (*weight.shape[:-1], weight.shape[-1] // y)
    copied = layout.tp > heads and weight.name.endswith(KEYS)  # the inner ranks have one key head together
    return (first // (x if copied else layout.tp),)


WHOLE = (
    "q_down",
    "kv_down",
    "attention.out.bias",
    "down.bias",
    "embed.positions",
    "project",
)  # biases of row layers are added once


def extra_reduce_axis(weight: Weight, *, model: Model, layout: Layout) -> Literal["", "tp", "kv", "tp_outer"]:
    """The axis over which gradients of a replicated weight must be all_reduced beside data parallelism; "": none.

    tp: every tp rank holds the weight, but sees only its own rows (under sp) or, for norms of single heads, its own
    heads · kv: the tp ranks that hold the same kv head see different queries
    """
    if layout.tp == 1 or weight.kind.startswith("expert"):
        return ""
    if layout.tp_inner > 1:
        if weight.name.endswith(HEAD_NORMS):
            return "tp"
        return "tp_outer" if weight.kind == "norm" or any(part in weight.name for part in WHOLE) else ""
    full = model.qk_norm in ("full", "heads")
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
    """Elements of one ZeRO shard, with padding: those of the first rank, the largest.

    Stacked experts are split by rows, also within one expert.
    """
    rows = weight.shape[0] * (weight.shape[1] if len(weight.shape) == 3 else 1)
    return chunk_rows(rows, shards=shards) * (weight.numel // rows)


def multiplies(weight: Weight) -> bool:
    """Whether the weight is the matrix of a GEMM in a block, which recipes may run in fp8: no router, no bias."""
    return weight.kind in ("column", "row", "expert_column", "expert_row") and not weight.name.endswith("_bias")


def padded_numel(unit: Unit, *, shards: int) -> int:
    """Elements of a gathered unit, with padding: ``shards`` equal chunks of every weight."""
    return sum(shard_numel(weight, shards=shards) for weight in unit.weights) * shards
