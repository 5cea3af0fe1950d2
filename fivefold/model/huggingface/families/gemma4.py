"""Gemma 4: other heads in full layers, whose values may be keys, normed values, shared keys, inputs of each layer.

The 26B has experts next to the MLP of each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import FusedTensor, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.families import gemma
from fivefold.model.huggingface.families.gemma import TENSORS
from fivefold.model.huggingface.family import Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, list_sliding_layers, read_head_dim, read_windows
from fivefold.model.huggingface.rope import KINDS, read_rope_tables
from fivefold.model.per_layer_inputs import PerLayerInputs
from fivefold.model.spec import Model


def _build_gemma4(config: Config) -> Model:
    """Build Gemma 4, whose last layer is full and whose scores have no factor."""
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if config.layer_types is None:
        kinds = {True: "sliding_attention", False: "full_attention"}
        config = config.replace(layer_types=tuple(map(kinds.get, list_sliding_layers(layers, period=6))))
    if config.layer_types is not None:  # as their class does
        config = config.replace(layer_types=(*config.layer_types[:-1], "full_attention"))
    windows = read_windows(config)
    pattern = windows["window_pattern"] if windows else (False,)
    slides = [pattern[layer % len(pattern)] for layer in range(layers)]
    rope = read_rope_tables(
        config, slides=slides, has_partial_rotary=False, kinds={**KINDS, "proportional": "proportional"}
    )
    head_dim, kv_heads = _read_full_layers(config, slides)
    sliding_kv_heads = config.num_key_value_heads or config.num_attention_heads
    sliding_fields: dict[str, Any] = {"tied_values": False} if config.ties_values else {}
    if head_dim != (sliding_head_dim := read_head_dim(config)):
        sliding_fields["head_dim"] = sliding_head_dim
        rope.setdefault("rope_theta_sliding", rope["rope_theta"])
    if kv_heads != sliding_kv_heads:
        sliding_fields["kv_heads"] = sliding_kv_heads
    moe = _read_joined_experts(config) if config.enable_moe_block else {}
    return build_model(
        config,
        **rope,
        **windows,
        **moe,
        head_dim=head_dim,
        kv_heads=kv_heads,
        sliding=(sliding_fields or None) if any(slides) else None,
        **read_common_fields(config),
        tied_values=config.ties_values,
        shared_kv_ffn=2 * (config.intermediate_size or 0) if shared and config.use_double_wide_mlp else None,
    )


def _read_joined_experts(config: Config) -> dict[str, Any]:
    """Return the experts next to the MLP of each layer, with norms of their own."""
    return {
        "moe": {
            "experts": config.num_experts,
            "topk": config.num_experts_per_tok,
            "ffn": config.moe_intermediate_size,
            "balance": "none",
            "joins_mlp": True,
            "joined_norms": True,
        }
    }


def read_common_fields(config: Config) -> dict[str, Any]:
    """Return the fields that Gemma 3n and Gemma 4 have in common."""
    return {
        "value_norm": True,
        "qk_norm": "head",
        "block": "sandwich",
        "attention_scale": 1.0,
        "logit_softcap": config.final_logit_softcapping,
        "embedding_scale": config.hidden_size**0.5,
        "shared_kv_layers": config.num_kv_shared_layers,
        "per_layer_inputs": _read_per_layer_inputs(config),
    }


def _read_per_layer_inputs(config: Config) -> PerLayerInputs | None:
    """Return the inputs of each layer; None: the model has none."""
    width = config.per_layer_width
    return PerLayerInputs(width=width, vocab=config.per_layer_vocab) if width else None


def _read_full_layers(config: Config, slides: list[bool]) -> tuple[int, int]:
    """Return the head dim and the key heads of layers that do not slide.

    transformers writes them as keys of single layers (``per_layer_config``).
    """
    head_dim = read_head_dim(config)
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if isinstance(config.per_layer_config, str):  # the default of files that lack the key
        full_kv_heads = config.global_key_value_heads if config.ties_values else None
        return config.global_head_dim or head_dim, full_kv_heads or kv_heads
    given = {str(layer).lstrip("0") or "0": keys for layer, keys in (config.per_layer_config or {}).items()}
    full = [given.pop(str(layer), {}) for layer, sliding in enumerate(slides) if not sliding]
    if given or any(keys != full[0] or keys.keys() - {"head_dim", "num_key_value_heads"} for keys in full):
        raise config.mistake(
            "per_layer_config must give the same head_dim and num_key_value_heads for every full-attention layer, and "
            "nothing for other layers; change it"
        )
    return full[0].get("head_dim", head_dim), full[0].get("num_key_value_heads", kv_heads)


def _write_gemma4(model: Model) -> dict[str, Any]:
    """Return the keys of Gemma 4: heads of full and of sliding attention, shared keys and values."""
    full, sliding = model.attention_shapes[0], model.attention_shapes[-1]
    return {
        **decoder.write_rope_by_layers(model),
        "head_dim": sliding.head_dim,
        "num_key_value_heads": sliding.kv_heads,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "attention_k_eq_v": model.tied_values,
        "num_kv_shared_layers": model.shared_kv_layers,
        "use_double_wide_mlp": model.shared_kv_ffn == 2 * model.ffn,
    }


def _write_gemma4_text(model: Model) -> dict[str, Any]:
    inputs = model.per_layer_inputs
    table = {"vocab_size_per_layer_input": inputs.vocab} if inputs else {}
    width = {"hidden_size_per_layer_input": inputs.width if inputs else 0}
    return _write_gemma4(model) | width | table | {"enable_moe_block": model.moe is not None}


KEYS = (
    drop_keys(
        gemma.GEMMA3_TEXT.keys,
        *("query_pre_attn_scalar", "attn_logit_softcapping", "rope_local_base_freq", "sliding_window_pattern"),
        *("rope_theta", "rope_scaling", "original_max_position_embeddings"),
    )
    | map_same_names("global_head_dim per_layer_config num_kv_shared_layers use_double_wide_mlp")
    | {"num_global_key_value_heads": "global_key_value_heads", "attention_k_eq_v": "ties_values"}
)
DEFAULTS = {
    **{key: value for key, value in gemma.GEMMA3_TEXT.defaults.items() if key in decoder.DEFAULTS},
    **expand_names(vocab=262_144, ffn=9216, layers=30, kv_heads=4, head_dim=256, positions=262_144),
    "global_head_dim": 512,
    "per_layer_config": "global",
    "sliding_window": 1024,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4_TEXT = replace(
    gemma.GEMMA3_TEXT,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    keys=KEYS
    | map_same_names("enable_moe_block num_experts moe_intermediate_size")
    | {
        "hidden_size_per_layer_input": "per_layer_width",
        "vocab_size_per_layer_input": "per_layer_vocab",
        "top_k_experts": "num_experts_per_tok",
    },
    defaults={**DEFAULTS, "max_position_embeddings": 131_072, "sliding_window": 512, "per_layer_width": 256},
    supported={"use_bidirectional_attention": Supported((None, "vision"), "attention that is not causal")},
    to_model=_build_gemma4,
    write=_write_gemma4_text,
    tensors=TENSORS
    | {
        "embed.per_layer": "model.embed_tokens_per_layer",
        "embed.per_layer_project": "model.per_layer_model_projection",
        "embed.per_layer_norm": "model.per_layer_projection_norm",
        "per_layer.gate": "per_layer_input_gate",
        "per_layer.project": "per_layer_projection",
        "per_layer.norm": "post_per_layer_input_norm",
        "moe.mlp_norm": "post_feedforward_layernorm_1",
        "moe.input_norm": "pre_feedforward_layernorm_2",
        "moe.output_norm": "post_feedforward_layernorm_2",
        "moe.router": "router.proj",
        "moe.router.norm.weight": "router.scale",
        "moe.router.expert_scale": "router.per_expert_scale",
        **dict.fromkeys(decoder.EXPERT_GATE_UP, FusedTensor("experts.gate_up_proj", decoder.EXPERT_GATE_UP)),
        "moe.experts.down": "experts.down_proj",
    },
    constants={"layer_scalar": (1.0,)},
)
GEMMA4_UNIFIED_TEXT = replace(
    GEMMA4_TEXT,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS,
    write=_write_gemma4,
    tensors=TENSORS,
)

WRAPPERS = (
    Wrapper("gemma4", "Gemma4ForConditionalGeneration", text="gemma4_text", tied=True),
    Wrapper("gemma4_unified", "Gemma4UnifiedForConditionalGeneration", text="gemma4_unified_text", tied=True),
)
