"""Aria: experts as wide as ``intermediate_size`` in every layer, next to shared ones."""

from __future__ import annotations

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import EXPERT_GATE_UP, FusedTensor, expand_names, map_same_names
from fivefold.model.huggingface.family import Family
from fivefold.model.huggingface.mapping import build_model, read_activation, read_experts
from fivefold.model.spec import Model


def _build_aria(config: Config) -> Model:
    if read_activation(config) != "silu":
        raise config.mistake(
            f"hidden_act={config.hidden_act!r} needs shared experts with an activation other than that of the routed "
            "ones, which "
            "have silu, and is not supported; remove it or give hidden_act='silu'"
        )
    moe = read_experts(config, shared_experts=config.n_shared_experts)
    return build_model(config, moe=moe)


def _name_experts(gate_up: str, down: str) -> dict[str, str | FusedTensor]:
    return {
        **dict.fromkeys(EXPERT_GATE_UP, FusedTensor(gate_up, EXPERT_GATE_UP, transposed=True)),
        "moe.experts.down": FusedTensor(down, ("moe.experts.down",), transposed=True),
    }


ARIA_TEXT = Family(
    model_type="aria_text",
    architecture="AriaTextForCausalLM",
    keys=decoder.KEYS
    | {
        "moe_num_experts": "num_experts",
        "moe_topk": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    }
    | map_same_names("attention_bias mlp_bias"),
    defaults={"intermediate_size": 4096, **expand_names(experts=8, topk=2, shared_experts=2)},
    to_model=_build_aria,
    tensors=decoder.TENSORS
    | decoder.SHARED_EXPERT_TENSORS
    | {"moe.router": "mlp.router"}
    | _name_experts("mlp.experts.fc1.weight", "mlp.experts.fc2.weight"),
    stacked_tensors=_name_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
