"""Lists what of a model the trainer does not compute, without torch: the list of families has these reasons too."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.trainer.model.kernels.kinds import DENSE, INPUT_WEIGHTED, WEIGHTED

# Fields of a model that may have any value; all others must have the default.
FREE_FIELDS = frozenset({
    "layers", "position", "positions", "position_offset", "norm_epsilon", "rope_theta", "rope_scaling", "rope_fraction",
    "rope_theta_sliding", "rope_pattern", "tied_embeddings", "source", "repository", "quantization", "qkv_bias",
    "out_bias", "mlp_bias", "head_bias", "qk_norm", "attention_scale", "attention_softcap", "attention_sinks", "window",
    "window_pattern", "window_kind", "temperature", "mla", "moe", "mtp", "qk_norm_after_rope", "qkv_clip", "value_dim",
    "value_scale", "value_norm", "tied_values", "sliding", "norm_weight", "embedding_norm", "final_norm", "sub_norm",
    "mixers", "feed_forwards", "short_conv", "gated_delta_net", "kimi_delta", "mamba", "mamba2", "rg_lru", "lightning",
    "vision", "output_gate", "gate_per_head", "gate_activation", "norm", "norm_plus_one", "norm_bias", "block",
    "pre_norm_mixers", "residual_scale", "residual_factors", "mlp", "embedding_scale", "sinusoid_endpoint",
    "first_norm", "last_out_bias", "head_transform", "head_transform_bias", "logit_scale", "logit_softcap", "dropout",
    "attention_dropout", "embedding_dropout", "shared_kv_layers", "shared_kv_ffn", "per_layer_inputs", "altup",
    "laurel_rank", "gate_sparsity", "joins_mamba2", "multipliers", "differential", "dynamic_mask", "residual_weights",
    "hyper_connections", "mlp_clamp", "shared_key_attention", "heavily_compressed_attention",
    "compressed_sparse_attention", "residual_by_depth", "gate_bias", "gate_in_query", "sliding_mla", "unquantized",
    "double_quantization",
    "norm_gate_rank", "rwkv", "attention_experts",
})  # fmt: skip


def list_unsupported(model: Model) -> Iterator[tuple[str, str]]:
    """Yield what of a model the trainer does not support, and what to do instead."""
    estimated = "`predict` estimates it"
    moe = model.moe
    all_moe = all(map(model.is_moe, filter(model.has_feed_forward, range(model.layers + model.mtp_depth))))
    only_experts = (
        moe is not None and all_moe and not (moe.shared_experts or moe.joins_mlp)
    )  # no layer has an MLP other than the experts
    knows_activation = only_experts or model.activation in (*DENSE, "xielu")
    free_fields = FREE_FIELDS | {"activation"} if knows_activation else FREE_FIELDS
    for field, declared in type(model).model_fields.items():
        value = getattr(model, field)
        if field not in free_fields and not declared.is_required() and value != declared.default:
            yield f"{field} yet" if isinstance(value, Record) else f"{field}={value!r} yet", estimated
    if model.altup is not None and not model.altup.scales:
        yield "altup.scales=False, with which a weight of each layer has no gradient", estimated
    if model.mlp_clamp is not None and model.mlp != "gated":
        yield "mlp_clamp of a plain feed-forward yet", "use mlp 'gated'"
    if model.mlp == "receptance" and (moe is not None or model.mlp_bias or set(model.mixers) != {"rwkv"}):
        yield "mlp='receptance' with experts, with biases, or next to other mixers than rwkv", estimated
    if model.head_transform is not None and (model.mtp is not None or model.head_transform not in DENSE):
        activations = ", ".join(DENSE)
        yield (
            f"head_transform={model.head_transform!r} with mtp, or as another activation than {activations}",
            estimated,
        )
    if model.residual_by_depth and (model.mtp is not None or model.feed_forwards):
        yield "residual_by_depth with mtp, or with layers of one branch, yet", estimated
    if model.activation == "xielu" and model.mlp != "plain":
        yield "gated xielu yet", "use mlp 'plain'"
    if model.activation == "xielu" and "lightning" in model.non_attention_mixers:
        yield "xielu within lightning attention, whose activation has no weights", estimated
    chunked = model.window is not None and model.window_kind == "chunks"
    capped = model.attention_softcap is not None or model.position == "alibi"
    if model.dynamic_mask is not None and (
        model.dropout_rates.attention or chunked or capped or model.shared_kv_layers
    ):
        yield "dynamic_mask with attention_dropout, chunks, soft caps, shared keys or a bias by distance", estimated
    if moe is None:
        return
    kind = f"{model.mlp} {model.activation}"
    if moe.hashed_layers and moe.balance == "aux" and moe.aux_coefficient:
        yield "moe.hashed_layers with an auxiliary loss, which cannot balance them", "use balance 'free' or 'none'"
    if moe.hashed_layers and moe.score == "sparsemixer":
        yield "moe.hashed_layers with score='sparsemixer', which draws experts", estimated
    if moe.clamp is not None and (model.mlp != "gated" or model.activation not in DENSE):
        yield f"moe.clamp of {kind} experts yet", estimated
    if moe.clamp is not None and moe.router_weight_on == "inputs":
        yield "moe.clamp with router_weight_on='inputs' yet", estimated
    if model.activation not in ((*WEIGHTED, *DENSE) if model.mlp == "gated" else DENSE):
        yield f"experts with {kind} yet", estimated
    if moe.router_weight_on == "inputs" and (model.mlp != "gated" or model.activation not in INPUT_WEIGHTED):
        yield f"router_weight_on='inputs' for {kind} experts yet", estimated
