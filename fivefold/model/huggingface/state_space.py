"""State-space layers of a Hugging Face ``config.json``: keys, geometry, and names of tensors.

Source: configuration and modelling code of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import map_same_names
from fivefold.model.huggingface.family import Supported
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model
from fivefold.units import ceil_div

KINDS: dict[str, MixerName] = {
    "linear_attention": "mamba2", "mamba": "mamba2", "full_attention": "attention", "attention": "attention",
}  # fmt: skip
ACTIVATION = {"hidden_act": Supported(("silu", "swish"), "a convolution with an activation other than SiLU")}
KEYS = {  # of Bamba and Granite 4
    "mamba_n_heads": "ssm_heads",
    "mamba_d_head": "ssm_head_dim",
    "mamba_n_groups": "ssm_groups",
    "mamba_d_state": "ssm_state",
    "mamba_d_conv": "conv_taps",
    "mamba_expand": "ssm_expand",
    "mamba_chunk_size": "ssm_chunk",
    "mamba_conv_bias": "conv_bias",
    "mamba_proj_bias": "ssm_bias",
} | map_same_names("time_step_limit")
DEFAULTS = {
    "ssm_heads": 128,
    "ssm_head_dim": "auto",
    "ssm_state": 256,
    "conv_taps": 4,
    "ssm_chunk": 256,
    "conv_bias": True,
}

# Of a model without attention and MLPs, whose heads, feed-forward and positions are not used.
UNUSED = {"num_attention_heads": 1, "intermediate_size": 1, "max_position_embeddings": 2**20}


def fill_unused_sizes(heads: int, head_dim: int) -> dict[str, int]:
    """Return the required sizes of attention and MLP of a model that has neither: those of its states."""
    return {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "ffn": 1}


def list_tensors(place: str) -> dict[str, str]:
    """Return the names of the tensors of a Mamba or Mamba-2 layer whose module is ``place``."""
    names = {"project": "in_proj", "conv": "conv1d", "a_log": "A_log", "d": "D", "out": "out_proj"}
    names |= {name: name for name in ("dt_bias", "norm")} | {"select": "x_proj", "step": "dt_proj"}
    names |= {f"{name}_norm": f"{name}_layernorm" for name in ("dt", "b", "c")}
    return {f"mixer.{ours}": f"{place}.{theirs}" for ours, theirs in names.items()}


BACKBONE_TENSORS = {  # of Mamba, Mamba-2 and Nemotron-H
    **list_tensors("mixer"),
    "blocks": "backbone.layers.{}",
    "embed.tokens": "backbone.embeddings",
    "head.norm": "backbone.norm_f",
    "head.out": "lm_head",
    "norm1": "norm",
}
HYBRID_TENSORS = {  # of Bamba and Jamba
    **decoder.TENSORS,
    **list_tensors("mamba"),
    "head.norm": "model.final_layernorm",
    "norm2": "pre_ff_layernorm",
    "mlp.gate": "feed_forward.gate_proj",
    "mlp.up": "feed_forward.up_proj",
    "mlp.down": "feed_forward.down_proj",
}


def read_mamba2(config: Config) -> dict[str, Any]:
    """Return the fields of Mamba-2 layers, whose heads are together ``expand`` times as wide as the stream."""
    inner = config.ssm_expand * config.hidden_size
    heads = config.ssm_heads
    dim = config.ssm_head_dim
    if dim in ("auto", None):
        dim = inner // heads
    if not isinstance(dim, int) or dim * heads != inner:
        raise config.mistake(
            f"heads · head dim = {heads} · {dim} is not expand · hidden_size = {config.ssm_expand} · "
            f"{config.hidden_size}, and transformers' code fails; change one"
        )
    return {"head_dim": dim, **read_states(config), **read_limits(config)}


def read_mamba(config: Config) -> dict[str, Any]:
    """Return the fields of Mamba layers, which are ``expand`` times as wide as the stream."""
    if config.ssm_rank != "auto" and not isinstance(config.ssm_rank, int):
        raise config.mistake(f"time_step_rank={config.ssm_rank!r} is not a number; give one, or 'auto'")
    return {
        "inner": config.ssm_expand * config.hidden_size,
        "state": config.ssm_state,
        "rank": ceil_div(config.hidden_size, 16) if isinstance(config.ssm_rank, str) else config.ssm_rank,
        "taps": config.conv_taps,
        "conv_bias": config.conv_bias,
        "bias": config.ssm_bias,
    }


def read_states(config: Config) -> dict[str, Any]:
    """Return the fields of Mamba-2 layers other than the heads' width and the limits of the steps."""
    if config.ssm_heads % config.ssm_groups:
        raise config.mistake(
            f"{config.ssm_heads} state-space heads are not divisible by {config.ssm_groups} groups; "
            "change the number of heads or of groups"
        )
    return {
        "heads": config.ssm_heads,
        "state": config.ssm_state,
        "groups": config.ssm_groups,
        "taps": config.conv_taps,
        "chunk": config.ssm_chunk,
        "conv_bias": config.conv_bias,
        "bias": config.ssm_bias,
    }


def read_limits(config: Config) -> dict[str, float | None]:
    """Return the limits of the steps; transformers writes an infinite one as {"__float__": "Infinity"}."""
    if config.time_step_limit is None:
        return {}
    values = [float(limit["__float__"]) if isinstance(limit, dict) else limit for limit in config.time_step_limit]
    if len(values) != 2 or not all(isinstance(value, (int, float)) for value in values) or values[0] == inf:
        raise config.mistake(f"time_step_limit={config.time_step_limit!r} must be two numbers, such as [0.0, 0.1]")
    smallest, largest = values
    return {"min_step": smallest, "max_step": None if largest == inf else largest}


def write_mamba2(model: Model, keys: Mapping[str, str] = KEYS) -> dict[str, Any]:
    """Return the keys of Mamba-2 layers; ``keys``: our field of each key of the family, by default those of Bamba."""
    net = model.mamba2
    if net is None:
        return {}
    fields = {
        "ssm_heads": net.heads,
        "ssm_head_dim": net.head_dim,
        "ssm_groups": net.groups,
        "ssm_state": net.state,
        "conv_taps": net.taps,
        "ssm_expand": net.inner_width // model.width,
        "ssm_chunk": net.chunk,
        "conv_bias": net.conv_bias,
        "ssm_bias": net.bias,
    }
    values = {theirs: fields[ours] for theirs, ours in keys.items() if ours in fields}
    return values | write_limits(net.min_step, net.max_step)


def write_limits(smallest: float, largest: float | None) -> dict[str, list[float]]:
    """Return ``time_step_limit``, unless the steps are unlimited."""
    limits = [smallest, inf if largest is None else largest]
    return {} if limits == [0.0, inf] else {"time_step_limit": limits}
