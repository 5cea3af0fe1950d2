"""``config.json`` -> ``Model`` for the families with experts, as in ``families.py``.

Source: configuration and modelling code of transformers 5.23.
"""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface.config import Config, attention_bias, chunks, model, period, windows
from fivefold.model.huggingface.dense import granite_scales, rotating
from fivefold.model.huggingface.rope import rope, yarn_mscale
from fivefold.model.spec import Model


def mixtral(config: Config) -> Model:
    """Mixtral: experts in every layer, with ffn = intermediate_size."""
    return model(config, **rope(config), **windows(config), moe=_alike(config))


def _alike(config: Config) -> dict[str, Any]:
    """Experts in every layer. A softmax over the top-k logits is that over all logits, rescaled to sum to one."""
    return {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.intermediate_size,
        "aux_coefficient": config.router_aux_loss_coef,
    }


def granitemoe(config: Config) -> Model:
    """Granite with experts: Mixtral's, and Granite's factors."""
    return model(config, **rope(config), **attention_bias(config), **granite_scales(config), moe=_alike(config))


def qwen3_moe(config: Config) -> Model:
    """Qwen3-MoE: experts after the first dense layers, norms on queries and keys."""
    dense = sorted(config.mlp_only_layers or ())
    if dense != list(range(len(dense))):
        raise config.mistake(f"mlp_only_layers={dense} needs dense layers after experts, which is not supported")
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "dense_layers": len(dense),
        "aux_coefficient": config.router_aux_loss_coef,
        "normalized": config.norm_topk_prob,
    }
    return model(config, **rope(config), **windows(config), **attention_bias(config), qk_norm="head", moe=moe)


def _mtp(config: Config) -> dict[str, Any] | None:
    """Multi-token prediction: transformers builds it for generation only, and its classes take 1 for a missing key."""
    return {"depth": config.num_nextn_predict_layers} if config.num_nextn_predict_layers else None


def _deepseek(config: Config, *, score: str, method: tuple[str, ...], moe: dict[str, Any]) -> Model:
    if config.scoring_func not in (None, score):
        raise config.mistake(f"scoring_func={config.scoring_func!r} is not supported in this family; only {score!r}")
    if config.topk_method not in (None, *method):
        raise config.mistake(f"topk_method={config.topk_method!r} is not supported; supported: {', '.join(method)}")
    experts = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "shared_experts": config.n_shared_experts or 0,
        "dense_layers": config.first_k_dense_replace,
        "score": score,
        "scaling": config.routed_scaling_factor,
    }
    mla = {
        "q_rank": config.q_lora_rank,
        "kv_rank": config.kv_lora_rank,
        "nope_dim": config.qk_nope_head_dim,
        "rope_dim": config.qk_rope_head_dim,
        "v_dim": config.v_head_dim,
    }
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    rotary = rope(config)
    scaling = rotary["rope_scaling"] or {"mscale_all_dims": None}
    weight = scaling["mscale_all_dims"]
    sharper = yarn_mscale(scaling["factor"], weight=weight) if weight else 1.0
    return model(
        config,
        **rotary,
        **attention_bias(config),
        mlp_bias=config.mlp_bias,
        kv_heads=config.num_attention_heads,
        head_dim=qk_dim,
        attention_scale=sharper**2 / qk_dim**0.5,
        mla=mla,
        moe=experts | moe,
        mtp=_mtp(config),
    )


def deepseek_v2(config: Config) -> Model:
    """DeepSeek-V2: latent attention; softmax routing, optionally limited to groups of experts."""
    if config.norm_topk_prob:
        raise config.mistake("norm_topk_prob=true differs between codes of DeepSeek-V2 and is not supported")
    grouped = config.topk_method == "group_limited_greedy"
    moe = {
        "aux_coefficient": config.aux_loss_alpha or 0.0,
        "normalized": False,
        "groups": config.n_group if grouped else 1,
        "topk_groups": config.topk_group if grouped else 1,
    }
    return _deepseek(config, score="softmax", method=("greedy", "group_limited_greedy"), moe=moe)


def deepseek_v3(config: Config) -> Model:
    """DeepSeek-V3: latent attention; sigmoid routing with a balancing bias, limited to groups of experts."""
    # The balancing bias e_score_correction_bias is not a weight: transformers 5.23 has it as a buffer, updated from the
    # load without gradients. It is not counted.
    # Rotary pairs are interleaved in the file and half-split here: a permutation of rows, not another operation.
    if config.head_dim not in (None, config.qk_rope_head_dim):
        raise config.mistake(
            f"head_dim={config.head_dim} is not qk_rope_head_dim={config.qk_rope_head_dim}: the family's code would "
            "make rotary angles for the one and fail on the other; remove it"
        )
    moe = {
        "balance": "free",
        "aux_coefficient": config.aux_loss_alpha or 0.0,
        "normalized": config.norm_topk_prob,
        "groups": config.n_group or 1,
        "topk_groups": config.topk_group or 1,
    }
    return _deepseek(config, score="sigmoid", method=("noaux_tc",), moe=moe)


def glm4_moe(config: Config) -> Model:
    """GLM-4.5: DeepSeek-V3's experts behind grouped attention, of which a part of each head turns."""
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.moe_intermediate_size,
        "shared_experts": config.n_shared_experts or 0,
        "dense_layers": config.first_k_dense_replace,
        "score": "sigmoid",
        "balance": "free",
        "aux_coefficient": 0.0,
        "normalized": config.norm_topk_prob,
        "scaling": config.routed_scaling_factor,
        "groups": config.n_group or 1,
        "topk_groups": config.topk_group or 1,
    }
    fields = {
        "qkv_bias": config.attention_bias,
        "qk_norm": "head" if config.use_qk_norm else "none",
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
    }
    return model(config, **rope(config, partly=True), **fields, moe=moe, mtp=_mtp(config))


def minimax_m2(config: Config) -> Model:
    """MiniMax-M2: experts in every layer chosen by sigmoids and a balancing bias; norms over all heads at once."""
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.intermediate_size,
        "score": "sigmoid",
        "balance": "free",
        "aux_coefficient": config.router_aux_loss_coef,
    }
    dims = config.head_dim or config.hidden_size // config.num_attention_heads
    if config.rotary_dim is not None and config.unread_rotary_factor == 1:  # as its published files say it
        config = config.replace(partial_rotary_factor=config.rotary_dim / dims)
    return model(config, **rope(config, partly=True), qk_norm="full", moe=moe)


def gpt_oss(config: Config) -> Model:
    """gpt-oss: experts with biases, attention sinks, a sliding window in every other layer."""
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.intermediate_size,
        "aux_coefficient": config.router_aux_loss_coef,
        "router_bias": True,
        "expert_bias": True,
    }
    fields = {"activation": "clamped_swiglu", "attention_sinks": True, "moe": moe}
    return model(config, **rope(config), **windows(config, default=(True, False)), **attention_bias(config), **fields)


def llama4(config: Config) -> Model:
    """Llama 4: experts whose inputs are weighted by a sigmoid, beside a shared one, in every n-th layer.

    Rotary layers attend in chunks, by unit queries and keys; the others to all, by queries that grow with the position.
    """
    layers = config.num_hidden_layers
    rotate = rotating(config, listed=config.no_rope_layers or None)
    every = config.interleave_moe_layer_step
    listed = range(every - 1, layers, every) if config.moe_layers is None else config.moe_layers
    routed = tuple(layer in listed for layer in range(layers))
    moe = {
        "experts": config.num_experts, "topk": config.num_experts_per_tok, "ffn": config.intermediate_size,
        "shared_experts": 1, "pattern": () if all(routed) else period(routed), "score": "sigmoid", "balance": "none",
        "normalized": False, "weighs": "inputs",
    }  # fmt: skip
    fields = {
        "ffn": config.intermediate_size_mlp,
        "rope_pattern": () if all(rotate) else period(rotate),
        "qk_norm": "unit" if config.use_qk_norm else "none",
        "temperature": {"scale": config.attn_scale, "floor": config.floor_scale},
        "moe": moe if any(routed) else None,
    }
    if not config.attn_temperature_tuning or all(rotate):
        del fields["temperature"]
    rotary = rope(config)
    scaling = rotary["rope_scaling"]
    if config.use_qk_norm and scaling and scaling["attention_factor"] not in (None, 1):
        raise config.mistake(
            f"rope scaling {scaling['kind']!r}, which makes rotated queries longer, with use_qk_norm, which makes them "
            "unit again, is not supported; give attention_factor=1"
        )
    return model(config, **rotary, **chunks(config, default=rotate), **attention_bias(config), **fields)
