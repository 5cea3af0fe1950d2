"""Helium."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_head_dim
from fivefold.model.spec import Model


def _build_helium(config: Config) -> Model:
    """Build Helium: Llama whose output projection is square and has no bias."""
    heads, head_dim = config.num_attention_heads, read_head_dim(config)
    if heads * head_dim != config.hidden_size:
        raise config.mistake(
            f"num_attention_heads={heads} x head_dim={head_dim} is not hidden_size={config.hidden_size}, with which "
            "transformers' code fails; change one"
        )
    return build_model(config, out_bias=False)


HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias mlp_bias"),
    defaults={
        **expand_names(vocab=48_000, width=2560, ffn=7040, layers=24, heads=20, kv_heads=20, positions=4096),
        "head_dim": 128,
        "norm_epsilon": 1e-8,
        "rope_theta": 100_000.0,
    },
    to_model=_build_helium,
    interleaved_rotary=True,
)
