"""BitNet b1.58, whose layers norm the inputs of their last matrices; here its weights are not ternary."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_head_dim
from fivefold.model.spec import Model


def _build_bitnet(config: Config) -> Model:
    """Build BitNet: the norm of heads is as wide as the stream."""
    if (output_dims := config.num_attention_heads * read_head_dim(config)) != config.hidden_size:
        raise config.mistake(
            f"heads of {output_dims} dims in all make transformers' code fail, as hidden_size={config.hidden_size}; "
            "leave head_dim out"
        )
    return build_model(config, sub_norm=True)


BITNET = Family(
    model_type="bitnet",
    architecture="BitNetForCausalLM",
    keys=decoder.KEYS | map_same_names("attention_bias"),
    defaults={
        **expand_names(vocab=128_256, width=2560, ffn=6912, layers=30, heads=20, kv_heads=5),
        "hidden_act": "relu2",
        "norm_epsilon": 1e-5,
        "rope_theta": 500_000.0,
    },
    to_model=_build_bitnet,
    tensors=decoder.TENSORS | {"attention.out_norm": "self_attn.attn_sub_norm", "mlp.norm": "mlp.ffn_sub_norm"},
)
