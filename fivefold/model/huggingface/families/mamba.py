"""Mamba and Falcon Mamba: only state-space layers, without feed-forwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.huggingface import state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model


def _build(config: Config, **norms: Any) -> Model:
    """Build Mamba; heads and feed-forward of a model that has neither attention nor MLPs are not used."""
    net = state_space.read_mamba(config) | norms
    if config.intermediate_size is not None:  # takes precedence over ``expand``
        net["inner"] = config.intermediate_size
    unused = state_space.fill_unused_sizes(1, 1)
    return build_model(config, mixers=("mamba",), mamba=net, feed_forwards=(False,), position="none", **unused)


def _write_mamba(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    net = model.mamba
    return (
        {}
        if net is None
        else {
            "expand": net.inner // model.width,
            "intermediate_size": net.inner,
            "state_size": net.state,
            "time_step_rank": net.rank,
            "conv_kernel": net.taps,
            "use_conv_bias": net.conv_bias,
            "use_bias": net.bias,
        }
    )


def _write_falcon_mamba(model: Model) -> dict[str, Any]:
    epsilon = model.mamba and model.mamba.norm_epsilon
    return _write_mamba(model) | ({"mixer_rms_eps": epsilon} if epsilon else {})


MAMBA = Family(
    model_type="mamba",
    architecture="MambaForCausalLM",
    keys=map_same_names("vocab_size hidden_size intermediate_size num_hidden_layers tie_word_embeddings")
    | {
        "layer_norm_epsilon": "norm_epsilon",
        "state_size": "ssm_state",
        "time_step_rank": "ssm_rank",
        "conv_kernel": "conv_taps",
        "expand": "ssm_expand",
        "use_conv_bias": "conv_bias",
        "use_bias": "ssm_bias",
    },
    defaults={
        **state_space.UNUSED,
        "intermediate_size": None,
        "vocab_size": 50_280,
        "hidden_size": 768,
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "ssm_state": 16,
        "conv_taps": 4,
        "conv_bias": True,
    },
    supported=state_space.ACTIVATION,
    to_model=_build,
    write=_write_mamba,
    tensors=state_space.BACKBONE_TENSORS,
)
# Falcon Mamba, whose steps, B and C are normed without weights.
FALCON_MAMBA = replace(
    MAMBA,
    model_type="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    keys={**MAMBA.keys, **map_same_names("mixer_rms_eps")},
    to_model=lambda config: _build(config, norms="unit", norm_epsilon=config.mixer_rms_eps),
    write=_write_falcon_mamba,
)
