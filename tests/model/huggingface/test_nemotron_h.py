"""Multi-token prediction of Nemotron 3: its layers, and the names of its tensors in published files."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.tensors import list_tensors
from tests.model.mutations import FAMILIES

CONFIG = {"model_type": "nemotron_h", **FAMILIES["nemotron_h"], "num_nextn_predict_layers": 2}
# NVIDIA-NeMo/Megatron-Bridge@067f987:src/megatron/bridge/models/nemotronh/nemotron_h_bridge.py, mapping_registry
ATTENTION = {"enorm", "hnorm", "eh_proj", "norm", *(f"mixer.{part}_proj" for part in "qkvo")}
EXPERTS = {
    "norm", "final_layernorm", "mixer.gate", "mixer.gate.e_score_correction_bias", "mixer.fc1_latent_proj",
    "mixer.fc2_latent_proj", "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj",
    *(f"mixer.experts.{expert}.{part}_proj" for expert in range(8) for part in ("up", "down")),
}  # fmt: skip


@pytest.mark.parametrize(
    "keys", [{}, {"mtp_hybrid_override_pattern": "*E"}, {"mtp_layers_block_type": ["attention", "moe"]}], ids=str
)
def test_modules_of_multi_token_prediction_have_the_published_names(keys: dict[str, Any]) -> None:
    model = from_config(CONFIG | keys, name="x")
    assert model.mtp_depth == 2
    names = {part.name.removesuffix(".weight") for part in list_tensors(model, family="nemotron_h")}
    layers = ((0, ATTENTION), (1, EXPERTS), (2, ATTENTION), (3, EXPERTS))
    published = {f"mtp.layers.{layer}.{name}" for layer, layer_names in layers for name in layer_names}
    assert {name for name in names if name.startswith("mtp.")} == published


@pytest.mark.parametrize(
    "keys",
    [
        {"mtp_hybrid_override_pattern": "ME"},
        {"mtp_layers_block_type": ["mlp"]},
        {"layers_block_type": ["linear_attention", "mlp"]},
    ],
    ids=str,
)
def test_modules_of_other_layers_are_an_error_that_names_them(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"num_nextn_predict_layers=2 with layers .*have full_attention and moe"):
        from_config(CONFIG | keys, name="x")
