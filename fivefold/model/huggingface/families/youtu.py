"""Youtu-LLM: DeepSeek's latent attention with a dense MLP."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import drop_keys, expand_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_latent

YOUTU = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    keys=drop_keys(decoder.KEYS, "head_dim") | decoder.LATENT_KEYS,
    defaults={
        **expand_names(vocab=128_256, width=2048, ffn=6144, heads=16, kv_heads=16, positions=131_072),
        **expand_names(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, v_dim=128),
        "tie_word_embeddings": True,
    },
    overwritten=("head_dim",),
    to_model=lambda config: build_model(config, **read_latent(config)),
    write=decoder.write_latent,
    tensors=decoder.TENSORS | decoder.LATENT_TENSORS,
)
