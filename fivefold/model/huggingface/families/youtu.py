"""Youtu-LLM: DeepSeek's latent attention with a dense MLP."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import drop_keys
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_latent

YOUTU = Family(
    model_type="youtu",
    architecture="YoutuForCausalLM",
    keys=drop_keys(decoder.KEYS, "head_dim") | decoder.LATENT_KEYS,
    defaults={
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
    overwritten=("head_dim",),
    to_model=lambda config: build_model(config, **read_latent(config)),
    write=decoder.write_latent,
    tensors=decoder.TENSORS | decoder.LATENT_TENSORS,
)
