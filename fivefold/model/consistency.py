"""Which fields of a model contradict each other, or are not supported together."""

from __future__ import annotations

from typing import get_args

from fivefold.bounded_types import PARAMETERS
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.attention import Sliding
from fivefold.model.mixers.kinds import MixerName
from fivefold.model.shape import ModelShape


def check_consistency(shape: ModelShape) -> None:
    """Raise a ``ValueError`` for fields of a model that contradict each other, or are not supported together."""
    if (size := _approximate_parameters(shape)) > PARAMETERS:
        raise ValueError(f"about {size:.0e} parameters are more than {PARAMETERS:.0e}; make the model smaller")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads={shape.heads} is not divisible by kv_heads={shape.kv_heads}: change one")
    if shape.position == "rope" and shape.rope_dim % 2:
        raise ValueError(f"rotary dim {shape.rope_dim} is odd; head_dim x rope_fraction must be even")
    if shape.window_pattern and shape.window is None:
        raise ValueError("window_pattern is given without window: give both")
    _check_positions(shape)
    if not shape.first_norm and shape.block not in ("pre", "sandwich"):
        raise ValueError(f"block={shape.block!r} norms no input of a first layer: leave first_norm=False out")
    if shape.last_out_bias and (shape.out_bias or shape.mla is not None):
        raise ValueError("last_out_bias needs grouped attention without out_bias: remove one of them")
    if shape.head_transform_bias and shape.head_transform is None:
        raise ValueError("head_transform_bias is of head_transform: give its activation, or leave it out")
    _check_differential(shape)
    _check_attention_experts(shape)
    if shape.norm_gate_rank is not None and (shape.block != "pre" or not shape.first_norm):
        raise ValueError("norm_gate_rank needs a norm before each branch: use block='pre' with first_norm=true")
    _check_factors(shape)
    _check_hyper_connections(shape)
    if shape.residual_by_depth and (shape.residual_scale != 1 or shape.block.startswith("parallel")):
        raise ValueError(
            "residual_by_depth scales each residual sum: leave residual_scale out and use no parallel block"
        )
    if shape.position == "alibi" and shape.attention_softcap is not None:
        raise ValueError("attention_softcap is not supported with position='alibi': leave one out")
    _check_latent(shape)
    _check_sliding(shape)
    _check_indexer(shape)
    _check_values(shape)
    _check_sub_norm(shape)
    _check_gate(shape)
    _check_norms(shape)
    _check_mixers(shape)
    _check_mixer_activation(shape)
    _check_shared_kv(shape)
    _check_per_layer_inputs(shape)
    _check_experts(shape)
    if shape.rope_scaling is not None and shape.rope_scaling.kind == "longrope":
        lengths = {len(shape.rope_scaling.short_factors), len(shape.rope_scaling.long_factors)}
        if lengths != {shape.rope_dim // 2}:
            raise ValueError(f"longrope needs {shape.rope_dim // 2} short and long factors, not {sorted(lengths)}")


def _check_experts(shape: ModelShape) -> None:
    """Raise ``ValueError`` for experts whose fields contradict those of the blocks."""
    moe, block = shape.moe, shape.block
    if moe is None:
        return
    if moe.post_norm and block in ("post", "sandwich", "post_sum"):
        raise ValueError(f"block={block!r} already norms the output of the experts: leave moe.post_norm out")
    if moe.joined_norms and (block != "sandwich" or not shape.norm_weight or shape.norm != "rmsnorm"):
        raise ValueError(
            f"moe.joined_norms with block={block!r}, norm={shape.norm!r} and norm_weight={shape.norm_weight} is "
            "not supported: take block='sandwich', norm='rmsnorm' and norms with weights"
        )
    if moe.shortcut and not _has_plain_pairs(shape):
        raise ValueError(
            "moe.shortcut needs block='pre', an even number of layers that all have a feed-forward, and no dense "
            "layers, multi-token prediction, hyper-connections or per-layer inputs: change them"
        )
    if ACTIVATIONS[shape.activation].parameters:
        raise ValueError(
            f"experts with activation={shape.activation!r}, which has trained parameters, are not supported: use "
            "another activation"
        )
    if moe.dense_layers > shape.layers:
        raise ValueError(f"moe.dense_layers={moe.dense_layers} exceeds layers={shape.layers}: lower it")


def _check_positions(shape: ModelShape) -> None:
    """Raise ``ValueError`` for a field that positions of this kind would ignore."""
    if shape.position_offset and shape.position not in ("learned", "sinusoidal"):
        raise ValueError(
            f"position_offset={shape.position_offset} applies to learned or sinusoidal positions only: leave it out"
        )
    if shape.sinusoid_endpoint and shape.position != "sinusoidal":
        raise ValueError("sinusoid_endpoint applies to sinusoidal positions only: leave it out")
    if shape.position == "sinusoidal" and (shape.width % 2 or shape.width < 4):
        raise ValueError(f"position='sinusoidal' needs an even width of 4 or more, not {shape.width}: change one")


def _check_differential(shape: ModelShape) -> None:
    """Raise ``ValueError`` for heads without pairs, and for what is not supported with pairs of heads."""
    if not shape.differential:
        return
    if shape.kv_heads % 2:
        raise ValueError(f"differential attention takes values of two heads: kv_heads={shape.kv_heads} is odd")
    for field in ("mla", "value_dim", "output_gate", "attention_sinks", "sliding", "attention_dropout", "dropout"):
        if getattr(shape, field):
            raise ValueError(f"{field} is not supported with differential attention: leave one out")


def _check_attention_experts(shape: ModelShape) -> None:
    """Raise ``ValueError`` for what is not supported with experts of attention, or with masks from values."""
    if shape.attention_experts and (shape.moe is None or shape.heads != shape.kv_heads * shape.moe.topk):
        raise ValueError("attention_experts needs moe, and heads = moe.topk · kv_heads: give moe, or change heads")
    if not shape.attention_experts and shape.dynamic_mask is None:
        return
    for field in ("mla", "value_dim", "output_gate", "attention_sinks", "sliding", "differential", "qkv_clip"):
        if getattr(shape, field):
            raise ValueError(f"{field} is not supported with attention_experts or dynamic_mask: leave one out")
    if not shape.attention_experts or shape.moe is None:
        return
    if shape.qk_norm != "none" or shape.value_scale != 1:
        raise ValueError("attention_experts has no qk_norm or value_scale: leave them out")
    for field in ("qkv_bias", "dynamic_mask", "tied_values", "value_norm", "sub_norm", "shared_kv_layers",
                  "temperature", "multipliers", "last_out_bias"):  # fmt: skip
        if getattr(shape, field):
            raise ValueError(f"{field} is not supported with attention_experts: leave one out")
    for field in ("capacity", "identity_experts", "hashed_layers", "router_bias", "joined_norms"):
        if getattr(shape.moe, field):
            raise ValueError(f"moe.{field} is not supported with attention_experts: leave one out")
    if shape.moe.score == "sparsemixer" or shape.moe.balance == "free":
        raise ValueError("attention_experts has no score='sparsemixer' or balance='free': change them")


def _check_factors(shape: ModelShape) -> None:
    """Raise ``ValueError`` for factors on sums or tensors that the model does not have."""
    if shape.residual_factors is not None and (shape.residual_scale != 1 or shape.residual_by_depth):
        raise ValueError(
            "residual_factors already scales each residual addition: leave residual_scale and residual_by_depth out"
        )
    if shape.joins_mamba2 and (shape.mixers or shape.mla is not None or shape.block != "pre"):
        raise ValueError("joins_mamba2 is of pre-norm layers with grouped attention: leave mixers and mla out")
    parts = len(shape.multipliers.mixer_parts) if shape.multipliers is not None else 0
    if shape.multipliers is not None and not shape.joins_mamba2:
        raise ValueError(
            "multipliers is for attention and Mamba-2 in parallel: set joins_mamba2=true, or leave multipliers out"
        )
    if parts not in (0, 5):
        raise ValueError(f"multipliers.mixer_parts has {parts} factors, not five, of z, x, B, C and dt")


def _check_hyper_connections(shape: ModelShape) -> None:
    """Raise ``ValueError`` for what is not supported with several streams."""
    if shape.hyper_connections is None:
        return
    if shape.block != "pre" or not shape.first_norm:
        raise ValueError("hyper_connections is of models that norm the input of each branch: use block='pre'")
    for field, default in (
        ("residual_scale", 1.0),
        ("residual_by_depth", False),
        ("residual_weights", False),
        ("residual_factors", None),
        ("mtp", None),
        ("joins_mamba2", False),
    ):
        if getattr(shape, field) != default:
            raise ValueError(f"{field} is not supported with hyper_connections: leave one out")
    for field in ("dropout", "embedding_dropout"):
        if getattr(shape, field):
            raise ValueError(f"{field} is not supported with hyper_connections: leave one out")


def _check_latent(shape: ModelShape) -> None:
    """Raise ``ValueError`` for a field that latent attention would ignore."""
    if shape.sliding_mla is not None and (shape.mla is None or shape.sliding_mla.indexer is not None):
        raise ValueError("sliding_mla needs mla, and must have no indexer: leave it out")
    if shape.mla is None:
        return
    if not all(shape.rope_pattern):
        raise ValueError("with mla every layer rotates: leave rope_pattern out")
    if shape.position not in ("rope", "none"):
        raise ValueError(f"position={shape.position!r} is not supported with mla: use 'rope' or 'none'")
    if shape.position == "none" and shape.mla.indexer is not None:
        raise ValueError("mla.indexer rotates its queries and keys: use position='rope'")
    if shape.temperature is not None and shape.position == "none":
        raise ValueError("temperature is not supported with mla and position='none': leave temperature out")
    if shape.temperature is not None and not shape.temperature.rotated:
        raise ValueError("with mla every layer rotates: use temperature.rotated = true, or leave temperature out")
    for field in ("qkv_clip", "value_dim"):
        if (value := getattr(shape, field)) is not None:
            raise ValueError(f"{field}={value} applies to grouped attention, not to mla: leave it out")
    if shape.value_scale != 1:
        raise ValueError(f"value_scale={shape.value_scale:g} applies to grouped attention, not to mla: leave it out")
    for field in ("value_norm", "tied_values"):
        if getattr(shape, field):
            raise ValueError(f"{field} applies to grouped attention, not to mla: leave it out")
    if not shape.norm_weight:
        raise ValueError("mla norms its latents with weights: leave norm_weight=False out")
    if shape.gate_bias:
        raise ValueError("gate_bias applies to grouped attention, not to mla: leave it out")
    if shape.mla.gates_queries and (not shape.output_gate or shape.gate_per_head):
        raise ValueError("mla.gates_queries makes an output gate for each dim: give output_gate")
    if shape.qk_norm != "none":
        raise ValueError(f"mla norms its latents, not its heads: leave qk_norm={shape.qk_norm!r} out")


def _check_sliding(shape: ModelShape) -> None:
    """Raise ``ValueError`` for a geometry of sliding layers that does not fit the model."""
    if shape.sliding is None:
        return
    if not any(map(shape.has_window, range(shape.layers))):
        raise ValueError("sliding is given, but no layer has a sliding window: leave it out, or give window")
    if shape.mla is not None and (shape.sliding_mla is None or shape.sliding != Sliding(heads=shape.sliding.heads)):
        raise ValueError("with mla, sliding may set only heads, and needs sliding_mla: leave sliding out, or give both")
    sliding = shape.build_attention(slides=True)
    full = shape.build_attention(slides=False)
    if shape.mla is None and sliding.head_dim != full.head_dim and shape.temperature is not None:
        raise ValueError(
            "temperature needs equal head dims in sliding and full layers: leave it or sliding.head_dim out"
        )
    if sliding.heads % sliding.kv_heads:
        raise ValueError(f"sliding: heads={sliding.heads} is not divisible by kv_heads={sliding.kv_heads}: change one")
    if shape.qk_norm in ("full", "heads"):
        raise ValueError(
            f"qk_norm={shape.qk_norm!r} is not supported with sliding: use qk_norm='head', or leave one out"
        )
    if shape.position != "rope":
        if shape.sliding.rope_fraction is not None:
            raise ValueError(
                f"sliding.rope_fraction applies to rotary positions, not to position={shape.position!r}: leave it out"
            )
        return
    if sliding.rope_dim % 2:
        raise ValueError(f"sliding: rotary dim {sliding.rope_dim} is odd; head_dim x rope_fraction must be even")
    if sliding.rope_dim != full.rope_dim and shape.rope_theta_sliding is None:
        raise ValueError(
            f"sliding layers rotate {sliding.rope_dim} dims, others {full.rope_dim}: give rope_theta_sliding, the "
            "base of their own table"
        )


def _check_indexer(shape: ModelShape) -> None:
    """Raise ``ValueError`` for what is not supported with keys that an indexer chooses."""
    if shape.mla is None or shape.mla.indexer is None:
        return
    if shape.window and shape.sliding_mla is None:
        raise ValueError(
            "window is not supported with mla.indexer, which chooses the keys: "
            "describe layers with a window in sliding_mla"
        )
    if not all(shape.rope_pattern):
        raise ValueError("rope_pattern is not supported with mla.indexer: leave it out")
    first = next(filter(shape.chooses_or_reads, range(shape.layers)), None)
    if first is not None and not shape.has_indexer(first):
        raise ValueError(
            f"layer {first} is the first that attends to chosen keys, and must choose them: let "
            "mla.indexer.pattern be true there"
        )
    for field in ("attention_softcap", "temperature", "attention_dropout", "dropout"):
        if getattr(shape, field):
            raise ValueError(f"{field} is not supported with mla.indexer, which chooses the keys: leave one out")


def _check_values(shape: ModelShape) -> None:
    """Raise ``ValueError`` for values that cannot be the projected keys."""
    tied = [attention for attention in shape.attention_shapes if attention.tied_values]
    if tied and not shape.value_norm:
        raise ValueError("tied_values is supported with values that are normed: give value_norm, or leave it out")
    for attention in tied:
        if attention.head_dim != attention.value_dim:
            raise ValueError(
                f"values of {attention.value_dim} dims cannot be keys of {attention.head_dim} dims: leave tied_values "
                "out"
            )


def _check_sub_norm(shape: ModelShape) -> None:
    """Raise ``ValueError`` for layers that have no norms before their last matrices."""
    if not shape.sub_norm:
        return
    for feature, is_given in (
        ("mla", shape.mla is not None),
        ("moe", shape.moe is not None),
        ("mlp='receptance'", shape.mlp == "receptance"),
        ("norm_weight=False", not shape.norm_weight),
    ):
        if is_given:
            raise ValueError(f"sub_norm is not supported with {feature}: leave one out")


def _check_gate(shape: ModelShape) -> None:
    """Raise ``ValueError`` for a kind of output gate without an output gate."""
    for field, default in (
        ("gate_per_head", False),
        ("gate_bias", False),
        ("gate_in_query", False),
        ("gate_activation", "sigmoid"),
    ):
        if (value := getattr(shape, field)) != default and not shape.output_gate:
            raise ValueError(f"{field}={value!r} applies to an output gate: give output_gate, or leave it out")


def _check_norms(shape: ModelShape) -> None:
    """Raise ``ValueError`` for norms that contradict each other."""
    if not shape.norm_weight and shape.qk_norm in ("head", "heads", "full"):
        raise ValueError(f"norm_weight=False has no weights for qk_norm={shape.qk_norm!r}: use qk_norm='unit'")
    if not shape.norm_weight and shape.norm_plus_one:
        raise ValueError(
            "norm_plus_one adds 1 to the weights of norms, and norm_weight=False leaves these out: drop one"
        )
    if shape.pre_norm_mixers and (shape.block != "post" or not shape.non_attention_mixers):
        raise ValueError("pre_norm_mixers is of models with block='post' and mixers other than attention: leave it out")
    if shape.qk_norm_after_rope and shape.qk_norm not in ("head", "heads", "unit"):
        raise ValueError(
            f"qk_norm_after_rope needs norms per head, and qk_norm is {shape.qk_norm!r}: "
            "set qk_norm to 'head' or leave it out"
        )


def _check_mixers(shape: ModelShape) -> None:
    """Raise ``ValueError`` for a token mixer without a geometry, or a geometry without a layer."""
    halves = [(shape.mixer_name(layer) != "none", shape.has_feed_forward(layer)) for layer in range(shape.layers)]
    if (False, False) in halves:
        raise ValueError(
            f"layer {halves.index((False, False))} has neither a token mixer nor a feed-forward: give it one"
        )
    if shape.block in ("parallel", "parallel_shared") and not all(map(all, halves)):
        raise ValueError(f"block={shape.block!r} computes mixer and feed-forward in parallel: give all layers both")
    for kind in get_args(MixerName):
        if kind in ("attention", "none"):
            continue
        is_used = kind in shape.mixers[: shape.layers]
        geometry = getattr(shape, kind)
        is_used |= kind == "mamba2" and shape.joins_mamba2
        if is_used and geometry is None:
            raise ValueError(f"mixers has {kind} layers, but the table {kind} with their sizes is missing; add it")
        if geometry is not None and not is_used:
            raise ValueError(f"{kind} is given, but mixers has no {kind} layer; leave it out, or list its layers")


def _check_mixer_activation(shape: ModelShape) -> None:
    """Raise ``ValueError`` for an activation that cannot gate an RG-LRU, or that lightning attention cannot use."""
    activation = ACTIVATIONS[shape.activation]
    is_clamped_pair = activation.clamps  # of a gate and its product, which lightning attention has not
    for name, is_unknown in (("rg_lru", is_clamped_pair or activation.parameters), ("lightning", is_clamped_pair)):
        if getattr(shape, name) is not None and is_unknown:
            raise ValueError(f"{name} is not supported with activation={shape.activation!r}: use another")


def _check_shared_kv(shape: ModelShape) -> None:
    """Raise ``ValueError`` for layers without keys that have none to attend to, or not as they are counted."""
    shared = shape.shared_kv_layers
    if shape.shared_kv_ffn is not None and not shared:
        raise ValueError(
            "shared_kv_ffn is the width of the last shared_kv_layers=0 layers: give their number, or leave it out"
        )
    if not shared:
        return
    own = {shape.has_window(layer) for layer in range(shape.layers - shared)}
    if missing := {shape.has_window(layer) for layer in range(max(0, shape.layers - shared), shape.layers)} - own:
        kind = "sliding" if missing == {True} else "full"
        raise ValueError(
            f"shared_kv_layers={shared} leaves no {kind} layer with keys of its own, for the last {kind} ones to "
            "share: lower it"
        )
    _check_defaults(
        shape,
        "shared_kv_layers",
        *("mla", "mixers", "joins_mamba2", "differential", "attention_experts", "dynamic_mask", "qkv_clip", "mtp"),
        *("qk_norm_after_rope", "multipliers"),
    )
    if any(attention.sinks for attention in shape.attention_shapes):
        raise ValueError("attention_sinks is not supported with shared_kv_layers: leave one out")
    if shape.qk_norm == "full" or (shape.shared_kv_ffn is not None and shape.moe is not None):
        raise ValueError("shared_kv_layers is not supported with qk_norm='full', or with moe and shared_kv_ffn")


def _check_per_layer_inputs(shape: ModelShape) -> None:
    """Raise ``ValueError`` for what is not counted with inputs of each layer."""
    n_named = len(shape.gate_sparsity)
    if n_named and (n_named != shape.layers or shape.mlp != "gated" or shape.moe is not None):
        raise ValueError(f"gate_sparsity names {n_named} of {shape.layers} gated MLPs: name each layer")
    if shape.altup is not None and (shape.per_layer_inputs is None or shape.laurel_rank is None):
        raise ValueError("altup is counted with per_layer_inputs and laurel_rank: give them")
    if shape.laurel_rank is not None and (shape.altup is None or shape.block != "sandwich"):
        raise ValueError("laurel_rank needs altup and block='sandwich': give them")
    if shape.per_layer_inputs is None:
        return
    if shape.block not in ("pre", "sandwich"):
        raise ValueError(f"per_layer_inputs is not supported with block={shape.block!r}: use 'pre' or 'sandwich'")
    fields = ("hyper_connections", "feed_forwards", "mtp", "residual_by_depth", "dropout")
    _check_defaults(shape, "per_layer_inputs", *fields)
    activation = ACTIVATIONS[shape.activation]
    if activation.clamps or activation.parameters:
        raise ValueError(f"per_layer_inputs is not supported with activation={shape.activation!r}: use another")


def _check_defaults(shape: ModelShape, feature: str, *fields: str) -> None:
    """Raise ``ValueError`` for the first of ``fields`` that is given, which ``feature`` is not counted with."""
    for field in fields:
        if getattr(shape, field):
            raise ValueError(f"{field} is not supported with {feature}: leave one out")


def _approximate_parameters(shape: ModelShape) -> int:
    """Return the approximate number of parameters, without norms and biases; fast also for absurd sizes."""
    mla, moe, sliding = shape.mla, shape.moe, shape.sliding
    head_dims = shape.heads * (mla.nope_dim + mla.rope_dim + mla.v_dim if mla else 4 * shape.head_dim)
    if sliding is not None and mla is None:
        head_dims = max(head_dims, 4 * (sliding.heads or shape.heads) * (sliding.head_dim or shape.head_dim))
    ffn = max(shape.ffn, moe.experts * moe.ffn * (moe.latent_width or shape.width) // shape.width) if moe else shape.ffn
    inputs = shape.per_layer_inputs
    table = inputs.vocab * shape.layers * inputs.width if inputs else 0
    ffn = max(ffn, shape.shared_kv_ffn or 0)
    return (shape.layers + shape.mtp_depth) * shape.width * (head_dims + 2 * ffn) + shape.vocab * shape.width + table


def _has_plain_pairs(shape: ModelShape) -> bool:
    """Tell whether the layers are pairs with nothing but a stream from one to the next."""
    is_plain = shape.block == "pre" and not (shape.mixers or shape.feed_forwards or shape.layers % 2)
    has_more = (shape.mtp, shape.hyper_connections, shape.per_layer_inputs, shape.altup)
    return is_plain and has_more == (None,) * 4 and shape.moe is not None and not shape.moe.dense_layers
