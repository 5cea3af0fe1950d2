"""OLMo Hybrid: Gated DeltaNets that norm their inputs in three of four layers, OLMo 2's layers in the fourth."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.families.qwen3_next import KINDS, NAMES, write_delta_net
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_mixers
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

NORM_EPSILON = 1e-5  # of the norms of the Gated DeltaNets' outputs, whatever the config says


def _build_olmo_hybrid(config: Config) -> Model:
    """Build OLMo Hybrid; without a rotary base nothing rotates."""
    layers = range(config.num_hidden_layers)
    default: tuple[MixerName, ...] = tuple("attention" if layer % 4 == 3 else "gated_delta_net" for layer in layers)
    if "attention" not in default:
        default = (*default[:-1], "attention")
    heads = config.num_attention_heads
    key_heads = config.delta_key_heads or heads
    key_dim = config.delta_key_dim or int(0.75 * config.hidden_size / key_heads)
    geometry: dict[MixerName, Any] = {
        "gated_delta_net": {
            "key_heads": key_heads,
            "value_heads": config.delta_value_heads or heads,
            "key_dim": key_dim,
            "value_dim": config.delta_value_dim or 2 * key_dim,
            "taps": config.conv_taps,
            "negative_eigenvalues": config.negative_eigenvalues,
            "norm_epsilon": NORM_EPSILON,
            "fused_projections": "separate",
        }
    }
    fields = read_mixers(config, geometry, kinds=KINDS, default=default)
    kinds = {fields["mixers"][layer % len(fields["mixers"])] for layer in layers} if fields["mixers"] else set()
    if kinds != set(KINDS.values()):
        raise config.mistake("layer_types must have linear_attention and full_attention layers; give both")
    given = config.rope_scaling or config.rope_parameters or {}
    if given.get("rope_theta", config.rope_theta) is None:
        fields |= {"position": "none"}
    return build_model(config, **fields, block="post", pre_norm_mixers=True, qk_norm="full")


def _write_olmo_hybrid(model: Model) -> dict[str, Any]:
    net = model.gated_delta_net
    scaling = decoder.write_scaling(model.rope_scaling) if model.rope_scaling else {"rope_type": "default"}
    return {
        "layer_types": [NAMES.get(model.mixer_name(layer), "full_attention") for layer in range(model.layers)],
        "rope_parameters": {**scaling, "rope_theta": model.rope_theta if model.position == "rope" else None},
        **write_delta_net(model),
        **({"linear_allow_neg_eigval": net.negative_eigenvalues} if net else {}),
    }


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    keys=decoder.GROUPED
    | map_same_names("attention_bias layer_types")
    | {
        "linear_num_key_heads": "delta_key_heads",
        "linear_num_value_heads": "delta_value_heads",
        "linear_key_head_dim": "delta_key_dim",
        "linear_value_head_dim": "delta_value_dim",
        "linear_conv_kernel_dim": "conv_taps",
        "linear_allow_neg_eigval": "negative_eigenvalues",
    },
    defaults={
        **expand_names(vocab=100_352, width=3840, ffn=11_008, heads=30, positions=65_536),
        "conv_taps": 4,
        "negative_eigenvalues": True,
    },
    supported={"hidden_act": Supported(("silu", "swish"), "a convolution with an activation other than SiLU")},
    to_model=_build_olmo_hybrid,
    write=_write_olmo_hybrid,
    tensors=decoder.TENSORS
    | {f"mixer.{name}": f"linear_attn.{name}_proj" for name in "qkvba"}
    | {
        "mixer.z": "linear_attn.g_proj",
        "mixer.conv": "linear_attn.conv1d",
        "mixer.a_log": "linear_attn.A_log",
        "mixer.dt_bias": "linear_attn.dt_bias",
        "mixer.norm": "linear_attn.o_norm",
        "mixer.out": "linear_attn.o_proj",
    },
    block_tensors={"post": {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}},
    # published; transformers has other names in memory, which it reads from files too
    renamed={"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"},
    joined={"linear_attn.conv1d.weight": tuple(f"linear_attn.{name}_conv1d.weight" for name in "qkv")},
)
