"""Llama 4."""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import EXPERT_GATE_UP, FusedTensor, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Wrapper
from fivefold.model.huggingface.mapping import build_model, find_period, list_rotating_layers, read_chunks
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_llama4(config: Config) -> Model:
    """Build Llama 4: every n-th layer has a shared expert and routed experts, whose inputs a sigmoid weights.

    Rotary layers attend within chunks, with unit queries and keys; other layers attend to all tokens, with queries that
    grow with the position.
    """
    layers = config.num_hidden_layers
    rotate = list_rotating_layers(config, listed=config.no_rope_layers or None)
    interval = config.interleave_moe_layer_step
    listed = range(interval - 1, layers, interval) if config.moe_layers is None else config.moe_layers
    routed = tuple(layer in listed for layer in range(layers))
    moe = {
        "experts": config.num_experts,
        "topk": config.num_experts_per_tok,
        "ffn": config.intermediate_size,
        "shared_experts": 1,
        "pattern": () if all(routed) else find_period(routed),
        "score": "sigmoid",
        "balance": "none",
        "normalized": False,
        "router_weight_on": "inputs",
    }
    fields: dict[str, Any] = {
        "ffn": config.intermediate_size_mlp,
        "rope_pattern": () if all(rotate) else find_period(rotate),
        "qk_norm": "unit" if config.use_qk_norm else "none",
        "moe": moe if any(routed) else None,
    }
    if config.attn_temperature_tuning and not all(rotate):
        fields["temperature"] = {"scale": config.attn_scale, "floor": config.floor_scale}
    rotary = read_rope(config)
    scaling = rotary["rope_scaling"]
    if config.use_qk_norm and scaling and scaling["attention_factor"] not in (None, 1):
        raise config.mistake(
            f"rope scaling {scaling['kind']!r}, which makes rotated queries longer, with use_qk_norm, which makes them "
            "unit again, is not supported; give attention_factor=1"
        )
    chunks = read_chunks(config, default=rotate)
    return build_model(config, **rotary, **chunks, **fields)


def _write_llama4(model: Model) -> dict[str, Any]:
    """Return the keys of Llama 4: its experts, its chunked attention and the temperature of the others."""
    layers, temperature = range(model.layers), model.temperature
    kinds = {True: "chunked_attention", False: "full_attention"}
    return {
        "intermediate_size": model.moe.ffn if model.moe else model.ffn,
        "use_qk_norm": model.qk_norm == "unit",
        "moe_layers": [layer for layer in layers if model.is_moe(layer)],
        "layer_types": [kinds[model.has_window(layer)] for layer in layers],
        "attention_chunk_size": model.window or 8192,
        "attn_temperature_tuning": temperature is not None,
        **({"attn_scale": temperature.scale, "floor_scale": temperature.floor} if temperature else {}),
    }


LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    keys=decoder.KEYS
    | {"num_local_experts": "num_experts"}
    | map_same_names(
        "intermediate_size_mlp num_experts_per_tok moe_layers interleave_moe_layer_step use_qk_norm no_rope_layers "
        "no_rope_layer_interval attention_chunk_size layer_types attn_temperature_tuning floor_scale attn_scale "
        "router_aux_loss_coef "  # its class does not apply it
        "attention_bias"
    ),
    defaults={
        **expand_names(vocab=202_048, width=5120, ffn=8192, layers=48, heads=40, kv_heads=8, positions=131_072),
        "intermediate_size_mlp": 16_384,
        "head_dim": 128,
        "norm_epsilon": 1e-5,
        "rope_theta": 500_000.0,
        **expand_names(experts=16, topk=1),
        "use_qk_norm": True,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
    },
    to_model=_build_llama4,
    write=_write_llama4,
    tensors=decoder.TENSORS
    | {
        **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **{f"moe.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        "moe.router": "feed_forward.router",
        **dict.fromkeys(
            EXPERT_GATE_UP, FusedTensor("feed_forward.experts.gate_up_proj", EXPERT_GATE_UP, transposed=True)
        ),
        "moe.experts.down": FusedTensor("feed_forward.experts.down_proj", ("moe.experts.down",), transposed=True),
    },
    interleaved_rotary=True,
)
WRAPPERS = (Wrapper("llama4", "Llama4ForConditionalGeneration", text="llama4_text", tied=False, ties=False),)
