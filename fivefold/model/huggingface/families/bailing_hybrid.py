"""Ling 3 (Bailing): Kimi delta attention in five of six layers, latent attention with a gate per head in the sixth."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.families import kimi_linear
from fivefold.model.huggingface.families.kimi_linear import KINDS, list_layer_kinds
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import (
    build_model,
    read_biased_experts,
    read_latent,
    read_mixers,
    read_mlp_layer_types,
)
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

MIXER_TENSORS = [f"mixer.{name}" for name in ("q", "k", "v", "b", "conv", "a_log", "dt_bias", "norm", "out")]


def _build(config: Config) -> Model:
    """Build Ling 3, whose decays and gates are full matrices; a safe decay is bounded."""
    layers = config.num_hidden_layers
    geometry: dict[MixerName, Any] = {
        "kimi_delta": {
            "heads": config.delta_key_heads or config.num_attention_heads,
            "dim": config.delta_key_dim or config.head_dim,
            "taps": config.conv_taps,
            "lower_bound": config.decay_lower_bound if config.bounds_decay else None,
        }
    }
    default: tuple[MixerName, ...] = tuple(
        "kimi_delta" if (layer + 1) % config.full_attention_interval else "attention" for layer in range(layers)
    )
    return build_model(
        config,
        **read_latent(config),
        **read_mixers(config, geometry, kinds=KINDS, default=default),
        output_gate=True,
        gate_per_head=True,
        moe=read_biased_experts(config) | read_mlp_layer_types(config, dense=config.first_k_dense_replace),
    )


def _write(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    net = model.kimi_delta
    sizes: dict[str, Any] = {}
    if net is not None:
        sizes = {
            "linear_head_dim": net.dim,
            "linear_num_heads": net.heads,
            "short_conv_kernel_size": net.taps,
            "kda_safe_gate": net.lower_bound is not None,
            "kda_lower_bound": net.lower_bound or -5.0,
        }
    return {
        **list_layer_kinds(model),
        **sizes,
        "rope_parameters": {"rope_theta": model.rope_theta, **decoder.write_scaling(model.rope_scaling)}
        if model.rope_scaling
        else {"rope_type": "default", "rope_theta": model.rope_theta},
    }


BAILING_HYBRID = Family(
    model_type="bailing_hybrid",
    architecture="BailingHybridForCausalLM",
    keys=decoder.KEYS
    | drop_keys(decoder.BIASED_EXPERT_KEYS, "n_routed_experts")
    | drop_keys(decoder.LATENT_KEYS, "q_lora_rank", "rope_interleave")
    | map_same_names("layer_types mlp_layer_types first_k_dense_replace num_experts")
    | {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "short_conv_kernel_size": "conv_taps",
        "linear_conv_kernel_dim": "conv_taps",
        "linear_head_dim": "delta_key_dim",
        "linear_num_heads": "delta_key_heads",
        "layer_group_size": "full_attention_interval",
        "kda_safe_gate": "bounds_decay",
        "kda_lower_bound": "decay_lower_bound",
    },
    defaults={
        **expand_names(vocab=157_184, width=2560, ffn=6144, layers=42, kv_heads=32, head_dim=128, positions=262_144),
        **expand_names(expert_ffn=768, experts=512, topk=8, shared_experts=1),
        "rope_theta": 6_000_000.0,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 2,
        **expand_names(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        "conv_taps": 4,
        "full_attention_interval": 6,
    },
    supported={
        "hidden_act": Supported(("silu", "swish"), "a convolution with an activation other than SiLU"),
        "tie_word_embeddings": Supported((False,), "a tied head, which transformers keeps apart from the embedding"),
    },
    to_model=_build,
    write=_write,
    tensors=decoder.BIASED_EXPERT_TENSORS
    | decoder.LATENT_TENSORS
    | {
        "attention.gate": "self_attn.g_proj",
        "mixer.decay": "self_attn.f_proj",
        "mixer.gate": "self_attn.g_proj",
        "moe.bias": "mlp.gate.expert_bias",
    }
    | {name: tensor for name, tensor in kimi_linear.KIMI_LINEAR.tensors.items() if name in MIXER_TENSORS},
    stacked_tensors=decoder.name_stacked_experts() | {"moe.bias": "mlp.gate.e_score_correction_bias"},
    renamed={
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.dense.": ".self_attn.o_proj.",
        ".attention.": ".self_attn.",
        ".forget_gate.": ".",
        ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
    },
    modules={".f_proj.": ".forget_gate.f_proj."},
    joined=kimi_linear.KIMI_LINEAR.joined,
)
