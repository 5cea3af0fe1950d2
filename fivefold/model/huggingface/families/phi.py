"""Phi-3 and Phi-4."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import QKV, same
from fivefold.model.huggingface.family import Family, Fused
from fivefold.model.huggingface.mapping import build_model, read_windows
from fivefold.model.huggingface.rope import read_rope
from fivefold.model.spec import Model


def _build_phi3(config: Config) -> Model:
    """Build Phi-3 or Phi-4: a part of the head rotates. "su" and "yarn" were early names of longrope."""
    kinds = dict.fromkeys(("longrope", "su", "yarn"), "longrope")
    return build_model(config, **read_rope(config, partly=True, kinds=kinds), **read_windows(config))


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    keys=decoder.KEYS | same("partial_rotary_factor sliding_window") | {"resid_pdrop": "hidden_dropout"},
    defaults={
        **decoder.DEFAULTS,
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
    },
    to_model=_build_phi3,
    tensors=decoder.TENSORS | dict.fromkeys(QKV, Fused("self_attn.qkv_proj", QKV)) | decoder.FUSED_GATE_UP,
)

FAMILIES = (PHI3,)
