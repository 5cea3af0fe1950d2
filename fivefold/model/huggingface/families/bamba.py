"""Bamba: Mamba-2 in most layers, attention whose heads rotate by half in the others."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder, state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_mixers
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model


def _build_bamba(config: Config) -> Model:
    attends = config.full_attention_layers or ()
    layers = range(config.num_hidden_layers)
    default: tuple[MixerName, ...] = tuple("attention" if layer in attends else "mamba2" for layer in layers)
    mixers = read_mixers(config, {"mamba2": state_space.read_mamba2(config)}, kinds={}, default=default)
    fields = read_rope(config, has_partial_rotary=True)
    return build_model(config, **fields, **mixers)


def _write_layers(model: Model) -> dict[str, Any]:
    attends = [layer for layer in range(model.layers) if model.has_attention(layer)]
    return {"attn_layer_indices": attends, **state_space.write_mamba2(model)}


BAMBA = Family(
    model_type="bamba",
    architecture="BambaForCausalLM",
    keys=decoder.drop_keys(decoder.KEYS, "hidden_act", *decoder.UNREAD_ROTARY_FACTOR)
    | map_same_names("attention_bias mlp_bias")
    | {"attn_layer_indices": "full_attention_layers"}
    | state_space.KEYS,
    defaults={
        **state_space.DEFAULTS,
        **expand_names(vocab=128_000, ffn=14_336, kv_heads=8, positions=262_144),
        "norm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    supported=state_space.ACTIVATION,
    overwritten=("layers_block_type", "partial_rotary_factor"),
    to_model=_build_bamba,
    write=_write_layers,
    tensors=state_space.HYBRID_TENSORS,
)
