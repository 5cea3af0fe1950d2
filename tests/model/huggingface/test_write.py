"""Models written as configs, which read back as the model."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from fivefold.errors import UserError
from fivefold.model.catalog import build_model, list_names
from fivefold.model.experts import MoE
from fivefold.model.huggingface.families import FAMILIES
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.write import find_difference, to_config
from fivefold.model.rope import RopeScaling
from tests.model.mutations import FAMILIES as SMALL
from tests.selection import mark_share

DROPOUT = ("dropout", "attention_dropout", "embedding_dropout")


@pytest.mark.parametrize("name", mark_share(4, list_names()))
def test_a_config_reads_back_as_the_model(name: str) -> None:
    model = build_model(name)
    config = to_config(model)
    assert config["model_type"] in FAMILIES
    there = from_config(config, name=name)
    if name == "seed-oss-36b":  # written as Qwen2, which most software reads and which has no dropout of branches
        there = there.replace(**{field: getattr(model, field) for field in DROPOUT})
    assert there.replace(source="") == model.replace(source="", vision=None)  # a config of the text model


def test_scaled_rope_reads_back() -> None:
    plain = build_model("qwen3-0.6b")
    for scaling in (
        RopeScaling(kind="linear", factor=3.0),
        RopeScaling(kind="llama3", factor=8.0, original_positions=64, high_frequency_factor=3.0),
        RopeScaling(kind="yarn", factor=4.0, original_positions=64, attention_factor=1.25, truncate=False),
    ):
        model = plain.replace(rope_scaling=scaling)
        assert from_config(to_config(model), name=model.name).replace(source="") == model.replace(source="")


def test_training_only_fields_are_not_a_difference() -> None:
    model = build_model("qwen3-30b-a3b")
    assert model.moe is not None
    moe = model.moe.replace(aux_coefficient=0.5, capacity=1.5, balance="none")
    assert find_difference(model, model.replace(name="mine", positions=64, dropout=0.1, moe=moe)) is None
    free = model.replace(moe=model.moe.replace(balance="free"))  # its file would have no place for the biases
    assert find_difference(model, free) == "moe.balance='aux' instead of 'free'"
    assert find_difference(model, model.replace(layers=47)) == "layers=48 instead of 47"
    with pytest.raises(UserError, match=r"the nearest, qwen3_moe, has moe.balance='aux' instead of 'free'"):
        to_config(free)


def test_shared_experts_are_written_as_a_family_that_has_them() -> None:
    moe = MoE(experts=4, topk=2, ffn=8192, shared_experts=1)
    assert to_config(build_model("llama3.2-1b").replace(moe=moe))["model_type"] == "aria_text"
    with pytest.raises(UserError, match=r"the nearest, aria_text, has moe.normalized=True instead of False"):
        to_config(build_model("llama3.2-1b").replace(moe=moe.replace(normalized=False)))


@pytest.mark.parametrize("kind", mark_share(2, SMALL))
def test_written_config_of_every_family_is_the_same_model_in_transformers(kind: str) -> None:
    model = from_config({"model_type": kind, **SMALL[kind]}, name="x")
    config = to_config(model)
    keys = {key: value for key, value in config.items() if key != "model_type"}
    theirs = AutoConfig.for_model(config["model_type"], **keys).to_dict()
    for read in (config, theirs):
        assert find_difference(from_config(read, name="x").replace(mtp=model.mtp), model) is None


def test_the_width_of_an_unused_mlp_is_no_difference_between_models() -> None:
    config = {"model_type": "qwen3_next", **SMALL["qwen3_next"]}
    for dense, difference in (([], None), ([0], "ffn=56 instead of 40")):
        narrow, wide = (
            from_config(config | {"intermediate_size": ffn, "mlp_only_layers": dense}, name="x") for ffn in (40, 56)
        )
        assert find_difference(wide, narrow) == difference


def test_other_expert_activations_and_uncompressed_queries_are_written() -> None:
    for kind, changed in (("mixtral", {"hidden_act": "gelu"}), ("deepseek_v2", {"q_lora_rank": None})):
        model = from_config({"model_type": kind, **SMALL[kind], **changed}, name="x")
        config = to_config(model)
        assert config["model_type"] == kind
        assert find_difference(from_config(config, name="x"), model) is None


def test_the_nearest_family_is_the_one_with_the_fewest_differences() -> None:
    model = from_config({"model_type": "cohere", **SMALL["cohere"]}, name="x").replace(embedding_scale=2.0)
    with pytest.raises(UserError, match=r"the nearest, cohere, has embedding_scale=1.0 instead of 2.0"):
        to_config(model)
