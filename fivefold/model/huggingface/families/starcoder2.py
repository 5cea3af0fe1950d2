"""StarCoder2."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_windows

# StarCoder2: LayerNorm, a plain MLP, biases in all layers, and maybe a sliding window in all layers.
STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys=decoder.LAYER_NORM_KEYS
    | {"norm_epsilon": "norm_epsilon", "use_bias": "attention_bias", "residual_dropout": "hidden_dropout"}
    | map_same_names("sliding_window embedding_dropout"),
    defaults={
        **expand_names(vocab=49_152, width=3072, ffn=12_288, layers=30, heads=24, kv_heads=2, positions=4096),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "attention_bias": True,
        "embedding_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    to_model=lambda config: build_model(
        config, **read_windows(config), norm="layernorm", mlp="plain", mlp_bias=config.attention_bias
    ),
    tensors=decoder.TENSORS | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
)
