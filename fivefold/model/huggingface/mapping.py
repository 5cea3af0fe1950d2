"""Read fields of ``Model`` from a ``Config`` as several families do; ``build_model`` adds those that all share.

Source: configuration and modelling code of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fivefold.model.activations import ACTIVATIONS
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.rope import compute_yarn_mscale, read_rope
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.spec import Model

NAMES = {theirs: activation.name for activation in ACTIVATIONS.values() for theirs in activation.huggingface}


Value = TypeVar("Value")


def read_activation(config: Config) -> str:
    """Return our name of the activation function."""
    if config.hidden_act not in NAMES:
        known = ", ".join(NAMES)
        raise config.mistake(f"activation {config.hidden_act!r} is not supported; supported: {known}")
    return NAMES[config.hidden_act]


def read_head_dim(config: Config) -> int:
    """Return the head dim as given, else hidden_size / num_attention_heads."""
    if config.head_dim is not None:
        return config.head_dim
    if config.hidden_size % config.num_attention_heads:
        raise config.mistake(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads} "
            "and no head_dim is given; give it"
        )
    return config.hidden_size // config.num_attention_heads


def read_dropout(config: Config) -> dict[str, float]:
    """Return the fields of dropout: the rate of the branches, and other rates that differ from it."""
    other_rates = {"attention_dropout": config.attention_dropout, "embedding_dropout": config.embedding_dropout}
    differing = {field: rate for field, rate in other_rates.items() if rate != config.hidden_dropout}
    return {"dropout": config.hidden_dropout, **differing}


def read_windows(config: Config, *, default: tuple[bool, ...] = ()) -> dict[str, Any]:
    """Return ``window`` and the shortest ``window_pattern``, from ``layer_types`` or the family's ``default``."""
    slides = default if config.layer_types is None else _read_layer_types(config.layer_types, config, kinds=SLIDING)
    if config.sliding_window is None or not config.use_sliding_window:
        if any(slides):
            raise config.mistake(
                "there are sliding-window layers, but sliding_window is missing; give it, or only full_attention layers"
            )
        return {}
    if slides and not any(slides):
        return {}
    return {"window": config.sliding_window, "window_pattern": () if all(slides) else find_period(slides)}


def list_sliding_layers(layers: int, *, period: int, full: int = -1) -> tuple[bool, ...]:
    """Tell for each layer whether it slides: all but one in ``period``, which is that of index ``full`` among them."""
    return tuple(layer % period != full % period for layer in range(layers))


def read_windows_of_rotating_layers(config: Config, *, default: tuple[bool, ...]) -> dict[str, Any]:
    """Return the fields of windows and rotation for a family in which only sliding layers rotate.

    ``default``: which layers slide if ``layer_types`` is missing.
    """
    windows = read_windows(config, default=default)
    return {**windows, "rope_pattern": windows["window_pattern"]} if windows else {"position": "none"}


def read_chunks(config: Config, *, default: tuple[bool, ...]) -> dict[str, Any]:
    """Return the fields of chunked attention, from ``layer_types`` or the family's ``default``."""
    kind = {"chunked_attention": True, "full_attention": False}
    chunked = default if config.layer_types is None else _read_layer_types(config.layer_types, config, kinds=kind)
    if config.attention_chunk_size is None:
        raise config.mistake("attention_chunk_size=None makes transformers' code fail; give a number of tokens")
    if not any(chunked):
        return {}
    return {
        "window": config.attention_chunk_size,
        "window_kind": "chunks",
        "window_pattern": () if all(chunked) else find_period(chunked),
    }


SLIDING = {"sliding_attention": True, "full_attention": False, "attention": False}  # "attention" is an old name


def _read_layer_types(layer_types: tuple[str, ...], config: Config, *, kinds: Mapping[str, Value]) -> tuple[Value, ...]:
    if unknown := sorted(set(layer_types) - set(kinds)):
        known = " and ".join(kind for kind in kinds if kind != "attention")
        raise config.mistake(f"layer type {unknown[0]!r} is not supported; supported: {known}")
    if len(layer_types) != config.num_hidden_layers:
        raise config.mistake(
            f"layer_types names {len(layer_types)} layers, num_hidden_layers is {config.num_hidden_layers}; change one"
        )
    return tuple(kinds[kind] for kind in layer_types)


def find_period(layers: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return the shortest pattern that gives ``layers`` when repeated."""
    size = next(n for n in range(1, len(layers) + 1) if all(s == layers[i % n] for i, s in enumerate(layers)))
    return layers[:size]


def read_mixers(
    config: Config, geometry: dict[MixerName, Any], *, kinds: Mapping[str, MixerName], default: tuple[MixerName, ...]
) -> dict[str, Any]:
    """Return the fields of token mixers, from ``layer_types`` or the family's ``default``.

    ``geometry``: the fields of each kind other than attention; ``kinds``: the family's name of a kind → ours.
    """
    mixers = default
    if config.layer_types is not None:
        mixers = tuple(_read_layer_types(config.layer_types, config, kinds=kinds))
    used = {kind: fields for kind, fields in geometry.items() if kind in mixers}
    return {"mixers": find_period(mixers) if used else ()} | {str(kind): fields for kind, fields in used.items()}


def build_model(config: Config, **of_family: Any) -> Model:
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
        "activation": read_activation(config),
        **read_dropout(config),
        "tied_embeddings": config.tie_word_embeddings,
        "qkv_bias": config.attention_bias,
        "out_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    if "head_dim" not in of_family:
        shared["head_dim"] = read_head_dim(config)
    if "rope_theta" not in of_family and of_family.get("position") != "none":
        shared |= read_rope(config)
    return Model.read({**shared, **of_family}, origin=config.name)


def list_rotating_layers(config: Config, *, listed: tuple[int, ...] | None) -> tuple[bool, ...]:
    """Tell for each layer whether it rotates: all but every ``no_rope_layer_interval``-th, or as ``listed``."""
    layers = config.num_hidden_layers
    if listed is None:
        return tuple((layer + 1) % config.no_rope_layer_interval != 0 for layer in range(layers))
    if len(listed) < layers:
        raise config.mistake(f"no_rope_layers names {len(listed)} layers, num_hidden_layers is {layers}; change one")
    return tuple(map(bool, listed[:layers]))


def read_latent(config: Config, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of latent attention, with the rotary fields: YaRN's ``mscale_all_dim`` sharpens the scores.

    ``rotary``: the rotary fields of a family for which ``read_rope`` needs to know more.
    """
    rotary = rotary or read_rope(config)
    if config.v_head_dim is None and config.hidden_size % config.num_attention_heads:
        raise config.mistake(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads} "
            "and no v_head_dim is given; give it"
        )
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    scaling = rotary["rope_scaling"] or {"mscale_all_dims": None}
    weight = scaling["mscale_all_dims"]
    sharper = compute_yarn_mscale(scaling["factor"], weight=weight) if weight else 1.0
    return rotary | {
        "kv_heads": config.num_attention_heads,
        "head_dim": qk_dim,
        "attention_scale": sharper**2 / qk_dim**0.5,
        "mla": {
            "q_rank": config.q_lora_rank,
            "kv_rank": config.kv_lora_rank,
            "nope_dim": config.qk_nope_head_dim,
            "rope_dim": config.qk_rope_head_dim,
            "v_dim": config.v_head_dim or config.hidden_size // config.num_attention_heads,
        },
    }


def read_experts(config: Config, **of_family: Any) -> dict[str, Any]:
    """Return the fields of experts that all families read in one way, overridden by ``of_family``.

    A family has them in every layer unless it says otherwise. They are as wide as ``intermediate_size`` in a family
    without a key for their width. A softmax over the logits of the chosen experts equals that over all logits, rescaled
    to sum to one.
    """
    if config.num_experts == 0:
        raise config.mistake(
            "it has 0 experts (num_experts, num_local_experts or n_routed_experts): give 1 or more, or the "
            "architecture of a dense model"
        )
    return {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size or config.intermediate_size,
        "shared_experts": config.n_shared_experts or 0,
        "aux_coefficient": config.router_aux_loss_coef,
        "normalized": config.norm_topk_prob,
        "scaling": config.routed_scaling_factor,
        "groups": config.n_group or 1,
        "topk_groups": config.topk_group or 1,
        **of_family,
    }


def read_shared_expert(config: Config) -> dict[str, Any]:
    """Return the fields of the shared expert, of width ``shared_expert_intermediate_size``; none if that is 0."""
    width = config.shared_expert_intermediate_size
    return {"shared_experts": 1, "shared_ffn": width} if width else {}


def read_layers_of_experts(routed: Sequence[bool]) -> dict[str, Any]:
    """Return the fields that say which layers have experts: all after the first dense ones, or a pattern."""
    dense = next((layer for layer, routes in enumerate(routed) if routes), len(routed))
    return {"dense_layers": dense} if all(routed[dense:]) else {"pattern": find_period(tuple(routed))}


def read_mlp_layer_types(config: Config, *, dense: int) -> dict[str, Any]:
    """Return the fields that say which layers have experts: by ``mlp_layer_types``, else all after ``dense`` ones."""
    kinds, layers = config.mlp_layer_types, config.num_hidden_layers
    if kinds is None:
        return {"dense_layers": min(dense, layers)}
    if unknown := sorted(set(kinds) - {"dense", "sparse"}):
        raise config.mistake(f"MLP type {unknown[0]!r} is not supported; supported: dense and sparse")
    if len(kinds) != layers:
        raise config.mistake(f"mlp_layer_types names {len(kinds)} layers, num_hidden_layers is {layers}; change one")
    return read_layers_of_experts([kind == "sparse" for kind in kinds])


def read_sparse_steps(config: Config, *, dense: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields that say which layers have experts: each ``decoder_sparse_step``-th, but the ``dense`` ones."""
    step = config.decoder_sparse_step
    listed = dense if config.mlp_only_layers is None else config.mlp_only_layers
    layers = range(config.num_hidden_layers)
    return read_layers_of_experts([layer not in listed and (layer + 1) % step == 0 for layer in layers])


def read_gated_experts(config: Config) -> dict[str, Any]:
    """Return the fields of experts with a shared one, whose output is multiplied by a gate."""
    if not config.shared_expert_intermediate_size:
        raise config.mistake("shared_expert_intermediate_size=0 leaves a gate without an expert; give its width")
    shared = read_shared_expert(config) | read_sparse_steps(config, dense=())
    return read_experts(config, shared_gate=True, **shared)


def read_biased_experts(config: Config) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's experts: sigmoid scores, balanced by a bias, limited to groups of experts."""
    return read_experts(config, score="sigmoid", balance="free", aux_coefficient=0.0)


def read_mtp(config: Config) -> dict[str, Any] | None:
    """Return the fields of multi-token prediction, which transformers builds for generation only.

    The family's class takes 1 for a missing key; here a missing key means none.
    """
    return {"depth": config.num_nextn_predict_layers} if config.num_nextn_predict_layers else None
