"""``config.json`` -> ``Model`` for the families without experts: one small mapping each.

Source: configuration and modelling code of transformers 5.23.
"""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface.config import Config, attention_bias, model, period, windows
from fivefold.model.huggingface.rope import rope, rope_by_layers
from fivefold.model.spec import Model


def llama(config: Config) -> Model:
    """Llama: the fields that all share."""
    return model(config, **rope(config), **attention_bias(config), mlp_bias=config.mlp_bias)


def internlm3(config: Config) -> Model:
    """InternLM3: Llama, with biases in all matrices or in none."""
    if config.attention_bias != config.mlp_bias:
        raise config.mistake(
            f"qkv_bias={config.attention_bias} and bias={config.mlp_bias}, with which the family's code fails; "
            "give both the same value"
        )
    return llama(config)


def mistral(config: Config) -> Model:
    """Mistral: a sliding window in all layers, if any."""
    return model(config, **rope(config), **windows(config))


def _qwen_windows(config: Config) -> dict[str, Any]:
    """Qwen: if windows are used, layers from ``max_window_layers`` on have a sliding window."""
    used = config.use_sliding_window and config.sliding_window is not None
    layers = range(config.num_hidden_layers)
    return windows(config, default=tuple(used and layer >= config.max_window_layers for layer in layers))


def qwen2(config: Config) -> Model:
    """Qwen2: biases of q, k and v."""
    return model(config, **rope(config), **_qwen_windows(config), qkv_bias=True)


def qwen2_5_vl(config: Config) -> Model:
    """The text model of Qwen2.5-VL: Qwen2, as the three rotary positions of a token of text are one (mrope)."""
    turned = {
        field: {**given, "rope_type": "default"}
        for field in ("rope_scaling", "rope_parameters")
        if (given := getattr(config, field)) and given.get("rope_type", given.get("type")) == "mrope"
    }
    return qwen2(config.replace(**turned))


def qwen3(config: Config) -> Model:
    """Qwen3: norms of heads."""
    return model(config, **rope(config), **_qwen_windows(config), **attention_bias(config), qk_norm="head")


def _gemma(config: Config, *, slides: tuple[bool, ...], **of_family: Any) -> Model:
    return model(
        config,
        **windows(config, default=slides),
        **attention_bias(config),
        norm_plus_one=True,
        block="sandwich",
        attention_scale=config.query_pre_attn_scalar**-0.5,
        logit_softcap=config.final_logit_softcapping,
        embedding_scale=config.hidden_size**0.5,
        **of_family,
    )


def gemma2(config: Config) -> Model:
    """Gemma 2: every other layer slides; capped scores and logits."""
    return _gemma(config, slides=(True, False), **rope(config), attention_softcap=config.attn_logit_softcapping)


def gemma3(config: Config) -> Model:
    """Gemma 3: five of six layers slide, with a rotary base of their own; norms of heads."""
    if config.attn_logit_softcapping is not None:
        raise config.mistake("attn_logit_softcapping in Gemma 3, whose code does not apply it, is not supported")
    slides = (*(True,) * (config.sliding_window_pattern - 1), False)
    return _gemma(config, slides=slides, **rope_by_layers(config), qk_norm="head")


def phi3(config: Config) -> Model:
    """Phi-3 and 4."""
    # The file fuses q, k, v and gate, up into two matrices: the same weights. "yarn" was an early name of longrope.
    kinds = dict.fromkeys(("longrope", "su", "yarn"), "longrope")
    return model(config, **rope(config, partly=True, kinds=kinds), **windows(config))


def gpt2(config: Config) -> Model:
    """GPT-2: learned positions, biases everywhere."""
    return model(
        config,
        norm="layernorm",
        mlp="plain",
        mlp_bias=True,
        ffn=config.intermediate_size or 4 * config.hidden_size,
        kv_heads=config.num_attention_heads,
        position="learned",
        qkv_bias=True,
        out_bias=True,
        attention_scale=None if config.scale_attn_weights else 1.0,
    )


def gpt_neox(config: Config) -> Model:
    """GPT-NeoX: attention and MLP side by side."""
    head_dim = config.hidden_size // config.num_attention_heads
    if config.head_dim not in (None, head_dim):
        raise config.mistake(
            f"head_dim={config.head_dim} is not hidden_size / num_attention_heads = {head_dim}: the family's code "
            "would rotate by the one and attend by the other; remove it"
        )
    fields = {"norm": "layernorm", "mlp": "plain", "mlp_bias": True, "kv_heads": config.num_attention_heads}
    block = "parallel" if config.use_parallel_residual else "pre"
    # one key for embedding and branches: embedding_dropout is left to that of the branches
    fields |= {"block": block, "embedding_dropout": None}
    return model(config, **rope(config, partly=True), **attention_bias(config), **fields)


def nemotron(config: Config) -> Model:
    """Nemotron: squared ReLU, a LayerNorm whose weight is the factor minus one."""
    fields = {"norm": "layernorm", "norm_plus_one": True, "mlp": "plain", "mlp_bias": config.mlp_bias}
    return model(config, **rope(config, partly=True), **attention_bias(config), **fields)


def olmo2(config: Config) -> Model:
    """OLMo 2: norms after attention and MLP, and over all queries and keys."""
    return model(config, **rope(config), **attention_bias(config), block="post", qk_norm="full")


def granite(config: Config) -> Model:
    """Granite: Llama with factors on embedding, scores, branches and logits."""
    return model(config, **rope(config), **attention_bias(config), mlp_bias=config.mlp_bias, **granite_scales(config))


def granite_scales(config: Config) -> dict[str, float]:
    """The factors of Granite, with experts or without."""
    return {
        "embedding_scale": config.embedding_multiplier,
        "attention_scale": config.attention_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": 1 / config.logits_scaling,
    }


def starcoder2(config: Config) -> Model:
    """StarCoder2: LayerNorm, a plain MLP, biases everywhere, a sliding window in all layers, if any."""
    fields = {"norm": "layernorm", "mlp": "plain", "mlp_bias": config.attention_bias}
    return model(config, **rope(config), **windows(config), **attention_bias(config), **fields)


def glm(config: Config) -> Model:
    """GLM-4 of 2024: half of a head rotates."""
    return model(config, **rope(config, partly=True), qkv_bias=config.attention_bias)


def glm4(config: Config) -> Model:
    """GLM-4 of 2025: as before, with norms after attention and MLP too."""
    return glm(config).replace(block="sandwich")


def smollm3(config: Config) -> Model:
    """SmolLM3: every fourth layer without positions, or those that are listed."""
    rotate = rotating(config, listed=config.no_rope_layers)
    slide = config.use_sliding_window and config.sliding_window is not None
    slides = windows(config, default=tuple(slide and not each for each in rotate))
    fields = {"rope_pattern": () if all(rotate) else period(rotate), "mlp_bias": config.mlp_bias}
    return model(config, **rope(config), **slides, **attention_bias(config), **fields)


def rotating(config: Config, *, listed: tuple[int, ...] | None) -> tuple[bool, ...]:
    """Which layers rotate: all but every ``no_rope_layer_interval``-th, or as ``listed``."""
    layers = config.num_hidden_layers
    if listed is None:
        return tuple((layer + 1) % config.no_rope_layer_interval != 0 for layer in range(layers))
    if len(listed) < layers:
        raise config.mistake(f"no_rope_layers names {len(listed)} layers, num_hidden_layers is {layers}")
    return tuple(map(bool, listed[:layers]))


def _command(config: Config, **of_family: Any) -> Model:
    fields = {
        "norm": "layernorm", "norm_bias": False, "block": "parallel_shared", "logit_scale": config.logit_scale,
    }  # fmt: skip
    return model(config, **rope(config), **attention_bias(config), **fields, **of_family)


def cohere(config: Config) -> Model:
    """Command-R: attention and MLP side by side behind one norm without bias, a factor on the logits.

    Command-R+ norms its queries and keys, by a weight for each head.
    """
    return _command(config, qk_norm="heads" if config.use_qk_norm else "none")


def cohere2(config: Config) -> Model:
    """Command-R7B and A: only the layers that slide rotate."""
    layers = range(config.num_hidden_layers)
    default = tuple((layer + 1) % config.sliding_window_pattern != 0 for layer in layers)
    slides = windows(config, default=default)
    if not slides:
        return _command(config, position="none")
    return _command(config, **slides, rope_pattern=slides["window_pattern"])


def falcon(config: Config) -> Model:
    """Falcon: one key head, or groups (40B); attention and MLP side by side, or one after another."""
    if config.hidden_size % config.num_attention_heads:
        raise config.mistake(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={config.num_attention_heads}"
        )
    heads, grouped, norms = config.num_attention_heads, config.new_decoder_architecture, config.num_ln_in_parallel_attn
    norms = (2 if grouped else 1) if norms is None else norms
    if (grouped and not config.parallel_attn) or (norms == 2 and not grouped and config.parallel_attn):
        raise config.mistake(
            f"new_decoder_architecture={grouped}, parallel_attn={config.parallel_attn} and "
            f"num_ln_in_parallel_attn={norms} do not go together in the family's code; leave the last two out"
        )
    block = "pre" if not config.parallel_attn else "parallel" if norms == 2 else "parallel_shared"
    kv_heads = (config.num_key_value_heads or heads) if grouped else 1 if config.multi_query else heads
    fields = {
        "norm": "layernorm", "mlp": "plain", "mlp_bias": config.attention_bias, "block": block, "kv_heads": kv_heads,
        "ffn": config.intermediate_size or 4 * config.hidden_size, "head_dim": config.hidden_size // heads,
    }  # fmt: skip
    return model(config, **rope(config), **attention_bias(config), **fields)
