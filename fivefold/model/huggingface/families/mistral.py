"""Mistral, Ministral, Ministral 3 and Mixtral."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported, Wrapper
from fivefold.model.huggingface.mapping import build_model, read_experts, read_windows
from fivefold.model.huggingface.rope import read_temperature
from fivefold.model.spec import Model

DEFAULTS = {**expand_names(ffn=14_336, kv_heads=8, positions=131_072)}


def _build_mistral(config: Config) -> Model:
    """Build Mistral, which may have a sliding window in all layers."""
    return build_model(config, **read_windows(config))


def _build_ministral(config: Config) -> Model:
    """Build Ministral, in which ``layer_types`` says which layers slide: all, if there is a window."""
    if config.head_dim is None:
        raise config.mistake("head_dim=None makes transformers' code fail; give the dims of a head")
    return _build_mistral(config)


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=decoder.KEYS | map_same_names("sliding_window"),
    defaults={**DEFAULTS, "sliding_window": 4096},
    to_model=_build_mistral,
)
MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    keys=decoder.KEYS | map_same_names("sliding_window layer_types"),
    defaults={**DEFAULTS, "sliding_window": 4096},
    to_model=_build_ministral,
)
# Ministral 3: Mistral with a factor on rotated queries that grows with the position.
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    keys=drop_keys(decoder.KEYS, "original_max_position_embeddings") | map_same_names("sliding_window"),
    defaults={
        **DEFAULTS,
        **expand_names(vocab=131_072, layers=34, head_dim=128, positions=262_144),
        "norm_epsilon": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    to_model=lambda config: build_model(config, **read_windows(config), **read_temperature(config)),
    write=decoder.write_temperature,
)
# Mixtral: experts in every layer, each of width intermediate_size.
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=decoder.KEYS | decoder.EXPERT_KEYS | map_same_names("sliding_window"),
    defaults={
        **DEFAULTS,
        "norm_epsilon": 1e-5,
        "rope_theta": 1_000_000.0,
        **expand_names(experts=8, topk=2),
        "router_aux_loss_coef": 0.001,
    },
    supported={"router_jitter_noise": Supported((0,), "noise on the router's input")},
    to_model=lambda config: build_model(config, **read_windows(config), moe=read_experts(config)),
    tensors=decoder.MIXTRAL_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)
WRAPPERS = (Wrapper("mistral3", "Mistral3ForConditionalGeneration", text="mistral", tied=True),)
