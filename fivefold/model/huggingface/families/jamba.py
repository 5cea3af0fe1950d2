"""Jamba: Mamba in seven of eight layers, attention without positions in the eighth; experts in every second layer."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder, state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, find_period, read_experts, read_mixers
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model


def _build_jamba(config: Config) -> Model:
    """Build Jamba, whose periods and offsets say which layers attend and which have experts."""
    layers = range(config.num_hidden_layers)
    for every, first in (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset")):
        if getattr(config, first) >= getattr(config, every):
            raise config.mistake(
                f"{first}={getattr(config, first)} is not below {every}={getattr(config, every)}, with which "
                "transformers' code fails; lower it"
            )
    attends = [layer % config.attn_layer_period == config.attn_layer_offset for layer in layers]
    routes = [layer % config.expert_layer_period == config.expert_layer_offset for layer in layers]
    default: tuple[MixerName, ...] = tuple("attention" if attention else "mamba" for attention in attends)
    net = state_space.read_mamba(config) | {"norms": "weighted"}
    fields = read_mixers(config, {"mamba": net}, kinds={}, default=default) | {"position": "none"}
    if (config.num_experts or 0) > 1 and any(routes):
        experts = read_experts(config, normalized=False, pattern=find_period(tuple(routes)))
        fields["moe"] = experts
    return build_model(config, **fields)


def _write_layers(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    net = model.mamba
    layers = range(model.layers)
    period, offset = _find_every([model.has_attention(layer) for layer in layers])
    expert_period, expert_offset = _find_every([model.is_moe(layer) for layer in layers])
    states = (
        {}
        if net is None
        else {
            "mamba_expand": net.inner // model.width,
            "mamba_d_state": net.state,
            "mamba_dt_rank": net.rank,
            "mamba_d_conv": net.taps,
            "mamba_conv_bias": net.conv_bias,
            "mamba_proj_bias": net.bias,
        }
    )
    return {
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        **({} if model.moe else {"num_experts": 1}),
        **states,
    }


def _find_every(layers: list[bool]) -> tuple[int, int]:
    """Return the period and the first of the layers that are True; a period longer than the model if none is."""
    if True not in layers:
        return len(layers) + 1, len(layers)
    first = layers.index(True)
    second = layers.index(True, first + 1) if layers.count(True) > 1 else len(layers) + first
    return second - first, first


JAMBA = Family(
    model_type="jamba",
    architecture="JambaForCausalLM",
    keys=drop_keys(decoder.SIZES, "tie_word_embeddings")
    | map_same_names("tie_word_embeddings num_key_value_heads head_dim attn_layer_period attn_layer_offset")
    | map_same_names("expert_layer_period expert_layer_offset")
    | decoder.EXPERT_KEYS
    | {
        "num_local_experts": "num_experts",
        "num_experts": "num_experts",
        "rms_norm_eps": "norm_epsilon",
        "mamba_expand": "ssm_expand",
        "mamba_d_state": "ssm_state",
        "mamba_dt_rank": "ssm_rank",
        "mamba_d_conv": "conv_taps",
        "mamba_conv_bias": "conv_bias",
        "mamba_proj_bias": "ssm_bias",
    },
    defaults={
        **expand_names(vocab=65_536, ffn=14_336, kv_heads=8, positions=262_144),
        **expand_names(experts=16, topk=2),
        "router_aux_loss_coef": 0.001,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "ssm_state": 16,
        "conv_taps": 4,
        "conv_bias": True,
    },
    supported=state_space.ACTIVATION,
    overwritten=("layers_block_type", "layers_num_experts"),
    to_model=_build_jamba,
    write=_write_layers,
    tensors=state_space.HYBRID_TENSORS
    | {
        "moe.router": "feed_forward.router",
        "moe.experts.gate": "feed_forward.experts.{}.gate_proj.weight",
        "moe.experts.up": "feed_forward.experts.{}.up_proj.weight",
        "moe.experts.down": "feed_forward.experts.{}.down_proj.weight",
    },
    stacked_tensors=decoder.name_stacked_experts("feed_forward", router="router"),
)
