"""Dots 3 Note: latent attention whose keys an indexer chooses in some layers, and that slides in others."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.families import deepseek_v32
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, find_period, read_biased_experts, read_mlp_layer_types
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model

SIZES = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "head_dim", "qk_nope_head_dim", "v_head_dim")
OF_SLIDING = dict(zip(SIZES, (64, 1024, 1024, 256, 192, 128), strict=True))  # defaults of sliding layers
KINDS = {"indexed_attention": False, "sliding_attention": True}


def _build(config: Config) -> Model:
    """Build Dots 3, in whose sliding layers heads and latents have sizes of their own."""
    slides = _list_sliding(config)
    sliding_keys = _read_sliding(config, slides)
    if sliding_keys["head_dim"] <= sliding_keys["qk_nope_head_dim"]:
        raise config.mistake("head_dim of the sliding layers is not more than qk_nope_head_dim; make it larger")
    latent = {"norm_epsilon": config.norm_epsilon, "key_norm": True, "scaled": "latents"}
    dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.q_lora_rank is None or config.num_key_value_heads not in (None, config.num_attention_heads):
        raise config.mistake("latent attention with compressed queries and as many keys needs q_lora_rank; give it")
    if config.qk_rope_head_dim > config.index_head_dim:
        raise config.mistake(f"index_head_dim={config.index_head_dim} is less than qk_rope_head_dim; make it larger")
    fields: dict[str, Any] = {
        "kv_heads": config.num_attention_heads,
        "head_dim": dim,
        "mla": latent
        | {
            "q_rank": config.q_lora_rank,
            "kv_rank": config.kv_lora_rank,
            "nope_dim": config.qk_nope_head_dim,
            "rope_dim": config.qk_rope_head_dim,
            "v_dim": config.v_head_dim,
            "indexer": {
                "heads": config.index_heads,
                "head_dim": config.index_head_dim,
                "topk": config.index_topk,
                "pattern": () if not any(slides) else find_period(tuple(not sliding for sliding in slides)),
            },
        },
    }
    if all(slides):
        raise config.mistake("all layers have sliding windows, so that no indexer chooses keys, which is not supported")
    if slides[0]:
        raise config.mistake(
            "the first layer has a sliding window, which is not supported: begin with indexed_attention"
        )
    if any(slides):
        fields |= {
            "window": config.sliding_window,
            "window_pattern": find_period(slides),
            "sliding": {"heads": sliding_keys["num_attention_heads"]},
            "sliding_mla": latent
            | {
                "q_rank": sliding_keys["q_lora_rank"],
                "kv_rank": sliding_keys["kv_lora_rank"],
                "nope_dim": sliding_keys["qk_nope_head_dim"],
                "rope_dim": sliding_keys["head_dim"] - sliding_keys["qk_nope_head_dim"],
                "v_dim": sliding_keys["v_head_dim"],
            },
        }
    moe = read_biased_experts(config) | read_mlp_layer_types(config, dense=config.first_k_dense_replace)
    moe["shared_ffn"] = config.shared_expert_intermediate_size
    return build_model(config, **fields, **_read_rope(config, slides), output_gate=True, gate_per_head=True, moe=moe)


def _list_sliding(config: Config) -> tuple[bool, ...]:
    """Tell of each layer whether it slides: all but the first two and every fourth, if the file does not say."""
    layers = config.num_hidden_layers
    kinds = config.layer_types
    if kinds is None:
        return tuple(config.use_sliding_window and layer >= 2 and layer % 4 != 1 for layer in range(layers))
    if config.per_layer_config == "sliding":  # in files without that key, an old name
        kinds = tuple("indexed_attention" if kind == "full_attention" else kind for kind in kinds)
    if len(kinds) != layers or set(kinds) - KINDS.keys():
        raise config.mistake(f"layer_types={list(kinds)}: give {' or '.join(KINDS)} for each of {layers} layers")
    return tuple(KINDS[kind] for kind in kinds)


def _read_sliding(config: Config, slides: tuple[bool, ...]) -> dict[str, Any]:
    """Return the sizes of sliding layers: those of ``per_layer_config``, or the keys that begin with swa_."""
    given = {key: getattr(config, f"swa_{key}") for key in SIZES}
    tables = config.per_layer_config or {}
    if isinstance(tables, str):
        return {key: OF_SLIDING[key] if given[key] is None else given[key] for key in SIZES}
    inherited = {key: getattr(config, key) for key in SIZES}
    sizes = [inherited | tables.get(str(n), tables.get(f"{n:02}", {})) for n, sliding in enumerate(slides) if sliding]
    unknown = {key for table in tables.values() for key in table} - {*SIZES, "num_key_value_heads", "qk_rope_head_dim"}
    if unknown or any(size != sizes[0] for size in sizes):
        raise config.mistake("per_layer_config of sliding layers that differ, or with other keys, is not supported")
    return sizes[0] if sizes else inherited


def _read_rope(config: Config, slides: tuple[bool, ...]) -> dict[str, Any]:
    """Return the rotary fields: a table for each kind of layer, or old keys with its base."""
    tables = (config.rope_scaling or None) if config.rope_parameters is None else config.rope_parameters
    local_theta = config.rope_local_base_freq if tables is None else config.rope_theta
    thetas = {}
    for kind, theta in (("indexed_attention", config.rope_theta), ("sliding_attention", local_theta)):
        table = (tables or {}).get(kind) or ({} if any(name in (tables or {}) for name in KINDS) else tables)
        fields = read_rope(config.replace(rope_parameters=table or None, rope_scaling=None, rope_theta=theta))
        if fields["rope_scaling"] is not None:
            raise config.mistake("a rotary scaling is not supported in this family; remove it")
        thetas[kind] = fields["rope_theta"]
    return {
        "rope_theta": thetas["indexed_attention"],
        "rope_theta_sliding": thetas["sliding_attention"] if any(slides) else None,
    }


def _write(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    mla, sliding_mla, sliding, moe = model.mla, model.sliding_mla, model.sliding, model.moe
    keys: dict[str, Any] = {"num_key_value_heads": model.heads}
    slides = [model.has_window(layer) for layer in range(model.layers)]
    kinds = {slides: kind for kind, slides in KINDS.items()}
    keys["layer_types"] = [kinds[sliding] for sliding in slides]
    if mla is not None:
        keys |= {"q_lora_rank": mla.q_rank}
        if mla.indexer is not None:
            indexer = mla.indexer
            keys |= {"index_n_heads": indexer.heads, "index_head_dim": indexer.head_dim, "index_topk": indexer.topk}
    if sliding_mla is not None:
        sizes = (
            (sliding and sliding.heads) or model.heads,
            sliding_mla.q_rank,
            sliding_mla.kv_rank,
            sliding_mla.nope_dim + sliding_mla.rope_dim,
            sliding_mla.nope_dim,
            sliding_mla.v_dim,
        )
        keys |= {f"swa_{key}": size for key, size in zip(SIZES, sizes, strict=True)}
        keys |= {"swa_num_key_value_heads": sizes[0]}
    keys |= {"shared_experts_intermediate_size": (moe.shared_ffn or moe.ffn) if moe else 1}
    return keys | {"swa_rope_theta": model.rope_theta_sliding or model.rope_theta, "head_dim": model.head_dim}


DOTS3_NOTE_TEXT = Family(
    model_type="dots3_note_text",
    architecture="Dots3NoteForCausalLM",
    keys=drop_keys(deepseek_v32.V32.keys, "mlp_bias")
    | map_same_names("layer_types sliding_window use_sliding_window per_layer_config head_dim")
    | {f"swa_{key}": f"swa_{key}" for key in SIZES}
    | {
        "swa_rope_theta": "rope_local_base_freq",
        "shared_experts_intermediate_size": "shared_expert_intermediate_size",
        "sliding_window_size": "sliding_window",
    },
    defaults={
        **deepseek_v32.V32.defaults,
        **expand_names(vocab=152_064, width=5120, ffn=13_824, layers=46, positions=524_288, head_dim=256),
        "moe_intermediate_size": 1536,
        "shared_expert_intermediate_size": 1536,
        "num_key_value_heads": None,
        "norm_epsilon": 1e-5,
        "q_lora_rank": 1024,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rope_theta": 80_000_000.0,
        "rope_local_base_freq": 50_000.0,
        "sliding_window": 512,
        "per_layer_config": "sliding",
    },
    supported={**deepseek_v32.V32.supported, "use_dsa": Supported((True, None), "layers that attend to all keys")},
    overwritten=("swa_num_key_value_heads",),
    to_model=_build,
    write=_write,
    tensors={
        **decoder.BIASED_EXPERT_TENSORS,
        **decoder.LATENT_TENSORS,
        **deepseek_v32.TENSORS,
        "attention.key_norm": "self_attn.k_rope_only_layernorm",
        "attention.gate": "self_attn.g_proj",
    },
    stacked_tensors=decoder.name_stacked_experts(),
    indexer_rows="adjacent",
)
WRAPPERS = (Wrapper("dots3_note", "Dots3NoteForCausalLM", text="dots3_note_text", tied=False),)
