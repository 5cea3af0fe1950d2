"""``Config``: a Hugging Face ``config.json`` as one checked record, and the mappings that several families share.

Keys with one meaning under several names are one field; ``keys.py`` says which family reads which key.
Source: configuration and modelling code of transformers 5.23.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from fivefold.bounded_types import Experts, Ffn, HeadDim, Heads, Latent, Layers, Positive, Scalar, Tokens, Vocab, Width
from fivefold.model.huggingface.defaults import DEFAULTS
from fivefold.model.huggingface.keys import fields
from fivefold.model.spec import Model
from fivefold.record import Mistake, Record

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_fast",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


Layer = Annotated[int, Field(ge=0, le=2**12)]
Flag = Annotated[int, Field(ge=0, le=1)]
IGNORE_OTHERS = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Config(Record):
    """The keys of all families, one field per meaning; a key that a family lacks keeps its neutral default."""

    model_config: ClassVar[ConfigDict] = IGNORE_OTHERS

    name: str
    vocab_size: Vocab
    hidden_size: Width
    intermediate_size: Ffn | None
    intermediate_size_mlp: Ffn | None = None  # of dense layers, in a family whose intermediate_size is that of experts
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    head_dim: HeadDim | None = None
    hidden_act: str
    max_position_embeddings: Tokens = Field(gt=1)
    norm_epsilon: Positive
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: Scalar = 0.0
    hidden_dropout: Scalar = 0.0
    embedding_dropout: Scalar = 0.0
    scale_attn_weights: bool = True
    use_parallel_residual: bool = False
    use_qk_norm: bool = False
    embedding_multiplier: Scalar = 1.0
    attention_multiplier: Scalar = 1.0
    residual_multiplier: Scalar = 1.0
    logits_scaling: Positive = 1.0
    logit_scale: Scalar = 1.0
    no_rope_layers: tuple[Flag, ...] | None = None  # 1: with positions
    no_rope_layer_interval: Layers = 4
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    num_ln_in_parallel_attn: int | None = Field(None, ge=1, le=2)

    rope_theta: Positive = 10_000.0
    rope_local_base_freq: Positive | None = None
    partial_rotary_factor: Scalar = 1.0
    rotary_dim: HeadDim | None = None
    unread_rotary_factor: Scalar = 1.0  # partial_rotary_factor in a family that ignores it
    rope_interleave: bool | None = True
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Tokens | None = Field(None, gt=1)

    use_sliding_window: bool = True
    sliding_window: Tokens | None = None
    max_window_layers: int = Field(0, ge=-(2**30), le=2**30)
    layer_types: tuple[str, ...] | None = None
    sliding_window_pattern: Layers = 1
    attention_chunk_size: Tokens | None = None
    attn_temperature_tuning: bool = False
    floor_scale: Tokens = 8192
    attn_scale: Scalar = 0.1
    query_pre_attn_scalar: Positive = 1.0
    attn_logit_softcapping: Scalar | None = None
    final_logit_softcapping: Scalar | None = None

    num_experts: Experts | None = None
    num_experts_per_tok: Experts | None = None
    moe_intermediate_size: Ffn | None = None
    router_aux_loss_coef: Scalar = 0.0
    aux_loss_alpha: Scalar | None = None
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[Layer, ...] | None = None
    moe_layers: tuple[Layer, ...] | None = None
    interleave_moe_layer_step: Layers = 1
    first_k_dense_replace: Layer = 0
    n_shared_experts: Layer | None = None
    routed_scaling_factor: Scalar = 1.0
    n_group: Experts | None = None
    topk_group: Experts | None = None
    topk_method: str | None = None
    scoring_func: str | None = None
    num_nextn_predict_layers: Layer = 0
    q_lora_rank: Latent | None = None
    kv_lora_rank: Latent = 1
    qk_nope_head_dim: HeadDim = 1
    qk_rope_head_dim: HeadDim = 1
    v_head_dim: HeadDim = 1

    def mistake(self, what: str) -> Mistake:
        """Make the one-line ``Mistake`` for a feature or value that ``Model`` cannot represent."""
        return Mistake(f"{self.name}: {what}")


def read_config(values: dict[str, Any], *, family: str, name: str) -> Config:
    """Read the keys that ``family`` uses, over its defaults; a ``Mistake`` names a key that is not supported."""
    found = fields(values, family=family, name=name)
    if found.get("rope_parameters", {}) is None:  # null: use the family's default
        del found["rope_parameters"]
    return Config.read({**DEFAULTS[family], **found, "name": name}, origin=name)


def activation(config: Config) -> str:
    """The activation function under our name."""
    if config.hidden_act not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise config.mistake(f"activation {config.hidden_act!r} is not supported; supported: {known}")
    return ACTIVATIONS[config.hidden_act]


def head_dim(config: Config) -> int:
    """The head dim as given, else hidden_size / num_attention_heads."""
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size % config.num_attention_heads:
        raise config.mistake(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads} "
            "and no head_dim is given"
        )
    return config.hidden_size // config.num_attention_heads


def dropout(config: Config) -> dict[str, float]:
    """The fields of dropout: the rate of the branches, and those that differ from it."""
    others = {"attention_dropout": config.attention_dropout, "embedding_dropout": config.embedding_dropout}
    differing = {field: rate for field, rate in others.items() if rate != config.hidden_dropout}
    return {"dropout": config.hidden_dropout, **differing}


def windows(config: Config, *, default: tuple[bool, ...] = ()) -> dict[str, Any]:
    """Fields ``window`` and the shortest ``window_pattern``, from ``layer_types`` or the family's ``default``."""
    slides = default if config.layer_types is None else _slides(config.layer_types, config)
    if config.sliding_window is None or not config.use_sliding_window:
        if any(slides):
            raise config.mistake(
                "layers slide, but there is no sliding_window; give one, or layer_types of full_attention alone"
            )
        return {}
    if slides and not any(slides):
        return {}
    return {"window": config.sliding_window, "window_pattern": () if all(slides) else period(slides)}


def chunks(config: Config, *, default: tuple[bool, ...]) -> dict[str, Any]:
    """Fields of attention in chunks, of the layers that ``layer_types`` names or of the ``default``."""
    kind = {"chunked_attention": True, "full_attention": False}
    apart = default if config.layer_types is None else _slides(config.layer_types, config, kinds=kind)
    if config.attention_chunk_size is None:
        raise config.mistake("attention_chunk_size=None, with which the family's code fails; give a number of tokens")
    if not any(apart):
        return {}
    return {
        "window": config.attention_chunk_size, "window_kind": "chunks",
        "window_pattern": () if all(apart) else period(apart),
    }  # fmt: skip


SLIDING = {"sliding_attention": True, "full_attention": False, "attention": False}  # "attention" is an old name


def _slides(
    layer_types: tuple[str, ...], config: Config, *, kinds: dict[str, bool] = SLIDING
) -> tuple[bool, ...]:  # fmt: skip
    if unknown := sorted(set(layer_types) - set(kinds)):
        known = " and ".join(kind.removesuffix("_attention") for kind in kinds if kind != "attention")
        raise config.mistake(f"layer type {unknown[0]!r} is not supported; supported: {known} attention")
    if len(layer_types) != config.num_hidden_layers:
        raise config.mistake(
            f"layer_types names {len(layer_types)} layers, num_hidden_layers is {config.num_hidden_layers}"
        )
    return tuple(kinds[kind] for kind in layer_types)


def period(slides: tuple[bool, ...]) -> tuple[bool, ...]:
    """The shortest pattern that, repeated, gives ``slides``."""
    size = next(n for n in range(1, len(slides) + 1) if all(s == slides[i % n] for i, s in enumerate(slides)))
    return slides[:size]


def attention_bias(config: Config) -> dict[str, bool]:
    """Fields ``qkv_bias`` and ``out_bias``, which one key sets."""
    return {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias}


def model(config: Config, **of_family: Any) -> Model:
    """Build the ``Model`` from the fields that all families share, overridden by ``of_family``."""
    shared: dict[str, Any] = {
        "name": config.name,
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads or config.num_attention_heads,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "positions": config.max_position_embeddings,
        "norm_epsilon": config.norm_epsilon,
        "activation": activation(config),
        **dropout(config),
        "tied_embeddings": config.tie_word_embeddings,
    }
    if "head_dim" not in of_family:
        shared["head_dim"] = head_dim(config)
    return Model.read({**shared, **of_family}, origin=config.name)
