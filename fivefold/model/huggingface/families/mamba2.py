"""Mamba-2: only state-space layers, without feed-forwards."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model


def _build_mamba2(config: Config) -> Model:
    """Build Mamba-2; heads and feed-forward of a model that has neither attention nor MLPs are not used."""
    net = state_space.read_mamba2(config)
    return build_model(
        config,
        mixers=("mamba2",),
        mamba2=net,
        feed_forwards=(False,),
        position="none",
        **state_space.fill_unused_sizes(net["heads"], net["head_dim"]),
    )


KEYS = map_same_names("vocab_size hidden_size num_hidden_layers tie_word_embeddings time_step_limit") | {
    "layer_norm_epsilon": "norm_epsilon",
    "num_heads": "ssm_heads",
    "head_dim": "ssm_head_dim",
    "state_size": "ssm_state",
    "n_groups": "ssm_groups",
    "conv_kernel": "conv_taps",
    "expand": "ssm_expand",
    "chunk_size": "ssm_chunk",
    "use_conv_bias": "conv_bias",
    "use_bias": "ssm_bias",
}


def _write_layers(model: Model) -> dict[str, Any]:
    return state_space.write_mamba2(model, KEYS)


MAMBA2 = Family(
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    keys=KEYS,
    defaults={
        **state_space.UNUSED,
        **state_space.DEFAULTS,
        "vocab_size": 32_768,
        "num_hidden_layers": 64,
        "norm_epsilon": 1e-5,
        "ssm_head_dim": 64,
        "ssm_groups": 8,
        "ssm_state": 128,
    },
    supported=state_space.ACTIVATION,
    to_model=_build_mamba2,
    write=_write_layers,
    tensors=state_space.BACKBONE_TENSORS,
)
