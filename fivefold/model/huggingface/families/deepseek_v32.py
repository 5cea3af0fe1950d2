"""DeepSeek-V3.2, GLM-5, A.X K2 and Hy 4: DeepSeek-V3 with an indexer that chooses the keys of each query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import FusedTensor, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.families import deepseek
from fivefold.model.huggingface.families.deepseek_v4 import HYPER_TENSORS
from fivefold.model.huggingface.family import Supported
from fivefold.model.huggingface.mapping import (
    build_model,
    find_period,
    read_biased_experts,
    read_latent,
    read_mlp_layer_types,
)
from fivefold.model.spec import Model

TENSORS = {
    f"attention.indexer.{ours}": f"self_attn.indexer.{theirs}"
    for ours, theirs in {
        "q": "wq_b",
        "k": "wk",
        "k_norm": "k_norm",
        "w": "weights_proj",
    }.items()
}


def _build(
    config: Config,
    *,
    pattern: tuple[bool, ...],
    gates_queries: bool = False,
    indexer: Mapping[str, Any] | None = None,
    **own: Any,
) -> Model:
    """Build a model with latent attention whose indexer selects keys.

    ``pattern``: which layers have an indexer; ``indexer``: its fields that differ from those of DeepSeek-V3.2.
    """
    if config.q_lora_rank is None:
        raise config.mistake("q_lora_rank=None makes transformers' code fail; give the rank of the queries")
    if config.qk_rope_head_dim > config.index_head_dim:
        raise config.mistake(
            f"index_head_dim={config.index_head_dim} is less than qk_rope_head_dim={config.qk_rope_head_dim} rotated "
            "dims; make it larger"
        )
    fields = read_latent(config)
    fields["mla"]["indexer"] = {
        "heads": config.index_heads,
        "head_dim": config.index_head_dim,
        "topk": config.index_topk,
        "pattern": pattern,
        **(indexer or {}),
    }
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=config.first_k_dense_replace)
    moe["clamp"] = config.swiglu_limit if config.swiglu_limit and config.swiglu_limit > 0 else None
    fields["mla"]["gates_queries"] = gates_queries
    return build_model(config, **fields, moe=moe, **own)


def _read_pattern(config: Config, *, default: tuple[str, ...]) -> tuple[bool, ...]:
    """Return which layers choose keys; the others attend to the keys that the indexer of an earlier layer chose."""
    layers = config.num_hidden_layers
    kinds = config.indexer_types or default
    if len(kinds) < layers or set(kinds) - {"full", "shared"}:
        raise config.mistake(f"indexer_types={list(kinds)}: give full or shared for each of {layers} layers")
    if kinds[0] != "full":
        raise config.mistake(
            "indexer_types begins with shared, but no earlier layer has keys to share; begin with full"
        )
    pattern = find_period(tuple(kind == "full" for kind in kinds[:layers]))
    return () if all(pattern) else pattern


def _read_old_pattern(config: Config) -> tuple[str, ...]:
    """Return the kinds of GLM-5's layers by its older keys, which transformers ignores next to indexer_types."""
    if config.index_topk_pattern is not None:
        return tuple({"F": "full", "S": "shared"}.get(kind, kind) for kind in config.index_topk_pattern)
    period, offset = max(config.index_topk_freq, 1), config.index_skip_topk_offset
    layers = range(config.num_hidden_layers)
    return tuple("shared" if max(layer - offset + 1, 0) % period else "full" for layer in layers)


def _build_hy_v4(config: Config) -> Model:
    """Build Hy 4: independent hyper-connections, output gates and sinks of attention, clamped experts."""
    default = tuple("full" if not layer or layer % 4 == 1 else "shared" for layer in range(config.num_hidden_layers))
    return _build(
        config,
        pattern=_read_pattern(config, default=default),
        indexer={"norm_epsilon": config.norm_epsilon},
        output_gate=True,
        attention_sinks=True,
        hyper_connections={
            "streams": config.hyper_streams,
            "mixes": False,
            "magnitude": config.hyper_magnitude,
            "epsilon": config.hyper_epsilon,
        },
    )


def _write(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    keys = decoder.write_latent(model)
    indexer = model.mla.indexer if model.mla else None
    if indexer is None:
        return keys
    return keys | {
        "index_n_heads": indexer.heads,
        "index_head_dim": indexer.head_dim,
        "index_topk": indexer.topk,
    }


def _write_glm_moe_dsa(model: Model) -> dict[str, Any]:
    kinds = ["full" if model.has_indexer(layer) else "shared" for layer in range(model.layers)]
    return _write(model) | {"indexer_types": kinds}


def _write_hy_v4(model: Model) -> dict[str, Any]:
    hyper, moe = model.hyper_connections, model.moe
    connections: dict[str, Any] = {}
    if hyper is not None:
        connections = {"hc_mult": hyper.streams, "hc_magnitude": hyper.magnitude, "hc_eps": hyper.epsilon}
    return {**_write_glm_moe_dsa(model), **connections, "swiglu_limit": (moe and moe.clamp) or 0.0}


KEYS = drop_keys(
    deepseek.V3.keys, *decoder.MTP_KEYS, "topk_method", "scoring_func", "aux_loss_alpha", "rope_interleave", "head_dim"
) | {
    "mlp_layer_types": "mlp_layer_types",
    "index_n_heads": "index_heads",
    **map_same_names("index_head_dim index_topk"),
}
# DeepSeek-V3.2, every layer of which has an indexer.
V32 = replace(
    deepseek.V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    keys=KEYS,
    defaults={
        **deepseek.V3.defaults,
        "max_position_embeddings": 163_840,
        "index_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    supported={"moe_layer_freq": deepseek.V3.supported["moe_layer_freq"]},
    overwritten=("layer_types",),
    to_model=lambda config: _build(config, pattern=()),
    write=_write,
    tensors={**deepseek.V3.tensors, **TENSORS},
)
# GLM-5, some of whose layers attend to the keys that the indexer of an earlier layer chose.
GLM_MOE_DSA = replace(
    V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    keys=KEYS | map_same_names("indexer_types index_topk_pattern index_topk_freq index_skip_topk_offset"),
    defaults={
        **V32.defaults,
        **expand_names(vocab=154_880, width=6144, ffn=12_288, layers=78, heads=64, kv_heads=64, positions=202_752),
        **expand_names(q_rank=2048, nope_dim=192, v_dim=256),
        "n_group": 1,
        "topk_group": 1,
        "norm_epsilon": 1e-5,
        "index_heads": 32,
    },
    to_model=lambda config: _build(config, pattern=_read_pattern(config, default=_read_old_pattern(config))),
    indexer_rows="adjacent",
    write=_write_glm_moe_dsa,
)

# A.X K2: gates on the norms and on attention. transformers has other names in memory than in files.
AXK2_RENAMED = {
    "layernorm.mlp.fc1.": "layernorm.W_down.",
    "layernorm.mlp.fc2.": "layernorm.W_up.",
    "self_attn.q_gate_proj.": "self_attn.q_b_proj.",
}
AXK2 = replace(
    V32,
    model_type="axk2",
    architecture="AXK2ForCausalLM",
    keys=drop_keys(KEYS, "mlp_bias") | {"gated_norm_rank": "norm_gate_rank"},
    defaults={
        **V32.defaults,
        **expand_names(vocab=163_840, width=2048, ffn=5120, layers=48, heads=32, kv_heads=32, positions=131_072),
        **expand_names(expert_ffn=512, experts=128),
        **expand_names(q_rank=384, kv_rank=128, rope_dim=32, v_dim=64, nope_dim=64),
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 1,
        "index_heads": 16,
        "norm_gate_rank": 16,
    },
    to_model=lambda config: _build(
        config, pattern=(), gates_queries=True, output_gate=True, norm_gate_rank=config.norm_gate_rank
    ),
    renamed=AXK2_RENAMED,
    write=lambda model: _write(model) | {"gated_norm_rank": model.norm_gate_rank},
    tensors={
        **V32.tensors,
        "norm1": "input_layernorm.norm",
        **{f"norm1_gate.{end}": f"input_layernorm.W_{end}" for end in ("down", "up")},
        "norm2": "post_attention_layernorm",
        "gated norm2": "post_attention_layernorm.norm",
        **{f"norm2_gate.{end}": f"post_attention_layernorm.W_{end}" for end in ("down", "up")},
        **dict.fromkeys(
            ("attention.q_up", "attention.gate"),
            FusedTensor("self_attn.q_b_proj", ("attention.q_up", "attention.gate"), groups="heads"),
        ),
    },
)

HY_V4 = replace(
    GLM_MOE_DSA,
    model_type="hy_v4",
    architecture="HYV4ForCausalLM",
    keys=drop_keys(GLM_MOE_DSA.keys, "mlp_bias")
    | map_same_names("swiglu_limit")
    | {"hc_mult": "hyper_streams", "hc_magnitude": "hyper_magnitude", "hc_eps": "hyper_epsilon"},
    defaults={
        **GLM_MOE_DSA.defaults,
        **expand_names(vocab=120_832, width=2816, ffn=6912, layers=34, heads=32, kv_heads=32, positions=262_144),
        "moe_intermediate_size": 768,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "index_heads": 16,
        "hyper_streams": 4,
        "hyper_magnitude": 2.0,
        "swiglu_limit": 10.0,
    },
    supported={"hidden_act": Supported(("silu", "swish"), "MLPs with an activation that the experts do not have")},
    to_model=_build_hy_v4,
    interleaved_latent=False,
    indexer_rows="last",
    renamed={
        ".hc_pre.hc_": ".hc_",
        ".hc_attn_layer.hc_": ".attn_hc.",
        ".hc_mlp_layer.hc_": ".ffn_hc.",
        ".hc_head_": ".hc_",
        ".linear_gate": ".gate_proj",
        ".learnable_sink_param": ".sinks",
    },
    write=_write_hy_v4,
    tensors={
        **V32.tensors,
        **decoder.name_stacked_experts(),
        **HYPER_TENSORS,
        "attention.gate": "self_attn.gate_proj",
        "attention.sinks": "self_attn.sinks",
    },
)
