"""Kimi Linear: Kimi delta attention in three of four layers, latent attention without positions in the fourth."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
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

KINDS: dict[str, MixerName] = {"linear_attention": "kimi_delta", "full_attention": "attention"}
NAMES = {ours: theirs for theirs, ours in KINDS.items()}


def _build(config: Config) -> Model:
    """Build Kimi Linear; keys of ``linear_attn_config``, as in published files, take precedence."""
    published = config.linear_attn_config or {}
    dim = published.get("head_dim", config.linear_head_dim)
    geometry: dict[MixerName, Any] = {
        "kimi_delta": {
            "heads": published.get("num_heads", config.linear_num_heads),
            "dim": dim,
            "rank": dim,
            "taps": published.get("short_conv_kernel_size", config.conv_taps),
        }
    }
    return build_model(
        config,
        **read_latent(config, {"rope_scaling": None}),
        **read_mixers(config, geometry, kinds=KINDS, default=_list_mixers(config, published)),
        position="none",
        moe=read_biased_experts(config) | read_mlp_layer_types(config, dense=config.first_k_dense_replace),
    )


def _list_mixers(config: Config, published: dict[str, Any]) -> tuple[MixerName, ...]:
    """Return the mixers of a config without ``layer_types``: as listed from layer 1 on, or every fourth attends."""
    layers, lists = config.num_hidden_layers, {"full_attn_layers": "attention", "kda_layers": "kimi_delta"}
    if not all(key in published for key in lists):
        return tuple("attention" if layer and layer % 4 == 0 else "kimi_delta" for layer in range(layers))
    mixers: dict[int, Any] = {layer: mixer for key, mixer in lists.items() for layer in published[key]}
    if sorted(mixers) != list(range(1, layers + 1)):
        raise config.mistake(f"linear_attn_config does not list each layer from 1 to {layers}, num_hidden_layers")
    return tuple(mixers[layer] for layer in range(1, layers + 1))


def list_layer_kinds(model: Model) -> dict[str, list[str]]:
    """Return the kinds of token mixers and of feed-forwards of all layers."""
    layers = range(model.layers)
    return {
        "layer_types": [NAMES.get(model.mixer_name(layer), "full_attention") for layer in layers],
        "mlp_layer_types": ["sparse" if model.is_moe(layer) else "dense" for layer in layers],
    }


def _write(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    net = model.kimi_delta
    sizes = (
        {"linear_num_heads": net.heads, "linear_head_dim": net.dim, "linear_conv_kernel_dim": net.taps} if net else {}
    )
    return {**list_layer_kinds(model), **sizes}


KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    keys=drop_keys(decoder.SIZES, "tie_word_embeddings")
    | drop_keys(decoder.BIASED_EXPERT_KEYS, "n_routed_experts")
    | drop_keys(decoder.LATENT_KEYS, "rope_interleave")
    | map_same_names(
        "num_key_value_heads layer_types mlp_layer_types first_k_dense_replace linear_attn_config linear_head_dim "
        "linear_num_heads num_experts"
    )
    | {
        "rms_norm_eps": "norm_epsilon",
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
        "linear_conv_kernel_dim": "conv_taps",
    },
    defaults={
        **expand_names(vocab=163_840, width=2304, ffn=9216, layers=27, kv_heads=32, positions=1_048_576),
        "norm_epsilon": 1e-5,
        **expand_names(kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, v_dim=128),
        **expand_names(expert_ffn=1024, shared_experts=1, experts=256, topk=8),
        "routed_scaling_factor": 2.446,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "conv_taps": 4,
    },
    supported={"hidden_act": Supported(("silu", "swish"), "a convolution with an activation other than SiLU")},
    to_model=_build,
    write=_write,
    tensors=decoder.TENSORS
    | decoder.LATENT_TENSORS
    | {
        "moe.router": "block_sparse_moe.gate",
        "moe.bias": "block_sparse_moe.gate.e_score_correction_bias",
        "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
        "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
        "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
    }
    | {f"moe.shared.{part}": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    | {f"mixer.{name}": f"self_attn.{name}_proj" for name in "qkvb"}
    | {
        f"mixer.{name}_{end}": f"self_attn.{theirs}_{place}_proj"
        for name, theirs in (("decay", "f"), ("gate", "g"))
        for end, place in (("down", "a"), ("up", "b"))
    }
    | {
        "mixer.conv": "self_attn.conv1d",
        "mixer.a_log": "self_attn.A_log",
        "mixer.dt_bias": "self_attn.dt_bias",
        "mixer.norm": "self_attn.o_norm",
        "mixer.out": "self_attn.o_proj",
    },
    stacked_tensors=decoder.name_stacked_experts()
    | decoder.SHARED_EXPERT_TENSORS
    | {"moe.bias": "mlp.gate.e_score_correction_bias"},
    # transformers writes the dense layers under the place of the experts
    renamed={f"block_sparse_moe.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    joined={"self_attn.conv1d.weight": tuple(f"self_attn.{name}_conv1d.weight" for name in "qkv")},
    modules={".block_sparse_moe.": ".mlp.", **{f".f_{part}_proj.": f".forget_gate.f_{part}_proj." for part in "ab"}},
    ones={"mixer.a_log": (0, 1, 3)},
)
