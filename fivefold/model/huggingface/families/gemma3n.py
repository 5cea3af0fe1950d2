"""Gemma 3n: AltUp, a low-rank branch next to attention, sparse gates, shared keys, inputs of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fivefold.model.altup import MAX_STREAMS, AltUp
from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.families import gemma, gemma4
from fivefold.model.huggingface.families.gemma4 import read_common_fields
from fivefold.model.huggingface.family import Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, read_windows
from fivefold.model.huggingface.rope import read_gemma3_rope
from fivefold.model.spec import Model

SPARSE_LAYERS, SPARSITY = 10, 0.95  # of a model of more layers, where the file does not say


def _build_gemma3n(config: Config) -> Model:
    """Build Gemma 3n, whose scores have no factor."""
    layers, given = config.num_hidden_layers, config.intermediate_sizes
    sizes = given if isinstance(given, tuple) else (given,) * layers
    if len(sizes) != layers or len(set(sizes)) > 1:
        raise config.mistake(
            f"intermediate_size={list(sizes)}: widths that differ are not supported; give one for all {layers} layers"
        )
    if not config.per_layer_width or config.altup_num_inputs < 2:
        raise config.mistake(
            "hidden_size_per_layer_input=0 or altup_num_inputs=1 is not supported; give a width, and two inputs or more"
        )
    return build_model(
        config.replace(intermediate_size=sizes[0]),
        **read_gemma3_rope(config),
        **read_windows(config, default=(True,) * 4 + (False,)),
        **read_common_fields(config),
        altup=AltUp(streams=config.altup_num_inputs, clip=config.altup_coef_clip, scales=config.altup_correct_scale),
        laurel_rank=config.laurel_rank,
        gate_sparsity=_read_sparsity(config),
    )


def _read_sparsity(config: Config) -> tuple[float, ...]:
    """Return the share of gates of each layer that are set to zero; () if all are kept."""
    given, layers = config.activation_sparsity_pattern, config.num_hidden_layers
    if given is None:
        given = SPARSITY if layers > SPARSE_LAYERS else 0.0
        given = (given,) * min(layers, SPARSE_LAYERS) + (0.0,) * max(0, layers - SPARSE_LAYERS)
    if not isinstance(given, tuple) or len(given) != layers:
        raise config.mistake(f"activation_sparsity_pattern={given} names no number for each of {layers} layers")
    return given if any(given) else ()


def _write_gemma3n(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    inputs, altup = model.per_layer_inputs, model.altup
    if inputs is None or altup is None:  # a model of another family
        return {}
    return {
        "intermediate_size": [model.ffn] * model.layers,
        "hidden_size_per_layer_input": inputs.width,
        "vocab_size_per_layer_input": inputs.vocab,
        "num_kv_shared_layers": model.shared_kv_layers,
        "altup_num_inputs": altup.streams,
        "altup_coef_clip": altup.clip,
        "altup_correct_scale": altup.scales,
        "laurel_rank": model.laurel_rank,
        "activation_sparsity_pattern": list(model.gate_sparsity) or [0.0] * model.layers,
    }


GEMMA3N_TEXT = replace(
    gemma4.GEMMA4_TEXT,
    model_type="gemma3n_text",
    architecture="Gemma3nForCausalLM",
    keys=drop_keys(
        gemma.GEMMA3_TEXT.keys,
        *("query_pre_attn_scalar", "attn_logit_softcapping", "sliding_window_pattern", "intermediate_size"),
    )
    | map_same_names("num_kv_shared_layers altup_num_inputs altup_coef_clip altup_correct_scale laurel_rank")
    | map_same_names("activation_sparsity_pattern")
    | {
        "intermediate_size": "intermediate_sizes",
        "hidden_size_per_layer_input": "per_layer_width",
        "vocab_size_per_layer_input": "per_layer_vocab",
    },
    defaults={
        **{key: value for key, value in gemma.GEMMA3_TEXT.defaults.items() if key in decoder.DEFAULTS},
        **expand_names(vocab=262_400, width=2048, layers=35, heads=8, kv_heads=2, head_dim=256, positions=32_768),
        "intermediate_size": None,
        "intermediate_sizes": 16_384,
        "sliding_window": 512,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "final_logit_softcapping": 30.0,
        "per_layer_width": 256,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "altup_coef_clip": 120.0,
        "laurel_rank": 64,
    },
    supported={"altup_active_idx": Supported((0,), "another part of the stream than the first in each layer")},
    to_model=_build_gemma3n,
    write=_write_gemma3n,
    tensors=dict(gemma4.GEMMA4_TEXT.tensors)
    | {
        "altup.scale": "altup.correct_output_scale",
        "altup.correct": "altup.correction_coefs",
        "altup.predict": "altup.prediction_coefs",
        "altup.router": "altup.modality_router",
        "altup.norm": "altup.router_norm",
        "laurel.left": "laurel.linear_left",
        "laurel.right": "laurel.linear_right",
        "laurel.norm": "laurel.post_laurel_norm",
    }
    | {f"embed.altup.{index}": f"model.altup_projections.{index}" for index in range(MAX_STREAMS - 1)}
    | {f"head.altup.{index}": f"model.altup_unembed_projections.{index}" for index in range(MAX_STREAMS - 1)},
    constants={},
)
WRAPPERS = (Wrapper("gemma3n", "Gemma3nForConditionalGeneration", text="gemma3n_text", tied=True),)
