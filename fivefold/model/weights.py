"""List every weight of a model by name and shape; counting, sharding and training all use this list.

Linear weights are ``(out, in)`` as in ``torch.nn.Linear``; the weights of all experts of a layer are one tensor
with the expert dim first. Names follow the module tree of ``trainer/model/transformer.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from fivefold.adapter import EMBEDDING, HEAD, MERGED_LINEARS, TARGET_NAMES, Adapter
from fivefold.errors import UserError
from fivefold.freeze import FrozenPart, is_frozen, parse_part
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.adapted import has_adapter, map_linears, resolve_linear
from fivefold.model.attention import AttentionShape
from fivefold.model.norms import NORMS
from fivefold.model.shape import ModelShape
from fivefold.model.weight import EXPERT_FACTORS, MAGNITUDE, Kind, Weight

__all__ = [
    "FrozenWeights",
    "Weight",
    "compute_norm_shape",
    "count",
    "count_adapters",
    "find_first_adapted",
    "get_layer",
    "list_adapter_weights",
    "list_block_weights",
    "list_embedding_factors",
    "list_embedding_weights",
    "list_head_factors",
    "list_head_weights",
    "list_targets",
    "list_trained_weights",
    "list_weights",
    "mark_frozen",
    "name_adapted",
    "name_block",
    "resolve_freeze",
    "strip_block",
    "with_adapters",
]


def list_weights(model: ModelShape, adapter: Adapter | None = None) -> Iterator[Weight]:
    """Yield all weights in module order: embedding, blocks, final norm, head; with the weights of ``adapter``."""
    yield from list_embedding_weights(model)
    yield from list_embedding_factors(model, adapter)
    for layer in range(model.layers):
        block = list_block_weights(model, layer)
        for weight in block if adapter is None else with_adapters(model, block, adapter):
            yield weight._replace(name=f"blocks.{layer}.{weight.name}")
    yield from list_head_weights(model)
    yield from list_head_factors(model, adapter)


def list_embedding_weights(model: ModelShape) -> Iterator[Weight]:
    """Yield the token embedding, the position embedding if positions are learned, and the norm of their sum."""
    yield Weight("embed.tokens.weight", (model.vocab, model.width), "embedding")
    if model.position == "learned":
        yield Weight("embed.positions.weight", (model.positions + model.position_offset, model.width), "embedding")
    if model.embedding_norm == "weighted":
        yield from _list_norm(model, "embed.norm", model.width)
    if model.per_layer_inputs is not None:
        yield from model.per_layer_inputs.embedding_weights(model.layers, model.width)
        yield from _list_norm(model, "embed.per_layer_norm", model.per_layer_inputs.width)
    if model.altup is not None:
        yield from model.altup.projections("embed.altup", model.width)


def list_head_weights(model: ModelShape) -> Iterator[Weight]:
    """Yield the final norm, the head's transform, the head unless it is tied, and multi-token prediction."""
    if model.hyper_connections is not None:
        yield from model.hyper_connections.head_weights("head.hyper", model.width)
    if model.altup is not None:
        yield from model.altup.projections("head.altup", model.width)
    if model.final_norm:
        yield from _list_norm(model, "head.norm", model.width)
    if model.head_transform is not None:
        yield Weight("head.transform.weight", (model.width, model.width), "router")
        if model.head_transform_bias:
            yield Weight("head.transform.bias", (model.width,), "router")
        yield from _list_norm(model, "head.transform_norm", model.width)
    if not model.tied_embeddings:
        yield Weight("head.out.weight", (model.vocab, model.width), "head")
    if model.head_bias:
        yield Weight("head.out.bias", (model.vocab,), "bias")
    for index in range(model.mtp_depth):
        yield from _list_mtp(model, f"head.mtp.{index}", layer=model.layers + index)


def name_block(model: ModelShape, layer: int) -> str:
    """Return the name of the module of a block; blocks of multi-token prediction have numbers after the last layer."""
    return f"blocks.{layer}" if layer < model.layers else f"head.mtp.{layer - model.layers}.block"


def get_layer(model: ModelShape, name: str) -> int:
    """Return the layer of a weight of a block, numbered as in ``name_block``."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blocks" else model.layers + int(parts[2])


def list_router_tensors(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what routers hold and no step trains, by name; layers of MTP come last.

    Each has a bias [E] of the scores by which experts are chosen. Hash layers have a table [V, k] of the experts of
    each token id, too.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in filter(model.is_moe, range(model.layers + model.mtp_depth)):
        assert model.moe is not None
        shapes[f"{name_block(model, layer)}.moe.bias"] = (model.moe.choices,)
        if model.hashes_experts(layer):
            shapes[f"{name_block(model, layer)}.moe.table"] = (model.vocab, model.moe.topk)
    return shapes


def _list_mtp(model: ModelShape, name: str, *, layer: int) -> Iterator[Weight]:
    """Yield a module of multi-token prediction: norms of embedding and hidden state, projection, block, norm."""
    yield from _list_norm(model, f"{name}.embed_norm", model.width)
    yield from _list_norm(model, f"{name}.hidden_norm", model.width)
    yield from _list_linear(f"{name}.project", model.width, 2 * model.width, "column", bias=False)
    for weight in list_block_weights(model, layer):
        yield weight._replace(name=f"{name}.block.{weight.name}")
    yield from _list_norm(model, f"{name}.norm", model.width)


def list_block_weights(model: ModelShape, layer: int) -> Iterator[Weight]:
    """Yield the weights of one block, with names relative to the block."""
    unquantized = model.list_unquantized(layer)
    if not unquantized:
        yield from _list_block_weights(model, layer)
        return
    for weight in _list_block_weights(model, layer):
        yield weight._replace(unquantized_in=model.quantization) if weight.module in unquantized else weight


def _list_block_weights(model: ModelShape, layer: int) -> Iterator[Weight]:
    """Yield the weights of one block as if the repository stored all of them in one format."""
    hyper = model.hyper_connections
    if model.mixer_name(layer) != "none":
        if hyper is not None:
            yield from hyper.weights("hyper1", model.width)
        if model.has_norm1(layer):
            yield from _list_norm(model, "norm1", model.width)
            yield from _list_norm_gate(model, "norm1", layer)
        mixer = model.mixer(layer)
        if mixer is not None:
            yield from mixer.weights(model.width)
        else:
            yield from _list_mla(model, layer) if model.mla else _list_attention(model, layer)
            if model.joins_mamba2 and model.mamba2 is not None:
                yield from model.mamba2.weights(model.width)
        if model.get_block(layer) == "sandwich":
            yield from _list_norm(model, "norm1_post", model.width)
        if model.residual_weights:
            yield Weight("stream1", (model.width,), "router", initial="ones")
    if not model.has_feed_forward(layer):
        return
    if hyper is not None:
        yield from hyper.weights("hyper2", model.width)
    if model.get_block(layer) != "parallel_shared":
        yield from _list_norm(model, "norm2", model.width)
        yield from _list_norm_gate(model, "norm2", layer)
    if model.is_moe(layer):
        yield from _list_experts(model)
    if model.has_mlp(layer):
        yield from _list_mlp(model, "mlp", model.get_ffn(layer))
    if model.norms_feed_forward(layer):
        yield from _list_norm(model, "norm2_post", model.width)
    if model.residual_weights:
        yield Weight("stream2", (model.width,), "router", initial="ones")
    if model.per_layer_inputs is not None:
        yield from model.per_layer_inputs.block_weights(model.width)
        yield from _list_norm(model, "per_layer.norm", model.width)
    if model.altup is not None:
        yield from model.altup.block_weights(model.width)
        yield from _list_norm(model, "altup.norm", model.width)
    if model.laurel_rank is not None:
        yield Weight("laurel.left.weight", (model.laurel_rank, model.width), "router")
        yield Weight("laurel.right.weight", (model.width, model.laurel_rank), "router")
        yield from _list_norm(model, "laurel.norm", model.width)


def with_adapters(
    model: ModelShape, block: Iterable[Weight], adapter: Adapter, *, merged: bool = False
) -> Iterator[Weight]:
    """Yield the weights of a block, and after each matrix that the adapter targets its factors A and B.

    Tensor parallelism shards A like the input of its linear layer and B like the output, and replicates the other.
    The magnitudes of DoRA follow; they are sharded like B. Factors of routed experts are stacked, as their matrices.
    The first of several layers that are one in transformers has the factor A of all (``adapted.py``).

    ``merged``: layers that are one matmul have one pair of factors (``Stack.merged_adapters``).
    """
    if merged:
        yield from _with_merged_adapters(model, list(block), adapter)
        return
    for weight in block:
        yield weight
        if weight.kind.startswith("expert") and has_adapter(model, adapter, weight.name):
            yield from _list_expert_factors(model, weight, adapter)
            continue
        linear, _, leaf = weight.name.rpartition(".")
        if leaf != "weight" or weight.kind not in ("column", "row") or not has_adapter(model, adapter, linear):
            continue
        (out_features, in_features), column = weight.shape, weight.kind == "column"
        rank = resolve_linear(model, adapter, linear).rank
        if map_linears(model)[linear].leader == linear:
            yield Weight(f"{linear}.lora_a", (rank, in_features), "lora" if column else "row")
        kind: Kind = "column" if column else "lora"
        yield Weight(f"{linear}.lora_b", (out_features, rank), kind, parts=weight.parts)
        if adapter.has_magnitudes:
            yield Weight(f"{linear}{MAGNITUDE}", (out_features,), kind, parts=weight.parts)


def _with_merged_adapters(model: ModelShape, block: list[Weight], adapter: Adapter) -> Iterator[Weight]:
    """Yield the weights of a block, and after the last matrix of each matmul that is adapted its factors.

    Tensor parallelism shards A by rank or, in row-parallel layers, by input, and B by output
    (NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/peft/utils.py, ParallelLinearAdapter).
    """
    matrices = {
        weight.name.removesuffix(".weight"): weight
        for weight in block
        if weight.kind in ("column", "row") and weight.name.endswith(".weight")
    }
    products = {linear: [linear] for linear in matrices}
    for product, linears in MERGED_LINEARS.items():
        if linears[0] in matrices and linears[1] in matrices:
            parts = [linear for linear in linears if linear in matrices]
            products = {name: parts for name, parts in products.items() if name not in linears} | {product: parts}
    adapted = {
        parts[-1]: (product, parts) for product, parts in products.items() if has_adapter(model, adapter, product)
    }
    for weight in block:
        yield weight
        linear = weight.name.removesuffix(".weight")
        if linear == weight.name or linear not in adapted:
            continue
        product, parts = adapted[linear]
        rank = resolve_linear(model, adapter, product).rank
        outputs = sum(matrices[part].shape[0] for part in parts)
        yield Weight(f"{product}.lora_a", (rank, weight.shape[1]), weight.kind)
        yield Weight(f"{product}.lora_b", (outputs, rank), "column")


def _list_expert_factors(model: ModelShape, weight: Weight, adapter: Adapter) -> Iterator[Weight]:
    """Yield the factors of stacked experts [E, out, in]: A [E, rank, in] and B [E, out, rank]; gate and up share A."""
    experts, out_features, in_features = weight.shape
    rank = resolve_linear(model, adapter, weight.name).rank
    name = weight.name.rpartition(".")[2]
    if name != "up":
        shared = "gate_up" if name == "gate" else name
        yield Weight(f"moe.experts.{shared}_lora_a", (experts, rank, in_features), weight.kind)
    yield Weight(f"moe.experts.{name}_lora_b", (experts, out_features, rank), "expert_column")


def list_embedding_factors(model: ModelShape, adapter: Adapter | None) -> Iterator[Weight]:
    """Yield the factors of the token embedding, if it has an adapter: A has a column for each token."""
    if adapter is not None and adapter.has_target(EMBEDDING):
        rank = adapter.resolve_target(EMBEDDING).rank
        yield Weight("embed.tokens.lora_a", (rank, model.vocab), "lora")
        yield Weight("embed.tokens.lora_b", (model.width, rank), "lora")


def list_head_factors(model: ModelShape, adapter: Adapter | None) -> Iterator[Weight]:
    """Yield the factors of the output projection, if it has an adapter, also next to a tied table."""
    if adapter is not None and adapter.has_target(HEAD):
        rank = adapter.resolve_target(HEAD).rank
        yield Weight("head.out.lora_a", (rank, model.width), "lora")
        yield Weight("head.out.lora_b", (model.vocab, rank), "column")
        if adapter.has_magnitudes:
            yield Weight(f"head.out{MAGNITUDE}", (model.vocab,), "column")


def _list_block_factors(model: ModelShape, layer: int, adapter: Adapter, *, merged: bool = False) -> Iterator[Weight]:
    for weight in with_adapters(model, list_block_weights(model, layer), adapter, merged=merged):
        if weight.is_adapter:
            yield weight


@lru_cache(maxsize=256)
def find_first_adapted(model: ModelShape, adapter: Adapter) -> int:
    """Return the lowest layer with an adapter, below which nothing has a backward; the number of layers, if none."""
    adapted = (layer for layer in range(model.layers) if any(_list_block_factors(model, layer, adapter)))
    return next(adapted, model.layers)


def list_adapter_weights(model: ModelShape, adapter: Adapter, *, merged: bool = False) -> Iterator[Weight]:
    """Yield the weights of all adapters of a model; ``merged``: as in ``with_adapters``."""
    yield from list_embedding_factors(model, adapter)
    for layer in range(model.layers):
        for weight in _list_block_factors(model, layer, adapter, merged=merged):
            yield weight._replace(name=f"blocks.{layer}.{weight.name}")
    yield from list_head_factors(model, adapter)


@lru_cache(maxsize=64)
def list_targets(model: ModelShape, adapter: Adapter) -> tuple[str, ...]:
    """Return the names of the linear layers that the adapter has in ``model``, each once."""
    adapted = {strip_block(name_adapted(weight.name)) for weight in list_adapter_weights(model, adapter)}
    linears = map_linears(model)
    targets = {linears[linear].target for linear in adapted}
    return tuple(target for target in TARGET_NAMES if target in targets)


def name_adapted(name: str) -> str:
    """Return the layer of a factor: ``blocks.0.attention.q``; ``blocks.0.moe.experts.gate`` for that of gate and up."""
    if name.endswith(EXPERT_FACTORS):
        layer, _, _ = name.rpartition("_lora_")
        return layer.removesuffix("_up") if layer.endswith("gate_up") else layer
    return name.rpartition(".")[0]


def strip_block(name: str) -> str:
    """Return a name within its block: ``attention.q`` of ``blocks.0.attention.q``, ``head.out`` of ``head.out``."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def list_trained_weights(model: ModelShape, adapter: Adapter, *, merged: bool = False) -> Iterator[Weight]:
    """Yield the weights that are trained with an adapter: its own, and those of modules that are trained in full."""
    yield from (weight for weight in list_embedding_weights(model) if adapter.is_saved(weight.name))
    yield from list_adapter_weights(model, adapter, merged=merged)
    yield from (weight for weight in list_head_weights(model) if adapter.is_saved(weight.name))


def count_adapters(model: ModelShape, adapter: Adapter, *, merged: bool = False) -> int:
    """Count the parameters that are trained with an adapter; ``merged``: as in ``with_adapters``."""
    return sum(weight.numel for weight in list_trained_weights(model, adapter, merged=merged))


class FrozenWeights(NamedTuple):
    """The frozen parts of a model (``Job.freeze``): modules of its ends, and of each block.

    ``first_backward``: the lowest layer with a backward, which is the first with a trained weight, or 0 if the
    embedding is trained; ``trains_embedding``, ``trains_head``: whether these have trained weights.
    """

    ends: frozenset[str]
    blocks: tuple[frozenset[str], ...]
    first_backward: int
    trains_embedding: bool
    trains_head: bool


@lru_cache(maxsize=256)
def resolve_freeze(model: ModelShape, freeze: tuple[str, ...]) -> FrozenWeights:
    """Return the frozen parts of ``model``; raise ``UserError`` for one that it does not have."""
    blocks, ends = [set[str]() for _ in range(model.layers)], set[str]()
    for text in freeze:
        part = parse_part(text)
        if part.layers is None:
            ends.add(part.module)
        for layer in range(model.layers)[part.layers] if part.layers is not None else ():
            blocks[layer].add(part.module)
        if not any(_match_part(model, part)):
            raise UserError(
                f"freeze: {text} is not a part of {model.name}, which has {model.layers} layers; leave it out"
            )
    if model.tied_embeddings and "lm_head" in ends and "embed_tokens" not in ends:
        raise UserError(f"freeze: lm_head of {model.name} is its embedding; write embed_tokens")
    if model.tied_embeddings and "embed_tokens" in ends:
        ends.add("lm_head")
    frozen_blocks, frozen_ends = tuple(map(frozenset, blocks)), frozenset(ends)
    trained = [
        layer
        for layer, modules in enumerate(frozen_blocks)
        if any(not weight.frozen for weight in mark_frozen(list_block_weights(model, layer), modules))
    ]
    trains_embedding, trains_head = (
        any(not weight.frozen for weight in mark_frozen(end, frozen_ends))
        for end in (list_embedding_weights(model), list_head_weights(model))
    )
    first = 0 if trains_embedding else next(iter(trained), model.layers)
    return FrozenWeights(frozen_ends, frozen_blocks, first, trains_embedding, trains_head)


def _match_part(model: ModelShape, part: FrozenPart) -> Iterator[bool]:
    """Yield, for each weight in the layers of ``part``, whether it is of the part's module; nothing without layers."""
    modules = frozenset({part.module})
    if part.layers is None:
        yield part.module == "lm_head" and model.tied_embeddings
        yield from (
            weight.frozen
            for weight in mark_frozen((*list_embedding_weights(model), *list_head_weights(model)), modules)
        )
        return
    for layer in range(model.layers)[part.layers]:
        yield from (weight.frozen for weight in mark_frozen(list_block_weights(model, layer), modules))


def mark_frozen(weights: Iterable[Weight], modules: frozenset[str]) -> Iterator[Weight]:
    """Yield weights, of which those of ``modules`` are frozen; the names of a block's are relative to it."""
    for weight in weights:
        yield weight._replace(frozen=is_frozen(weight.name, modules))


def compute_norm_shape(model: ModelShape, heads: int, dim: int) -> tuple[int, ...] | None:
    """Return the shape of the norm weight of ``heads`` query or key heads of ``dim``; None: they have none."""
    return {"head": (dim,), "heads": (heads, dim), "full": (heads * dim,)}.get(model.qk_norm)


def _list_norm(model: ModelShape, name: str, *shape: int) -> Iterator[Weight]:
    if not model.norm_weight:
        return
    yield Weight(f"{name}.weight", shape, "norm")
    if NORMS[model.norm].has_bias and model.norm_bias:
        yield Weight(f"{name}.bias", shape, "norm")


def _list_norm_gate(model: ModelShape, name: Literal["norm1", "norm2"], layer: int) -> Iterator[Weight]:
    if model.norm_gate_rank is not None and model.gates_norm(layer, name):
        yield Weight(f"{name}_gate.down.weight", (model.norm_gate_rank, model.width), "router")
        yield Weight(f"{name}_gate.up.weight", (model.width, model.norm_gate_rank), "router")


def _list_linear(
    name: str, out_features: int, in_features: int, kind: Literal["column", "row"], *, bias: bool
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (out_features, in_features), kind)
    if bias:
        yield Weight(f"{name}.bias", (out_features,), "bias")


def _list_attention(model: ModelShape, layer: int) -> Iterator[Weight]:
    """Yield the weights of grouped attention in ``layer``."""
    shape = model.attention(layer)
    if model.attention_experts and model.moe is not None:
        experts, size = model.moe.experts, shape.kv_heads * shape.head_dim
        yield Weight("attention.routing.router.weight", (experts, model.width), "router")
        yield Weight("attention.experts.q", (experts, size, model.width), "router")
        yield Weight("attention.experts.out", (experts, model.width, size), "router")
        for name in "kv":
            yield from _list_linear(f"attention.{name}", size, model.width, "column", bias=False)
        if model.out_bias:
            yield Weight("attention.bias_out", (model.width,), "bias")
        return
    dims, shares_kv = {"q": shape.query_dims}, model.shares_kv(layer)
    if not shares_kv:
        dims["k"] = shape.kv_heads * shape.head_dim
    if not shares_kv and not shape.tied_values:
        dims["v"] = shape.kv_heads * shape.value_dim
    for name, size in dims.items():
        yield from _list_linear(f"attention.{name}", size, model.width, "column", bias=model.qkv_bias)
    for name, heads in (("q", shape.heads),) if shares_kv else (("q", shape.heads), ("k", shape.kv_heads)):
        if (of_norm := compute_norm_shape(model, heads, shape.head_dim)) is not None:
            yield from _list_norm(model, f"attention.{name}_norm", *of_norm)
    if model.output_gate:
        yield from _list_linear(
            "attention.gate", model.count_gate_columns(shape), model.width, "column", bias=model.qkv_bias
        )
        if model.gate_bias:
            yield Weight("attention.gate_bias", (shape.heads,), "vector")
    if model.dynamic_mask is not None:
        yield Weight("attention.mask.a", (shape.kv_heads,), "router")
        yield Weight("attention.mask.weight", (shape.kv_heads, shape.kv_heads * shape.value_dim), "router")
        if model.qkv_bias:
            yield Weight("attention.mask.bias", (shape.kv_heads,), "router")
    yield from _list_sinks(shape)
    if model.differential:
        for name in ("q1", "k1", "q2", "k2"):
            yield Weight(f"attention.lambda_{name}", (shape.head_dim,), "router")
    if model.sub_norm:
        yield from _list_norm(model, "attention.out_norm", shape.output_dims)
    yield from _list_linear("attention.out", model.width, shape.output_dims, "row", bias=model.has_out_bias(layer))


def _list_mla(model: ModelShape, layer: int) -> Iterator[Weight]:
    """Yield the weights of latent attention (MLA) in ``layer``."""
    mla, heads = model.get_latent(layer), model.attention(layer).heads
    assert mla is not None
    q_out = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank is None:
        yield from _list_linear("attention.q", q_out, model.width, "column", bias=False)
    else:
        yield from _list_linear("attention.q_down", mla.q_rank, model.width, "column", bias=model.qkv_bias)
        yield from _list_norm(model, "attention.q_norm", mla.q_rank)
        inputs = 2 * mla.q_rank if mla.gates_queries else mla.q_rank
        yield from _list_linear("attention.q_up", q_out, inputs, "column", bias=False)
        if mla.indexer is not None and model.has_indexer(layer):
            yield from mla.indexer.weights(q_rank=mla.q_rank, width=model.width)
    yield from _list_linear("attention.kv_down", mla.kv_rank + mla.rope_dim, model.width, "column", bias=model.qkv_bias)
    yield from _list_norm(model, "attention.kv_norm", mla.kv_rank)
    if mla.key_norm:
        yield from _list_norm(model, "attention.key_norm", mla.rope_dim)
    yield from _list_linear("attention.kv_up", heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, "column", bias=False)
    shape = model.attention(layer)
    yield from _list_sinks(shape)
    if model.output_gate:
        inputs = 2 * mla.q_rank if mla.gates_queries and mla.q_rank else model.width
        yield from _list_linear("attention.gate", model.count_gate_columns(shape), inputs, "column", bias=False)
    yield from _list_linear("attention.out", model.width, heads * mla.v_dim, "row", bias=model.out_bias)


def _list_sinks(shape: AttentionShape) -> Iterator[Weight]:
    """Yield attention's sink logits, one per head; latent attention may have them too (HY V4)."""
    if shape.sinks:
        yield Weight("attention.sinks", (shape.heads,), "vector")


def _list_mlp(model: ModelShape, name: str, ffn: int) -> Iterator[Weight]:
    """Yield the weights of a feed-forward layer of width ``ffn``."""
    if model.mlp == "receptance":
        for part in ("up", "receptance"):
            yield Weight(f"{name}.mix_{part}", (model.width,), "vector")
        yield from _list_linear(f"{name}.receptance", model.width, model.width, "column", bias=False)
    if model.mlp == "gated":
        yield from _list_linear(f"{name}.gate", ffn, model.width, "column", bias=model.mlp_bias)
    yield from _list_linear(f"{name}.up", ffn, model.width, "column", bias=model.mlp_bias)
    for parameter, initial in ACTIVATIONS[model.activation].parameters.items():
        yield Weight(f"{name}.{parameter}", (1,), "norm", initial)
    if model.sub_norm:
        yield from _list_norm(model, f"{name}.norm", ffn)
    yield from _list_linear(f"{name}.down", model.width, ffn, "row", bias=model.mlp_bias)


def _list_experts(model: ModelShape) -> Iterator[Weight]:
    """Yield the weights of router, latent projections, routed experts and shared experts of one layer."""
    moe, width = model.moe, model.width
    assert moe is not None
    yield Weight("moe.router.weight", (moe.choices, width), "router")
    if moe.router_bias:
        yield Weight("moe.router.bias", (moe.choices,), "router")
    if moe.latent_width is not None:
        yield from _list_linear("moe.latent_down", moe.latent_width, width, "column", bias=model.mlp_bias)
        yield from _list_linear("moe.latent_up", width, moe.latent_width, "column", bias=model.mlp_bias)
    names = ("gate", "up") if model.mlp == "gated" else ("up",)
    for name in names:
        yield Weight(f"moe.experts.{name}", (moe.experts, moe.ffn, model.expert_width), "expert_column")
        if moe.expert_bias:
            yield Weight(f"moe.experts.{name}_bias", (moe.experts, moe.ffn), "expert_column")
    yield Weight("moe.experts.down", (moe.experts, model.expert_width, moe.ffn), "expert_row")
    if moe.expert_bias:
        yield Weight("moe.experts.down_bias", (moe.experts, model.expert_width), "expert_row")
    if moe.output_bias:
        yield Weight("moe.bias_out", (width,), "router")
    if moe.joined_norms:
        for name in ("moe.mlp_norm", "moe.input_norm", "moe.output_norm"):
            yield from _list_norm(model, name, width)
        yield Weight("moe.router.norm.weight", (width,), "norm")
        yield Weight("moe.router.expert_scale", (moe.choices,), "router", initial="ones")
    if moe.shared_experts:
        if moe.shared_gate:
            yield Weight("moe.shared_gate.weight", (1, width), "router")
        yield from _list_mlp(model, "moe.shared", moe.shared_width)


@lru_cache(maxsize=256)
def count(model: ModelShape, *, active: bool = False) -> int:
    """Count the parameters of the full model; ``active``: only those used per token."""
    return sum(
        weight.numel // weight.shape[0] * model.moe.topk * model.moe.experts // model.moe.choices
        if active and model.moe and weight.kind.startswith("expert")
        else weight.numel
        for unit in (
            list_embedding_weights(model),
            *(list_block_weights(model, layer) for layer in range(model.layers)),
            list_head_weights(model),
        )
        for weight in unit
    )
