"""Nemotron-H and Nemotron 3: one branch in each layer, which is Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder, state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, find_period, read_biased_experts, read_mtp
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

KINDS: dict[str, MixerName] = state_space.KINDS | {"moe": "none", "mlp": "none"}
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # of hybrid_override_pattern
MTP_LAYERS = ("full_attention", "moe")
DEFAULT_LAYERS = ("linear_attention", "moe", "full_attention", "mlp")


def _list_layers(config: Config) -> tuple[str, ...]:
    """Return the kind of each layer."""
    layers = config.layer_types
    if layers is None and config.layer_pattern is not None:
        if unknown := sorted(set(config.layer_pattern) - set(LETTERS)):
            raise config.mistake(f"hybrid_override_pattern has {unknown[0]!r}; known: {' '.join(LETTERS)}")
        layers = tuple(LETTERS[letter] for letter in config.layer_pattern)
    layers = DEFAULT_LAYERS if layers is None else layers
    if unknown := sorted(set(layers) - set(KINDS)):
        raise config.mistake(f"layer type {unknown[0]!r} is not supported; supported: {', '.join(LETTERS.values())}")
    if not layers:
        raise config.mistake("layers_block_type names no layers; give one or more")
    return layers


def _build_nemotron_h(config: Config) -> Model:
    """Build Nemotron-H, whose layers each have one branch: Mamba-2, attention, an MLP or experts."""
    kinds = _list_layers(config)
    mixers = tuple(KINDS[kind] for kind in kinds)
    fields: dict[str, Any] = {"mixers": find_period(mixers), "position": "none", "mlp": "plain"}
    if not all(mixer == "none" for mixer in mixers):
        fields["feed_forwards"] = find_period(tuple(mixer == "none" for mixer in mixers))
    if "mamba2" in mixers:
        limits = {"min_step": config.time_step_min}
        fields["mamba2"] = {"head_dim": config.ssm_head_dim, **state_space.read_states(config), **limits}
    if "moe" in kinds:
        fields["moe"] = read_biased_experts(config) | {
            "shared_experts": 1,
            "shared_ffn": config.shared_expert_intermediate_size,
            "latent_width": config.moe_latent_size,
            "pattern": find_period(tuple(kind == "moe" for kind in kinds)),
        }
    return build_model(config, layers=len(kinds), **fields, mtp=_read_mtp(config, routes="moe" in kinds))


def _read_mtp(config: Config, *, routes: bool) -> dict[str, Any] | None:
    """Return the modules of multi-token prediction, each of which has a layer of attention and one of experts.

    ``routes``: whether layers of the model have experts, whose sizes those of the modules have.
    """
    mtp, pattern, kinds = read_mtp(config), config.mtp_layer_pattern, config.mtp_layer_types
    if mtp is None:
        return None
    if pattern is not None and kinds in (None, MTP_LAYERS):
        kinds = tuple(LETTERS.get(letter, letter) for letter in pattern)
    names = tuple({"attention": "full_attention"}.get(kind, kind) for kind in kinds or MTP_LAYERS)
    if names != MTP_LAYERS or not routes:
        raise config.mistake(
            f"num_nextn_predict_layers={config.num_nextn_predict_layers} with layers {', '.join(names)}: modules of "
            "multi-token prediction have full_attention and moe, in a model with experts; give 0, or these layers"
        )
    return mtp


def _write_layers(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    net, moe = model.mamba2, model.moe
    kinds = [
        "linear_attention"
        if model.mixer(layer)
        else "full_attention"
        if model.has_attention(layer)
        else "moe"
        if model.is_moe(layer)
        else "mlp"
        for layer in range(model.layers)
    ]
    states = (
        {}
        if net is None
        else {
            "mamba_num_heads": net.heads,
            "mamba_head_dim": net.head_dim,
            "n_groups": net.groups,
            "ssm_state_size": net.state,
            "conv_kernel": net.taps,
            "chunk_size": net.chunk,
            "use_conv_bias": net.conv_bias,
            "use_bias": net.bias,
            "time_step_min": net.min_step,
        }
    )
    shared = {"moe_shared_expert_intermediate_size": moe.shared_width} if moe else {}
    return {"layers_block_type": kinds, "num_hidden_layers": model.layers, **states, **shared}


MIXER_TENSORS = {
    **{f"attention.{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "attention.out": "mixer.o_proj",
    "mlp.up": "mixer.up_proj",
    "mlp.down": "mixer.down_proj",
    "moe.router": "mixer.gate",
    "moe.bias": "mixer.gate.e_score_correction_bias",
    "moe.latent_down": "mixer.fc1_latent_proj",
    "moe.latent_up": "mixer.fc2_latent_proj",
    "moe.experts.up": "mixer.experts.{}.up_proj.weight",
    "moe.experts.down": "mixer.experts.{}.down_proj.weight",
    "moe.shared.up": "mixer.shared_experts.up_proj",
    "moe.shared.down": "mixer.shared_experts.down_proj",
}

NEMOTRON_H = Family(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    keys=drop_keys(decoder.SIZES, "num_hidden_layers", "tie_word_embeddings")
    | drop_keys(decoder.BIASED_EXPERT_KEYS, "n_shared_experts")
    | map_same_names("num_key_value_heads head_dim mlp_bias layer_types time_step_min moe_latent_size")
    | {
        "layers_block_type": "layer_types",
        "hybrid_override_pattern": "layer_pattern",
        "mtp_layers_block_type": "mtp_layer_types",
        "mtp_hybrid_override_pattern": "mtp_layer_pattern",
        "num_nextn_predict_layers": "num_nextn_predict_layers",
        "mlp_hidden_act": "hidden_act",
        "layer_norm_epsilon": "norm_epsilon",
        "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        "mamba_n_groups": "ssm_groups",  # the names of older files
        "mamba_d_conv": "conv_taps",
        "mamba_chunk_size": "ssm_chunk",
        "mamba_conv_bias": "conv_bias",
        "mamba_dt_min": "time_step_min",
        "mamba_num_heads": "ssm_heads",
        "mamba_head_dim": "ssm_head_dim",
        "n_groups": "ssm_groups",
        "ssm_state_size": "ssm_state",
        "conv_kernel": "conv_taps",
        "chunk_size": "ssm_chunk",
        "use_conv_bias": "conv_bias",
        "use_bias": "ssm_bias",
    },
    defaults={
        **state_space.DEFAULTS,
        **expand_names(vocab=131_072, layers=4, kv_heads=8, head_dim=128, positions=4096, ffn=21_504),
        "hidden_act": "relu2",
        "norm_epsilon": 1e-5,
        "ssm_head_dim": 64,
        "ssm_groups": 8,
        "ssm_state": 128,
        "ssm_chunk": 128,
        "time_step_min": 0.001,
        **expand_names(experts=8, topk=2, expert_ffn=7688),
        "shared_expert_intermediate_size": 7688,
    },
    supported={
        "mamba_hidden_act": Supported(("silu", "swish"), "a convolution with an activation other than SiLU"),
    },
    overwritten=("num_hidden_layers", "expand", "mamba_expand", "time_step_limit", "mamba_dt_limit"),
    to_model=_build_nemotron_h,
    write=_write_layers,
    tensors=state_space.BACKBONE_TENSORS | MIXER_TENSORS | {"norm2": "norm"},
    modules={"backbone.": "model."},
    mtp_tensors={
        "blocks": "mtp.layers",
        "mtp.embed_norm": "<0>.enorm",
        "mtp.hidden_norm": "<0>.hnorm",
        "mtp.project": "<0>.eh_proj",
        "norm1": "<0>.norm",
        "norm2": "<1>.norm",
        "mtp.norm": "<1>.final_layernorm",
        **{ours: f"<0>.{theirs}" for ours, theirs in MIXER_TENSORS.items() if ours.startswith("attention.")},
        **{ours: f"<1>.{theirs}" for ours, theirs in MIXER_TENSORS.items() if ours.startswith("moe.")},
    },
    stacked_tensors={"moe.experts.up": "mixer.experts.up_proj", "moe.experts.down": "mixer.experts.down_proj"},
)
