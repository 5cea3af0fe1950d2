"""Mistral 4: DeepSeek-V3's latent attention and experts, a softmax router, and a factor on rotated queries."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family, Supported
from fivefold.model.huggingface.mapping import build_model, read_biased_experts, read_latent
from fivefold.model.huggingface.rope import read_rope, read_temperature
from fivefold.model.spec import Model

ONE_GROUP = Supported((1, None), "groups of experts by the two best of a softmax")


def _build_mistral4(config: Config) -> Model:
    """Build Mistral 4, whose softmax router has no balancing bias."""
    moe = read_biased_experts(config) | {
        "score": "softmax",
        "balance": "none",
        "dense_layers": min(config.first_k_dense_replace, config.num_hidden_layers),
    }
    latent = read_latent(config, read_rope(config, has_partial_rotary=True) | {"rope_fraction": 1.0})
    return build_model(config, **latent, **read_temperature(config), moe=moe)


MISTRAL4 = Family(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    keys=drop_keys(decoder.KEYS, "original_max_position_embeddings", "head_dim", "partial_rotary_factor")
    | drop_keys(decoder.BIASED_EXPERT_KEYS, "n_group", "topk_group")
    | decoder.LATENT_KEYS
    | map_same_names("first_k_dense_replace"),
    defaults={
        **expand_names(vocab=131_072, ffn=12_288, layers=36, kv_heads=32, positions=1_048_576),
        **expand_names(expert_ffn=2048, shared_experts=1, experts=128, topk=4),
        **expand_names(kv_rank=256, q_rank=1024, nope_dim=64, rope_dim=64, v_dim=128),
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    supported={
        "n_group": ONE_GROUP,
        "topk_group": ONE_GROUP,
        "original_max_position_embeddings": Supported((None,), "a length of the pre-training outside rope_parameters"),
    },
    overwritten=("head_dim",),
    to_model=_build_mistral4,
    write=lambda model: decoder.write_latent(model) | decoder.write_temperature(model),
    tensors=decoder.BIASED_EXPERT_TENSORS | decoder.LATENT_TENSORS,
    stacked_tensors=decoder.name_stacked_experts(),
)
