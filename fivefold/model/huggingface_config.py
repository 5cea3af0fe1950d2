"""A Hugging Face ``config.json`` read into one checked record, and what several families read from it alike.

Keys that mean the same under several names are renamed to one; both the old rotary keys (``rope_theta``,
``rope_scaling``) and those of transformers 5 (``rope_parameters``) are read.
Source: configuration and rotary code of transformers 5.23.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, PositiveInt

from fivefold.record import Mistake, Record

RENAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
    "rms_norm_eps": "norm_epsilon",
    "layer_norm_eps": "norm_epsilon",
    "layer_norm_epsilon": "norm_epsilon",
    "norm_eps": "norm_epsilon",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "embd_pdrop": "embedding_dropout",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
}

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}

# key: (the values we can represent, the operation that any other value would need)
SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_cross_attention": ((False,), "cross-attention"),
    "scale_attn_by_inverse_layer_idx": ((False,), "an attention scale per layer"),
    "use_bidirectional_attention": ((False, None), "attention that is not causal"),
    "router_jitter_noise": ((0,), "noise on the router's input"),
    "moe_layer_freq": ((1,), "experts in every n-th layer only"),
    "decoder_sparse_step": ((1,), "experts in every n-th layer only"),
    "swiglu_alpha": ((1.702,), "another gain of the clamped SwiGLU"),
    "swiglu_limit": ((7.0,), "another limit of the clamped SwiGLU"),
}


_IGNORE_OTHERS = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Rotary(Record):
    """What ``rope_scaling`` or ``rope_parameters`` says of one kind of layers."""

    model_config: ClassVar[ConfigDict] = _IGNORE_OTHERS

    rope_type: str | None = None
    type: str | None = None  # the old name of rope_type
    rope_theta: float | None = Field(None, gt=0)
    partial_rotary_factor: float | None = None
    factor: float | None = Field(None, gt=0)
    original_max_position_embeddings: int | None = Field(None, gt=1)
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """``default`` is no scaling."""
        return self.rope_type or self.type or "default"


class Config(Record):
    """The keys of all families under one name each; a key that a family lacks keeps the neutral value below."""

    model_config: ClassVar[ConfigDict] = _IGNORE_OTHERS

    name: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt | None
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str
    max_position_embeddings: int = Field(gt=1)
    norm_epsilon: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float | None = None
    scale_attn_weights: bool = True
    use_parallel_residual: bool = False

    rope_theta: float = Field(10_000.0, gt=0)
    rope_local_base_freq: float | None = None
    partial_rotary_factor: float = 1.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = Field(None, gt=1)

    use_sliding_window: bool = True
    sliding_window: PositiveInt | None = None
    max_window_layers: int = 0
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: PositiveInt = 1
    query_pre_attn_scalar: float = Field(1.0, gt=0)
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    num_experts: PositiveInt | None = None
    num_experts_per_tok: PositiveInt | None = None
    moe_intermediate_size: PositiveInt | None = None
    router_aux_loss_coef: float = 0.0
    aux_loss_alpha: float | None = None
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] | None = None
    first_k_dense_replace: int = 0
    n_shared_experts: int | None = None
    routed_scaling_factor: float = 1.0
    n_group: PositiveInt | None = None
    topk_group: PositiveInt | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt = 1
    qk_nope_head_dim: PositiveInt = 1
    qk_rope_head_dim: PositiveInt = 1
    v_head_dim: PositiveInt = 1

    def mistake(self, what: str) -> Mistake:
        """The one line for a feature or value that cannot be represented."""
        return Mistake(f"{self.name}: {what}")


def read_config(values: dict[str, Any], *, defaults: dict[str, Any], name: str) -> Config:
    """``values`` over the family's ``defaults``; a ``Mistake`` names the key and the operation we lack."""
    for key, (allowed, operation) in SUPPORTED.items():
        if key in values and values[key] not in allowed:
            raise Mistake(f"{name}: {key}={values[key]!r} needs {operation}, which is not supported")
    renamed = {RENAMES[key]: value for key, value in values.items() if key in RENAMES}
    return Config.read({**defaults, **values, **renamed, "name": name}, origin=name)


def activation(config: Config) -> str:
    """Our name of the activation function."""
    if config.hidden_act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise config.mistake(f"activation {config.hidden_act!r} is not supported; supported: {known}")
    return ACTIVATIONS[config.hidden_act]


def head_dim(config: Config) -> int:
    """As given, or the width over the heads."""
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size % config.num_attention_heads:
        raise config.mistake(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads} "
            "and no head_dim is given"
        )
    return config.hidden_size // config.num_attention_heads


def dropout(config: Config) -> float:
    """The one rate of attention, residual and embedding dropout."""
    rates = {"attention": config.attention_dropout, "residual": config.hidden_dropout}
    if config.embedding_dropout is not None:
        rates["embedding"] = config.embedding_dropout
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{kind} {rate:g}" for kind, rate in rates.items())
        raise config.mistake(f"dropout rates that differ ({listed}) are not supported; make them equal, e.g. 0")
    return config.attention_dropout


def windows(config: Config, *, default: tuple[bool, ...] = ()) -> dict[str, Any]:
    """``window`` and the shortest ``window_pattern``, from ``layer_types`` or the family's ``default``."""
    if config.sliding_window is None or not config.use_sliding_window:
        return {}
    slides = default
    if config.layer_types is not None:
        unknown = sorted(set(config.layer_types) - {"sliding_attention", "full_attention"})
        if unknown:
            raise config.mistake(f"layer type {unknown[0]!r} is not supported; supported: sliding and full attention")
        if len(config.layer_types) != config.num_hidden_layers:
            raise config.mistake(
                f"layer_types names {len(config.layer_types)} layers, num_hidden_layers is {config.num_hidden_layers}"
            )
        slides = tuple(kind == "sliding_attention" for kind in config.layer_types)
    if slides and not any(slides):
        return {}
    return {"window": config.sliding_window, "window_pattern": () if all(slides) else _period(slides)}


def _period(slides: tuple[bool, ...]) -> tuple[bool, ...]:
    size = next(n for n in range(1, len(slides) + 1) if all(s == slides[i % n] for i, s in enumerate(slides)))
    return slides[:size]


def rope(config: Config, *, longrope: tuple[str, ...] = ("longrope", "su")) -> dict[str, Any]:
    """The rotary fields of ``Model``; ``longrope``: the names under which the family stores that kind."""
    given = config.rope_scaling or config.rope_parameters or {}
    nested = any(isinstance(given.get(layers), dict) for layers in ("full_attention", "sliding_attention"))
    full = Rotary.read((given.get("full_attention") or {}) if nested else given, origin=f"{config.name}: rope_scaling")
    sliding = Rotary.read(given.get("sliding_attention") or {}, origin=f"{config.name}: sliding_attention")
    if sliding.kind != "default":
        raise config.mistake(f"rope scaling {sliding.kind!r} of the sliding layers is not supported")
    theta = full.rope_theta or config.rope_theta
    local_theta = sliding.rope_theta or config.rope_local_base_freq
    fraction = full.partial_rotary_factor
    scaling = _scaling(config, full, longrope=longrope)
    return {
        "rope_theta": theta,
        "rope_theta_sliding": None if scaling is None and local_theta == theta else local_theta,
        "rope_fraction": config.partial_rotary_factor if fraction is None else fraction,
        "rope_scaling": scaling,
    }


def _scaling(config: Config, given: Rotary, *, longrope: tuple[str, ...]) -> dict[str, Any] | None:
    kind = "longrope" if given.kind in longrope else given.kind
    if kind == "default":
        return None
    known = ("linear", "dynamic", "llama3", "yarn", "longrope")
    if kind not in known:
        raise config.mistake(f"rope scaling {kind!r} is not supported; supported: {', '.join(known)}")
    original = config.original_max_position_embeddings or given.original_max_position_embeddings
    if original is None or kind == "dynamic":
        original = config.max_position_embeddings
    factor = given.factor
    if factor is None:
        if kind not in ("yarn", "longrope"):
            raise config.mistake(f"rope scaling {kind!r} without its factor")
        factor = config.max_position_embeddings / original
    return {
        "kind": kind,
        "factor": factor,
        "original_positions": None if kind == "linear" else original,
        "low_frequency_factor": given.low_freq_factor,
        "high_frequency_factor": given.high_freq_factor,
        "beta_fast": given.beta_fast or 32.0,
        "beta_slow": given.beta_slow or 1.0,
        "attention_factor": given.attention_factor
        or _attention_factor(given, kind=kind, factor=factor, original=original),
        "mscale": given.mscale,
        "mscale_all_dims": given.mscale_all_dim,
        "truncate": given.truncate,
        "short_factors": given.short_factor,
        "long_factors": given.long_factor,
    }


def yarn_mscale(factor: float, *, weight: float = 1.0) -> float:
    """YaRN's ``0.1·weight·ln factor + 1``: how much sharper attention must be at ``factor`` times the length."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _attention_factor(given: Rotary, *, kind: str, factor: float, original: int) -> float | None:
    """What cos and sin are multiplied by, which the rest of the scaling fixes where the config does not say it."""
    if kind == "longrope":
        return sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    if kind != "yarn":
        return None
    if given.mscale and given.mscale_all_dim:
        return yarn_mscale(factor, weight=given.mscale) / yarn_mscale(factor, weight=given.mscale_all_dim)
    return yarn_mscale(factor)
