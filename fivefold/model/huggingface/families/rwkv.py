"""RWKV-4: time mixing instead of attention, and a feed-forward with a gate (arXiv:2305.13048)."""

from __future__ import annotations

from fivefold.model.huggingface import state_space
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.mixers.rwkv import MIXED
from fivefold.model.spec import Model


def _build(config: Config) -> Model:
    """Build RWKV-4: time mixing in place of attention, and a receptance gate in the MLP."""
    inner = config.lru_width or config.hidden_size
    unused = state_space.fill_unused_sizes(1, 1) | {"ffn": config.intermediate_size or 4 * config.hidden_size}
    return build_model(
        config,
        **unused,
        position="none",
        norm="layernorm",
        embedding_norm="weighted",
        mlp="receptance",
        mixers=("rwkv",),
        rwkv={"inner": inner},
    )


RWKV = Family(
    model_type="rwkv",
    architecture="RwkvForCausalLM",
    keys=map_same_names("vocab_size hidden_size intermediate_size num_hidden_layers tie_word_embeddings")
    | {
        "max_position_embeddings": "max_position_embeddings",
        "context_length": "max_position_embeddings",
        "attention_hidden_size": "lru_width",
        "layer_norm_epsilon": "norm_epsilon",
    },
    defaults={
        **state_space.UNUSED,
        **expand_names(vocab=50_277, width=4096, layers=32, positions=1024),
        "intermediate_size": None,
        "hidden_act": "relu2",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    },
    to_model=_build,
    write=lambda model: {"attention_hidden_size": model.rwkv.inner if model.rwkv else model.width},
    tensors={
        "blocks": "rwkv.blocks.{}",
        "embed.tokens": "rwkv.embeddings",
        "embed.norm": "rwkv.blocks.0.pre_ln",
        "head.norm": "rwkv.ln_out",
        "head.out": "head",
        "norm1": "ln1",
        "norm2": "ln2",
        **{f"mixer.mix_{name}": f"attention.time_mix_{name}" for name in MIXED},
        **{f"mixer.{name}": f"attention.{name}" for name in MIXED},
        "mixer.decay": "attention.time_decay",
        "mixer.first": "attention.time_first",
        "mixer.out": "attention.output",
        "mlp.mix_up": "feed_forward.time_mix_key",
        "mlp.mix_receptance": "feed_forward.time_mix_receptance",
        "mlp.up": "feed_forward.key",
        "mlp.receptance": "feed_forward.receptance",
        "mlp.down": "feed_forward.value",
    },
    ones={**{f"mixer.mix_{name}": (0, 1) for name in MIXED}, "mlp.mix_up": (0, 1), "mlp.mix_receptance": (0, 1)},
)
