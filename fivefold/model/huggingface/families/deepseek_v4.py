"""DeepSeek-V4: attention to compressed keys, hyper-connections, experts that token ids or √softplus choose."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_biased_experts, read_mixers
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

SPARSE, HEAVY, SLIDING = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
KINDS: dict[str, MixerName] = {
    SLIDING: "shared_key_attention",
    SPARSE: "compressed_sparse_attention",
    HEAVY: "heavily_compressed_attention",
}
KIND_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
SCORES = ("sqrtsoftplus", "softmax", "sigmoid")
ROTATED_SHARE = 64 / 512  # of a head, if the file does not say


def _build(config: Config) -> Model:
    """Build DeepSeek-V4, in whose first layers a table of token ids names the experts."""
    if config.scoring_func not in SCORES:
        raise config.mistake(f"scoring_func={config.scoring_func!r} is not supported; supported: {', '.join(SCORES)}")
    if config.n_shared_experts != 1:
        raise config.mistake(f"n_shared_experts={config.n_shared_experts}: the family has one shared expert; give 1")
    if config.head_dim is None:
        raise config.mistake("head_dim=None makes transformers' code fail; give the dims of a head")
    moe = {
        "score": config.scoring_func,
        "hashed_layers": _count_hashed_layers(config),
        "clamp": config.swiglu_limit,
        "normalized": True,
    }
    return build_model(
        config,
        **_read_layers(config),
        kv_heads=1,
        head_dim=config.head_dim,
        ffn=config.moe_intermediate_size,
        position="none",
        mlp_clamp=config.swiglu_limit,
        hyper_connections={
            "streams": config.hyper_streams,
            "iterations": config.hyper_iterations,
            "epsilon": config.hyper_epsilon,
        },
        moe=read_biased_experts(config) | moe,
    )


def _read_layers(config: Config) -> dict[str, Any]:
    """Return the kinds of layers and the geometry of each kind."""
    layers, kinds = config.num_hidden_layers, config.layer_types
    if kinds is None and config.compress_ratios is not None:
        if unknown := sorted(set(config.compress_ratios) - KIND_OF_RATIO.keys()):
            raise config.mistake(f"compress_ratios has {unknown[0]}; give 0, 4 or 128 for each layer")
        kinds = tuple(KIND_OF_RATIO[ratio] for ratio in config.compress_ratios)
    if kinds is None:
        kinds = tuple(SPARSE if layer > 2 and layer % 2 else HEAVY for layer in range(layers))
    config = config.replace(layer_types=kinds[:layers])
    plain, compressed = _read_rope(config)
    shared = {
        "heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "q_rank": config.q_lora_rank,
        "window": config.sliding_window,
        "out_groups": config.out_groups,
        "out_rank": config.out_rank,
    }
    indexer = {"heads": config.index_heads, "head_dim": config.index_head_dim, "topk": config.index_topk}
    geometry: dict[MixerName, Any] = {"shared_key_attention": shared | plain}
    for kind, own in ((HEAVY, {}), (SPARSE, {"overlaps": True, "indexer": indexer})):
        if kind in kinds[:layers]:
            geometry[KINDS[kind]] = shared | compressed | own | {"rate": _read_rate(config, kind)}
    return read_mixers(config, geometry, kinds=KINDS, default=())


def _read_rate(config: Config, kind: str) -> int:
    """Return the tokens of a compressed key in layers of ``kind``; old keys take precedence."""
    old, default = (config.compress_rate_csa, 4) if kind == SPARSE else (config.compress_rate_hca, 128)
    rates = {kind: default} if config.compress_rates is None else config.compress_rates
    if old is None and kind not in rates:
        raise config.mistake(f"compress_rates has no entry {kind!r}; add it")
    return rates[kind] if old is None else old


def _read_rope(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary fields of layers without compressed keys and with them.

    The file has a table of each, or the scaling of the latter alone, whose cosines then have no factor.
    """
    assert config.head_dim is not None
    given = config.rope_parameters or config.rope_scaling or {}
    share = config.rotated_share
    if share is None:
        share = ROTATED_SHARE if config.rope_head_dim is None else config.rope_head_dim / config.head_dim
    tables = [given.get("main"), given.get("compress")]
    if not all(isinstance(table, dict) for table in tables):
        scaling = {key: value for key, value in given.items() if key not in ("main", "compress")}
        if scaling.get("rope_type", scaling.get("type")) == "yarn":
            scaling = {"attention_factor": 1.0, **scaling}
        tables = [
            {"rope_theta": config.rope_theta, "partial_rotary_factor": share},
            {**scaling, "rope_theta": config.compress_rope_theta, "partial_rotary_factor": share},
        ]
    plain, compressed = (
        read_rope(
            config.replace(rope_parameters=table, rope_scaling=None, partial_rotary_factor=1.0), has_partial_rotary=True
        )
        for table in tables
    )
    for fields in (plain, compressed):
        fields["rope_dim"] = int(config.head_dim * fields.pop("rope_fraction"))
    return plain, compressed


def _count_hashed_layers(config: Config) -> int:
    """Return the number of first layers in which a table of token ids names the experts."""
    kinds, layers = config.mlp_layer_types, config.num_hidden_layers
    if kinds is None:
        return min(config.hashed_layers, layers)
    if len(kinds) < layers or set(kinds) - {"hash_moe", "moe"}:
        raise config.mistake(f"mlp_layer_types={list(kinds)}: give hash_moe or moe for each of {layers} layers")
    hashed = sum(kind == "hash_moe" for kind in kinds[:layers])
    if "hash_moe" in kinds[hashed:layers]:
        raise config.mistake("mlp_layer_types has hash_moe after moe, which is not supported; give hash_moe first")
    return hashed


def _write(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    names = {ours: theirs for theirs, ours in KINDS.items()}
    nets: dict[str, CompressedAttention] = {
        names[kind]: net for kind in names if (net := getattr(model, kind)) is not None
    }
    hyper, moe = model.hyper_connections, model.moe
    if not nets or hyper is None or moe is None:
        return {}
    net = next(iter(nets.values()))
    written: dict[str, Any] = {
        "layer_types": [names.get(model.mixer_name(layer), SLIDING) for layer in range(model.layers)],
        "mlp_layer_types": ["hash_moe" if layer < moe.hashed_layers else "moe" for layer in range(model.layers)],
        "compress_rates": {SPARSE: 4, HEAVY: 128} | {kind: n.rate for kind, n in nets.items() if n.rate is not None},
        "hc_mult": hyper.streams,
        "hc_sinkhorn_iters": hyper.iterations,
        "hc_eps": hyper.epsilon,
        "swiglu_limit": model.mlp_clamp,
        "q_lora_rank": net.q_rank,
        "sliding_window": net.window,
        "o_groups": net.out_groups,
        "o_lora_rank": net.out_rank,
        "rope_parameters": {
            "main": _write_rope(nets.get(SLIDING, net)),
            "compress": _write_rope(nets.get(SPARSE) or nets.get(HEAVY, net)),
        },
    }
    if SPARSE in nets and (indexer := nets[SPARSE].indexer) is not None:
        written |= {"index_n_heads": indexer.heads, "index_head_dim": indexer.head_dim, "index_topk": indexer.topk}
    return written


def _write_rope(net: CompressedAttention) -> dict[str, Any]:
    scaling = decoder.write_scaling(net.rope_scaling) if net.rope_scaling else {"rope_type": "default"}
    return {**scaling, "rope_theta": net.rope_theta, "partial_rotary_factor": net.rope_dim / net.head_dim}


COMPRESSOR = {"kv": "kv_proj", "gate": "gate_proj", "position_bias": "position_bias", "norm": "kv_norm"}
MIXER = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_norm",
    "q_up": "q_b_proj",
    "kv": "kv_proj",
    "kv_norm": "kv_norm",
    "sinks": "sinks",
    "out_down": "o_a_proj",
    "out": "o_b_proj",
    "indexer.q": "compressor.indexer.q_b_proj",
    "indexer.w": "compressor.indexer.scorer.weights_proj",
    **{f"compress.{ours}": f"compressor.{theirs}" for ours, theirs in COMPRESSOR.items()},
    **{f"indexer.compress.{ours}": f"compressor.indexer.{theirs}" for ours, theirs in COMPRESSOR.items()},
}
HYPER_TENSORS = {
    f"hyper{index}.{ours}": f"{branch}_hc.{theirs}"
    for index, branch in ((1, "attn"), (2, "ffn"))
    for ours, theirs in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
} | {
    f"head.hyper.{ours}": f"model.hc_head.hc_{theirs}"
    for ours, theirs in (("weight", "fn"), ("bias", "base"), ("scale", "scale"))
}

# names of published files, which transformers saves too; its own names in memory are those of stacked experts
PUBLISHED_COMPRESSOR = {"kv": "wkv", "gate": "wgate", "position_bias": "ape", "norm": "norm"}
PUBLISHED_MIXER = {
    "q_down": "wq_a",
    "q_norm": "q_norm",
    "q_up": "wq_b",
    "kv": "wkv",
    "kv_norm": "norm",
    "sinks": "attn_sink",
    "out_down": "wo_a",
    "out": "wo_b",
    "indexer.q": "indexer.wq_b",
    "indexer.w": "indexer.weights_proj",
    **{f"compress.{ours}": f"compressor.{theirs}" for ours, theirs in PUBLISHED_COMPRESSOR.items()},
    **{f"indexer.compress.{ours}": f"indexer.compressor.{theirs}" for ours, theirs in PUBLISHED_COMPRESSOR.items()},
}
PUBLISHED_TENSORS = (
    {"norm1": "attn_norm", "norm2": "ffn_norm", "head.out": "head"}
    | {"moe.router": "ffn.gate", "moe.bias": "ffn.gate.bias", "moe.table": "ffn.gate.tid2eid"}
    | {
        f"moe.{kind}.{ours}": f"ffn.{place}.{theirs}"
        for kind, place, end in (("experts", "experts.{}", ".weight"), ("shared", "shared_experts", ""))
        for ours, theirs in (("gate", f"w1{end}"), ("up", f"w3{end}"), ("down", f"w2{end}"))
    }
    | {f"mixer.{ours}": f"attn.{theirs}" for ours, theirs in PUBLISHED_MIXER.items()}
    | {
        name: tensor.replace("attn_hc.", "hc_attn_").replace("ffn_hc.", "hc_ffn_")
        for name, tensor in HYPER_TENSORS.items()
    }
)

DEEPSEEK_V4 = Family(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    keys=drop_keys(decoder.KEYS, "num_key_value_heads", "partial_rotary_factor", "intermediate_size")
    | map_same_names(
        "q_lora_rank num_experts_per_tok n_shared_experts scoring_func routed_scaling_factor mlp_bias layer_types "
        "mlp_layer_types sliding_window index_head_dim index_topk compress_rates compress_rate_csa compress_rate_hca "
        "compress_ratios compress_rope_theta swiglu_limit"
    )
    | {
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "intermediate_size": "moe_intermediate_size",
        "moe_intermediate_size": "moe_intermediate_size",
        "index_n_heads": "index_heads",
        "o_groups": "out_groups",
        "o_lora_rank": "out_rank",
        "hc_mult": "hyper_streams",
        "hc_sinkhorn_iters": "hyper_iterations",
        "hc_eps": "hyper_epsilon",
        "num_hash_layers": "hashed_layers",
        "partial_rotary_factor": "rotated_share",
        "qk_rope_head_dim": "rope_head_dim",
    },
    defaults={
        **expand_names(vocab=129_280, layers=43, heads=64, head_dim=512, positions=1_048_576),
        "intermediate_size": None,
        **expand_names(expert_ffn=2048, experts=256, topk=6, shared_experts=1),
        "q_lora_rank": 1024,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,  # not read, as is the next
        "router_aux_loss_coef": 0.001,
        "compress_rope_theta": 160_000.0,
        "hyper_streams": 4,
        "hyper_iterations": 20,
        "hashed_layers": 3,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "out_groups": 8,
        "out_rank": 1024,
        "index_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
    },
    supported={"attention_dropout": Supported((0.0,), "dropout of attention to compressed keys")},
    to_model=_build,
    write=_write,
    tensors=decoder.TENSORS | PUBLISHED_TENSORS,
    stacked_tensors={"head.out": "lm_head", "norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    | decoder.SHARED_EXPERT_TENSORS
    | {"moe.bias": "mlp.gate.e_score_correction_bias", "moe.table": "mlp.gate.tid2eid"}
    | {f"mixer.{ours}": f"self_attn.{theirs}" for ours, theirs in MIXER.items()}
    | HYPER_TENSORS
    | decoder.name_stacked_experts(),
    base_prefix="model.",
    renamed={
        "model.head.weight": "head.weight",
        "model.embed.weight": "model.embed_tokens.weight",
        "model.hc_head_": "model.hc_head.hc_",
    },
)
