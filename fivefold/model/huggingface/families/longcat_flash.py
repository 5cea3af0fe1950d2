"""LongCat-Flash: blocks of two layers, the first of which has experts next to its MLP (arXiv:2509.01322).

The experts read what the first MLP reads, and their output is added after the second MLP. Some of them give a token
back. We count two layers a block.
"""

from __future__ import annotations

from typing import Any

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import drop_keys, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_experts, read_latent
from fivefold.model.spec import Model


def _build(config: Config) -> Model:
    """Build LongCat-Flash; ``num_hidden_layers``, if given, counts the layers of all blocks."""
    rope_dim, layers = config.qk_rope_head_dim, config.sublayers
    if config.head_dim not in (None, rope_dim):
        raise config.mistake(f"head_dim={config.head_dim} is not qk_rope_head_dim={rope_dim}, which rotates; remove it")
    if config.q_lora_rank is None:
        raise config.mistake("q_lora_rank=None makes transformers' code fail; give the rank of the queries")
    fields = read_latent(config)
    fields["mla"]["scaled"] = "queries"
    moe = read_experts(
        config,
        identity_experts=config.identity_experts or 0,
        balance="free",
        aux_coefficient=0.0,
        normalized=False,
        joins_mlp=True,
        shortcut=True,
        pattern=(True, False),
    )
    blocks = config.num_hidden_layers if layers is None else layers // 2
    if not blocks:
        raise config.mistake(f"num_hidden_layers={layers} has to be 2 or more, as a block has two layers")
    return build_model(config.replace(num_hidden_layers=2 * blocks), **fields, moe=moe)


def _write(model: Model) -> dict[str, Any]:
    """Return the keys of this family's ``config.json`` for ``model``."""
    moe = model.moe
    return {
        **decoder.write_latent(model),
        "num_layers": model.layers // 2,
        "zero_expert_num": moe.identity_experts if moe else 0,
    }


TENSORS = {
    "norm1": "input_layernorm.<n>",
    "norm2": "post_attention_layernorm.<n>",
    "attention.out": "self_attn.<n>.o_proj",
    "mlp.gate": "mlps.<n>.gate_proj",
    "mlp.up": "mlps.<n>.up_proj",
    "mlp.down": "mlps.<n>.down_proj",
    "moe.router": "mlp.router.classifier",
    "moe.bias": "mlp.router.e_score_correction_bias",
    **{ours: str(theirs).replace("self_attn.", "self_attn.<n>.") for ours, theirs in decoder.LATENT_TENSORS.items()},
}
LONGCAT_FLASH = Family(
    model_type="longcat_flash",
    architecture="LongcatFlashForCausalLM",
    published_architecture="LongcatCausalLM",
    keys=drop_keys(decoder.KEYS, "intermediate_size", "num_hidden_layers")
    | drop_keys(decoder.LATENT_KEYS, "rope_interleave")
    | map_same_names("routed_scaling_factor")
    | {
        "num_layers": "num_hidden_layers",
        "num_hidden_layers": "sublayers",
        "intermediate_size": "intermediate_size",
        "ffn_hidden_size": "intermediate_size",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_topk": "num_experts_per_tok",
        "num_local_experts": "num_experts",
        "n_routed_experts": "num_experts",
        "moe_intermediate_size": "moe_intermediate_size",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "zero_expert_num": "identity_experts",
    },
    defaults={
        **expand_names(vocab=131_072, width=6144, ffn=12_288, layers=28, heads=64, positions=131_072, head_dim=64),
        "norm_epsilon": 1e-5,
        "rope_theta": 10_000_000.0,
        **expand_names(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
        **expand_names(experts=512, topk=12, expert_ffn=2048),
        "identity_experts": 256,
        "routed_scaling_factor": 6.0,
    },
    overwritten=("qk_head_dim",),
    to_model=_build,
    write=_write,
    layers_per_block=2,
    tensors={**decoder.EXPERT_TENSORS, **TENSORS},
    stacked_tensors={**decoder.name_stacked_experts(), "moe.router": "mlp.router.classifier"},
)
