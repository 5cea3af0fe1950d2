"""nanochat: norms without weights, of the embedding too, and after the rotation of queries and keys."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model

# Nanochat, whose code rotates backwards: the halves of its rotary rows are swapped in the file.
NANOCHAT = Family(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias final_logit_softcapping"),
    defaults={
        **expand_names(vocab=50_304, width=768, ffn=8192, layers=12, heads=6),
        "hidden_act": "relu2",
        "final_logit_softcapping": 15.0,
    },
    to_model=lambda config: build_model(
        config,
        norm_weight=False,
        embedding_norm="unit",
        qk_norm="unit",
        qk_norm_after_rope=True,
        mlp="plain",
        logit_softcap=config.final_logit_softcapping or None,
    ),
    write=lambda model: {"final_logit_softcapping": model.logit_softcap},
    tensors=decoder.TENSORS | {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"},
    swapped_rotary=True,
)
