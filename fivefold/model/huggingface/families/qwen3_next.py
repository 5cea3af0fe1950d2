"""Qwen3-Next and Qwen3.5: Gated DeltaNets in three of four layers, gated attention in the fourth."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import FusedTensor, drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import (
    build_model,
    read_gated_experts,
    read_mixers,
)
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

KINDS: dict[str, MixerName] = {"linear_attention": "gated_delta_net", "full_attention": "attention"}
NAMES = {ours: theirs for theirs, ours in KINDS.items()}


def _build(config: Config, *, fused_projections: str = "qkv", **of_family: Any) -> Model:
    """Build the layers that all share; their norms, but for those of the scans, multiply by one plus their weight."""
    layers = range(config.num_hidden_layers)
    interval = config.full_attention_interval
    default: tuple[MixerName, ...] = tuple(
        "gated_delta_net" if (layer + 1) % interval else "attention" for layer in layers
    )
    geometry: dict[MixerName, Any] = {
        "gated_delta_net": {
            "key_heads": config.linear_key_heads,
            "value_heads": config.linear_value_heads,
            "key_dim": config.linear_key_dim,
            "value_dim": config.linear_value_dim,
            "taps": config.conv_taps,
            "fused_projections": fused_projections,
        }
    }
    fields = read_rope(config, has_partial_rotary=True)
    fields |= read_mixers(config, geometry, kinds=KINDS, default=default)
    fields |= {"qk_norm": "head", "norm_plus_one": True, "output_gate": True, "gate_in_query": True}
    return build_model(config, **fields, **of_family)


def write_delta_net(model: Model) -> dict[str, Any]:
    """Return the keys of the heads, dims and taps of a Gated DeltaNet; none if the model has no such layer."""
    net = model.gated_delta_net
    if net is None:
        return {}
    return {
        "linear_num_key_heads": net.key_heads,
        "linear_num_value_heads": net.value_heads,
        "linear_key_head_dim": net.key_dim,
        "linear_value_head_dim": net.value_dim,
        "linear_conv_kernel_dim": net.taps,
    }


def _write_layers(model: Model) -> dict[str, Any]:
    moe = model.moe
    return {
        "layer_types": [NAMES.get(model.mixer_name(layer), "full_attention") for layer in range(model.layers)],
        "partial_rotary_factor": model.rope_fraction,
        **({"shared_expert_intermediate_size": moe.shared_width} if moe else {}),
        **write_delta_net(model),
    }


def _write_qwen3_next(model: Model) -> dict[str, Any]:
    return _write_layers(model) | decoder.write_dense_layers(model)


QKV, QKVZ, BA = (tuple(f"mixer.{name}" for name in names) for names in ("qkv", "qkvz", "ba"))
GATED_Q = ("attention.q", "attention.gate")
KEYS = (
    drop_keys(decoder.KEYS, "hidden_act")
    | {
        "linear_conv_kernel_dim": "conv_taps",
        "linear_num_key_heads": "linear_key_heads",
        "linear_num_value_heads": "linear_value_heads",
        "linear_key_head_dim": "linear_key_dim",
        "linear_value_head_dim": "linear_value_dim",
    }
    | map_same_names("attention_bias layer_types full_attention_interval partial_rotary_factor")
)
ACTIVATION = {"hidden_act": Supported(("silu", "swish"), "a convolution with an activation other than SiLU")}
EXPERT_KEYS = map_same_names(
    "num_experts num_experts_per_tok router_aux_loss_coef moe_intermediate_size shared_expert_intermediate_size"
)
DEFAULTS = {
    **expand_names(vocab=248_320, ffn=12_288, heads=16, kv_heads=4, head_dim=256, positions=32_768),
    "partial_rotary_factor": 0.25,
    "conv_taps": 4,
}
EXPERT_DEFAULTS = {
    **DEFAULTS,
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}
TENSORS: dict[str, str | FusedTensor] = {
    **dict.fromkeys(GATED_Q, FusedTensor("self_attn.q_proj", GATED_Q, groups="heads")),
    "mixer.conv": "linear_attn.conv1d",
    "mixer.a_log": "linear_attn.A_log",
    "mixer.dt_bias": "linear_attn.dt_bias",
    "mixer.norm": "linear_attn.norm",
    "mixer.out": "linear_attn.out_proj",
}
EXPERT_TENSORS = decoder.SHARED_EXPERT_TENSOR | {"moe.shared_gate": "mlp.shared_expert_gate"}
QWEN3_5_TENSORS: dict[str, str | FusedTensor] = {
    **TENSORS,
    **dict.fromkeys(QKV, FusedTensor("linear_attn.in_proj_qkv", QKV)),
    **{f"mixer.{name}": f"linear_attn.in_proj_{name}" for name in "zba"},
}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    keys=KEYS | EXPERT_KEYS | map_same_names("norm_topk_prob mlp_only_layers decoder_sparse_step"),
    defaults={
        **EXPERT_DEFAULTS,
        **expand_names(vocab=151_936, ffn=5632, layers=48),
        **expand_names(experts=512, topk=10),
    },
    supported=ACTIVATION,
    to_model=lambda config: _build(config, fused_projections="qkvz", moe=read_gated_experts(config)),
    write=_write_qwen3_next,
    tensors=decoder.EXPERT_TENSORS
    | TENSORS
    | EXPERT_TENSORS
    | dict.fromkeys(QKVZ, FusedTensor("linear_attn.in_proj_qkvz", QKVZ, groups="mixer_key_heads"))
    | dict.fromkeys(BA, FusedTensor("linear_attn.in_proj_ba", BA, groups="mixer_key_heads")),
    stacked_tensors=decoder.name_stacked_experts(),
)
QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    keys=KEYS,
    defaults=DEFAULTS,
    supported=ACTIVATION,
    to_model=_build,
    has_mrope=True,
    write=_write_layers,
    tensors=decoder.TENSORS | QWEN3_5_TENSORS,
)
# Qwen3.5's text model with experts: Qwen3-Next, all of whose layers have experts.
QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    keys=drop_keys(KEYS, "intermediate_size") | EXPERT_KEYS,
    defaults={
        **EXPERT_DEFAULTS,
        "num_hidden_layers": 40,
        **expand_names(experts=256, topk=8),
    },
    supported=ACTIVATION,
    to_model=lambda config: _build(config, ffn=config.moe_intermediate_size, moe=read_gated_experts(config)),
    has_mrope=True,
    write=_write_layers,
    tensors=decoder.EXPERT_TENSORS | QWEN3_5_TENSORS | EXPERT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)
WRAPPERS = (
    Wrapper("qwen3_5", "Qwen3_5ForConditionalGeneration", text="qwen3_5_text", tied=False, is_separable=True),
    Wrapper(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", text="qwen3_5_moe_text", tied=False, is_separable=True
    ),
)
