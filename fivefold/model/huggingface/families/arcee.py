"""AFM of Arcee: Llama with a plain MLP of squared ReLU."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_attention_bias
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_arcee(config: Config) -> Model:
    fields = {"mlp": "plain", "mlp_bias": config.mlp_bias}
    return build_model(config, **read_rope(config), **read_attention_bias(config), **fields)


ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias mlp_bias"),
    defaults={
        "hidden_size": 2560,
        "intermediate_size": 18_432,
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
    },
    to_model=_build_arcee,
)
