"""Falcon-H1: attention and Mamba-2 in parallel in each layer, with factors on their tensors (arXiv:2507.22448)."""

from __future__ import annotations

from typing import Any

from fivefold.model.factors import Multipliers
from fivefold.model.huggingface import decoder, state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model

FACTORS = {  # their key → our field of ``Multipliers``
    "attention_in_multiplier": "attention_in",
    "attention_out_multiplier": "attention_out",
    "key_multiplier": "key",
    "ssm_in_multiplier": "mixer_in",
    "ssm_out_multiplier": "mixer_out",
}


def _build_falcon_h1(config: Config) -> Model:
    """Build Falcon-H1, whose Mamba-2 may have any width."""
    width = config.ssm_inner or config.ssm_expand * config.hidden_size
    dim = width // config.ssm_heads if config.ssm_head_dim == "auto" else config.ssm_head_dim
    if not isinstance(dim, int) or dim * config.ssm_heads != width:
        raise config.mistake(
            f"mamba_n_heads={config.ssm_heads} · mamba_d_head={dim} is not mamba_d_ssm={width}; change one"
        )
    if config.ssm_bias != config.ssm_out_bias:
        raise config.mistake("mamba_proj_bias and projectors_bias differ, which is not supported; give both one value")
    order = "before_gate" if config.norms_before_gate else "after_gate"
    net = state_space.read_states(config) | state_space.read_limits(config)
    return build_model(
        config,
        joins_mamba2=True,
        mamba2={"head_dim": dim, "norm": order if config.norms_states else "none", **net},
        multipliers={ours: getattr(config, theirs) for theirs, ours in FACTORS.items()} | _read_lists(config),
        embedding_scale=config.embedding_multiplier,
        logit_scale=config.logit_scale,
    )


def _read_lists(config: Config) -> dict[str, Any]:
    """Return the factors on the parts of the Mamba-2's projection and on the gate and output of the MLP."""
    parts = config.ssm_multipliers or ()
    mlp = config.mlp_multipliers or (1.0, 1.0)
    if len(parts) not in (0, 5) or len(mlp) != 2:
        raise config.mistake(f"{len(parts)} ssm_multipliers and {len(mlp)} mlp_multipliers; give five and two")
    return {"mixer_parts": () if set(parts) <= {1.0} else parts, "gate": mlp[0], "down": mlp[1]}


def _write_falcon_h1(model: Model) -> dict[str, Any]:
    """Return the keys of Falcon-H1: its state space layers and its multipliers."""
    net, factors = model.mamba2, model.multipliers or Multipliers()
    sizes: dict[str, Any] = {}
    if net is not None:
        sizes = {"mamba_d_ssm": net.inner_width, "projectors_bias": net.bias, "mamba_rms_norm": net.norm != "none"}
        sizes |= {"mamba_norm_before_gate": net.norm != "after_gate", "mamba_expand": 2}
    return {
        **state_space.write_mamba2(model),
        **sizes,
        **{theirs: getattr(factors, ours) for theirs, ours in FACTORS.items()},
        "ssm_multipliers": [*(factors.mixer_parts or (1.0,) * 5)],
        "mlp_multipliers": [factors.gate, factors.down],
    }


FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    keys=decoder.drop_keys(decoder.KEYS, "hidden_act")
    | map_same_names("attention_bias mlp_bias embedding_multiplier ssm_multipliers mlp_multipliers")
    | map_same_names(" ".join(FACTORS))
    | state_space.KEYS
    | {
        "mamba_d_ssm": "ssm_inner",
        "mamba_rms_norm": "norms_states",
        "mamba_norm_before_gate": "norms_before_gate",
        "projectors_bias": "ssm_out_bias",
        "lm_head_multiplier": "logit_scale",
    },
    defaults={
        **state_space.DEFAULTS,
        **expand_names(vocab=128_000, ffn=14_336, kv_heads=8, positions=8192),
        "norm_epsilon": 1e-5,
        "ssm_inner": 1024,
        "norms_before_gate": True,
    },
    supported=state_space.ACTIVATION,
    overwritten=("layers_block_type",),
    to_model=_build_falcon_h1,
    write=_write_falcon_h1,
    tensors=state_space.HYBRID_TENSORS,
)
