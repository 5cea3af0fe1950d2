"""Keys, defaults and tensor names that many families share.

Source: configuration and modelling code of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from fivefold.model.rope import RopeScaling
from fivefold.model.spec import Model


class FusedTensor(NamedTuple):
    """The tensor ``name`` of a checkpoint that holds several of our ``weights``, in order.

    The tensor has ``groups`` equal groups of rows, each with rows of the first weight, then of the next. 1: one weight
    after another. 0: the rows of all weights alternate. kv_heads: one group for each key head, its queries
    first; heads, mixer_key_heads: one for each query head, or each key head of another token mixer.
    ``transposed``: stored as [in, out]. ``flat``: the matrices of all experts are one matrix, one below another.
    """

    name: str
    weights: tuple[str, ...]
    groups: int | Literal["heads", "kv_heads", "mixer_key_heads"] = 1
    transposed: bool = False
    flat: bool = False


Names = Mapping[str, "str | FusedTensor"]


def map_same_names(keys: str) -> dict[str, str]:
    """Map keys to fields of ``Config`` with the same name."""
    return {key: key for key in keys.split()}


# Short names of keys of ``config.json``: those of ``Model``'s fields, with which the model catalog heads its columns.
SHORT_NAMES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_position_embeddings",
    "experts": "num_experts",
    "topk": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


def expand_names(**values: Any) -> dict[str, Any]:
    """Return values by the keys of ``config.json`` that ``SHORT_NAMES`` stand for; other names are keys."""
    return {SHORT_NAMES.get(name, name): value for name, value in values.items()}


def drop_keys(keys: Mapping[str, str], *left_out: str) -> dict[str, str]:
    """Return ``keys`` without those in ``left_out``."""
    return {key: field for key, field in keys.items() if key not in left_out}


SIZES = map_same_names(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings "
    "tie_word_embeddings attention_dropout"
)
GPT_KEYS = drop_keys(SIZES, "intermediate_size", "attention_dropout") | {  # of GPT-2 and its successors
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "norm_epsilon",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
    "embd_pdrop": "embedding_dropout",
}
ROTARY = map_same_names("rope_theta rope_scaling rope_parameters original_max_position_embeddings")
# Stored with the rotary parameters of every family, but used only by families that rotate a part of the head.
UNREAD_ROTARY_FACTOR = {"partial_rotary_factor": "unread_rotary_factor"}
GROUPED = (
    SIZES
    | ROTARY
    | UNREAD_ROTARY_FACTOR
    | map_same_names("num_key_value_heads head_dim")
    | {"rms_norm_eps": "norm_epsilon"}
)
KEYS = GROUPED | map_same_names("hidden_act")
LAYER_NORM_KEYS = drop_keys(KEYS, "rms_norm_eps")
EXPERT_KEYS = map_same_names("num_experts num_experts_per_tok router_aux_loss_coef") | {
    "num_local_experts": "num_experts"
}
BIASED_EXPERT_KEYS = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"} | map_same_names(
    "num_experts_per_tok moe_intermediate_size n_shared_experts routed_scaling_factor n_group topk_group norm_topk_prob"
)
LATENT_KEYS = map_same_names(
    "attention_bias q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave"
)
MTP_KEYS = dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), "num_nextn_predict_layers")

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "norm_epsilon": 1e-6,
    "tie_word_embeddings": False,
}

GPT_FIELDS: dict[str, Any] = {"norm": "layernorm", "mlp": "plain"} | dict.fromkeys(
    ("qkv_bias", "out_bias", "mlp_bias"), True
)

TENSORS: dict[str, str | FusedTensor] = {
    "blocks": "model.layers.{}",
    "embed.tokens": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.out": "lm_head",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "mtp.embed_norm": "enorm",
    "mtp.hidden_norm": "hnorm",
    "mtp.project": "eh_proj",
    "mtp.norm": "shared_head.norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
GPT_PLACES = {
    "blocks": "transformer.h.{}",
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "head.norm": "transformer.ln_f",
    "head.out": "lm_head",
    "norm1": "ln_1",
    "norm2": "ln_2",
}
LATENT_TENSORS: dict[str, str | FusedTensor] = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}
QKV = ("attention.q", "attention.k", "attention.v")
GATE_UP = ("mlp.gate", "mlp.up")
FUSED_GATE_UP = dict.fromkeys(GATE_UP, FusedTensor("mlp.gate_up_proj", GATE_UP))
PLAIN_MLP = {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}

EXPERT_TENSORS = TENSORS | {
    "moe.router": "mlp.gate",
    "moe.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "moe.experts.up": "mlp.experts.{}.up_proj.weight",
    "moe.experts.down": "mlp.experts.{}.down_proj.weight",
}
MIXTRAL_TENSORS = TENSORS | {
    "moe.router": "block_sparse_moe.gate",
    "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}
SHARED_EXPERT_TENSORS = {f"moe.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
SHARED_EXPERT_TENSOR = {f"moe.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
BIASED_EXPERT_TENSORS = EXPERT_TENSORS | SHARED_EXPERT_TENSORS | {"moe.bias": "mlp.gate.e_score_correction_bias"}
EXPERT_GATE_UP = ("moe.experts.gate", "moe.experts.up")


def name_stacked_experts(place: str = "mlp", *, router: str = "gate") -> dict[str, str | FusedTensor]:
    """Return the tensor names of a layer whose experts are stacked, as in memory under transformers 5.

    One tensor holds gate and up of all experts, another down.
    """
    return {
        "moe.router": f"{place}.{router}",
        **dict.fromkeys(EXPERT_GATE_UP, FusedTensor(f"{place}.experts.gate_up_proj", EXPERT_GATE_UP)),
        "moe.experts.down": f"{place}.experts.down_proj",
    }


def write_latent(model: Model) -> dict[str, Any]:
    """Return the rank of queries, null without one, and heads as transformers defines them; others ignore these."""
    assert model.mla is not None
    return {"q_lora_rank": model.mla.q_rank, "num_key_value_heads": model.heads, "head_dim": model.rope_dim}


def write_layer_types(model: Model) -> dict[str, Any]:
    """Return the kinds of all layers, for a family in which a missing key means that some slide."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {"layer_types": [kinds[model.has_window(layer)] for layer in range(model.layers)]}


def write_dense_layers(model: Model) -> dict[str, Any]:
    """Return the layers without experts, for a family that lists them next to a step between layers of experts."""
    dense = [layer for layer in range(model.layers) if not model.is_moe(layer)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def write_rope_by_layers(model: Model) -> dict[str, Any]:
    """Return the kinds of all layers and ``rope_parameters`` of each kind, for a family that reads no other form."""
    scaling = write_scaling(model.rope_scaling) if model.rope_scaling else {"rope_type": "default"}
    sliding = {"rope_type": "default", "rope_theta": model.rope_theta_sliding or model.rope_theta}
    tables = {"full_attention": {**scaling, "rope_theta": model.rope_theta}, "sliding_attention": sliding}
    return {**write_layer_types(model), "rope_parameters": tables}


def write_rope_tables(model: Model) -> dict[str, Any]:
    """Return the kinds of all layers and a table for each kind, with the share of the head that it rotates."""
    rope_keys = write_rope_by_layers(model)
    sliding_fraction = model.sliding and model.sliding.rope_fraction
    fractions = {"full_attention": model.rope_fraction, "sliding_attention": sliding_fraction or model.rope_fraction}
    tables = {
        kind: {"partial_rotary_factor": fractions[kind], **table}
        for kind, table in rope_keys["rope_parameters"].items()
    }
    if model.rope_theta_sliding is None:  # one table for all
        tables["sliding_attention"] = tables["full_attention"]
    return {**rope_keys, "rope_parameters": tables}


def write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Return the keys of ``rope_scaling``."""
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.original_positions:
        values["original_max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_frequency_factor, "high_freq_factor": scaling.high_frequency_factor}
    if scaling.kind == "longrope":
        lists = {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
        return values | lists | {"attention_factor": scaling.attention_factor}
    if scaling.kind == "proportional":
        return values | {"partial_rotary_factor": scaling.fraction}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        weights = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dims}
        if scaling.mscale and scaling.mscale_all_dims:  # they determine attention_factor
            return values | weights
        given = {name: weight for name, weight in weights.items() if weight is not None}
        return values | given | {"attention_factor": scaling.attention_factor}
    return values


def write_temperature(model: Model) -> dict[str, Any]:
    """Return ``rope_scaling`` with the factor on rotated queries, for a family in which every model has one."""
    if model.temperature is None:
        return {}
    scaling = write_scaling(model.rope_scaling) if model.rope_scaling else {"rope_type": "default"}
    steps = {
        "llama_4_scaling_beta": model.temperature.scale,
        "original_max_position_embeddings": model.temperature.floor,
    }
    return {"rope_scaling": {**scaling, **steps, "rope_theta": model.rope_theta}}


def write_unscaled_rope(model: Model) -> dict[str, Any]:
    """Return ``rope_parameters`` of a model without scaling, for a family in which a missing key means a scaling."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta}}
    return {} if model.rope_scaling else plain
