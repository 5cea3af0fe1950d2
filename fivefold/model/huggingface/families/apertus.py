"""Apertus: Llama with norms of queries and keys, and an MLP without a gate, of xIELU."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model

APERTUS = Family(
    model_type="apertus",
    architecture="ApertusForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias"),
    defaults={
        **expand_names(vocab=131_072, ffn=14_336, positions=65_536),
        "hidden_act": "xielu",
        "norm_epsilon": 1e-5,
        "rope_theta": 12_000_000.0,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12_000_000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    to_model=lambda config: build_model(config, mlp="plain", qk_norm="head"),
    write=decoder.write_unscaled_rope,
    tensors=decoder.TENSORS
    | {
        "norm1": "attention_layernorm",
        "norm2": "feedforward_layernorm",
        "mlp.alpha_p": "mlp.act_fn.alpha_p",
        "mlp.alpha_n": "mlp.act_fn.alpha_n",
    },
    # transformers 5.23:src/transformers/activations.py, XIELUActivation: buffers, which a file has to have
    constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
)
