"""Vision towers and projectors: as many parameters as transformers builds, by default and on random configs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.initialization import no_init_weights

from fivefold.errors import UserError
from fivefold.model.huggingface.read import describe_remark, from_config
from fivefold.model.huggingface.vision import PROJECTORS, TOWERS, read_tower
from fivefold.model.vision import VisionTower
from fivefold.model.vision_weights import count_vision
from tests.model.judged import silence_transformers
from tests.model.mutations import PLAIN
from tests.selection import mark_share

Config = dict[str, Any]
TEXT_WIDTH = 48
# The text model of each wrapper, as small as it gets: only the tower is compared here.
TEXT: dict[str, Config] = {
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8},
    "shieldgemma2": {"model_type": "gemma3_text", "head_dim": 8},
    "kimi_k25": {"model_type": "llama"},
    "llama4": {"model_type": "llama4_text", "head_dim": 8, "intermediate_size_mlp": 32, "num_local_experts": 2},
}
SMALL_TEXT = {key: value for key, value in PLAIN.items() if key != "tie_word_embeddings"} | {
    "hidden_size": TEXT_WIDTH,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
}
# Defaults that transformers builds and cannot run, as widths or sizes of their parts differ, and why they are refused.
REFUSED = {
    "gemma3": "mm_tokens_per_image=256 of its vision tower is not at most 196",
    "shieldgemma2": "mm_tokens_per_image=256 of its vision tower is not at most 196",
    "llama4": "intermediate_size=5632 of its vision tower is not 3072",
}


def count_theirs(config: Config) -> int:
    """Count the parameters outside of the text model that transformers builds."""
    keys = {key: value for key, value in config.items() if key != "model_type"}
    with silence_transformers(), torch.device("meta"), no_init_weights():  # type: ignore[no-untyped-call]
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(config["model_type"], **keys))  # type: ignore[no-untyped-call]
    return sum(
        weight.numel()
        for name, weight in theirs.named_parameters()
        if "language_model" not in name and not name.startswith("lm_head")
    )


def small_text(kind: str) -> Config:
    """Return the small text model of a wrapper."""
    return SMALL_TEXT | TEXT.get(kind, {})


def read(config: Config) -> VisionTower:
    return read_tower(config, kind=config["model_type"], text_width=TEXT_WIDTH, name="x")


@pytest.mark.parametrize("kind", mark_share(6, list(PROJECTORS)))
def test_the_default_tower_has_as_many_parameters_as_in_transformers(kind: str) -> None:
    config = {"model_type": kind, "text_config": small_text(kind)}
    if kind in REFUSED:
        with pytest.raises(UserError, match=REFUSED[kind]):
            read(config)
        return
    assert count_vision(read(config)) == count_theirs(config)


def draw(kind: str, seed: int) -> Config:
    """Draw a small config of a wrapper: every key of its tower and projector that changes a shape."""
    rng = random.Random(f"{kind} {seed}")
    heads, patch, merge = rng.choice([1, 2, 4]), rng.choice([4, 8]), rng.choice([1, 2])
    width, layers = heads * 8 * rng.randint(1, 3), rng.randint(1, 4)
    side = 4 * rng.randint(1, 3)  # patches of a side of the image
    tower_type = PROJECTORS[kind][0]
    keys = TOWERS[tower_type][1]
    drawn: Config = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "depth": layers,
        "intermediate_size": 8 * rng.randint(1, 9),
        "hidden_act": rng.choice(["gelu", "silu", "gelu_pytorch_tanh", "quick_gelu"]),
        "num_channels": rng.randint(1, 4),
        "in_channels": rng.randint(1, 4),
        "patch_size": patch,
        "image_size": patch * side,
        "temporal_patch_size": rng.choice([1, 2]),
        "spatial_merge_size": merge,
        "out_hidden_size": TEXT_WIDTH,
        "num_position_embeddings": rng.choice([16, 25]),
        "deepstack_visual_indexes": sorted(rng.sample(range(layers), rng.randint(0, layers))),
        "fullatt_block_indexes": sorted(rng.sample(range(layers), rng.randint(0, layers))),
        "window_size": patch * merge * rng.choice([1, 2, 4]),
        "vision_use_head": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "norm_type": rng.choice(["layer_norm", "rms_norm"]),
        "use_absolute_position_embeddings": rng.random() < 0.5,
        "use_mean_pooling": rng.random() < 0.5,
        "pos_emb_height": rng.randint(2, 5),
        "pos_emb_width": rng.randint(2, 5),
        "merge_kernel_size": [merge, merge],
        "embed_dim": width,
        "mlp_ratio": rng.randint(1, 4),
    }
    vision = {key: drawn[key] for key in drawn if key in keys}
    if "use_qk_norm" in keys:
        vision["use_qk_norm"] = vision["norm_type"] == "rms_norm" and rng.random() < 0.5
    outer: Config = {}
    if kind in ("gemma3", "shieldgemma2"):
        outer["mm_tokens_per_image"] = rng.choice([4, 16])
    if kind.startswith("llava"):
        outer["vision_feature_layer"] = rng.choice([-1, -2, [-2, -1], layers])
        outer["multimodal_projector_bias"] = rng.random() < 0.5
        outer["vision_feature_select_strategy"] = "full" if tower_type.startswith("siglip") else "default"
    if kind == "mistral3":
        outer |= {"spatial_merge_size": merge, "multimodal_projector_bias": rng.random() < 0.5}
    if kind == "internvl":
        outer["downsample_ratio"] = rng.choice([0.5, 0.25, 1.0])
    if kind == "kimi_k25":
        outer["projection_hidden_size"] = width
    if kind == "llama4":
        vision["pixel_shuffle_ratio"] = 0.5
        vision["intermediate_size"] = 4 * width
        size = 8 * rng.randint(1, 5)
        vision |= {"projector_input_dim": size, "projector_output_dim": size, "vision_output_dim": size}
    if tower_type == "qwen2_vl_vision":
        vision["hidden_size"] = TEXT_WIDTH
    vision["model_type"] = tower_type
    return {"model_type": kind, "text_config": small_text(kind), "vision_config": vision, **outer}


@pytest.mark.parametrize(("kind", "seed"), mark_share(40, [(kind, seed) for kind in PROJECTORS for seed in range(20)]))
def test_random_towers_have_as_many_parameters_as_in_transformers(kind: str, seed: int) -> None:
    config = draw(kind, seed)
    assert count_vision(read(config)) == count_theirs(config)


def test_the_tower_is_a_field_of_the_model_and_not_of_its_parameters() -> None:
    config = draw("llava", 1)
    model = from_config(config, name="x")
    assert model.vision == read(config)
    assert model.parameters == from_config(small_text("llava") | {"model_type": "llama"}, name="x").parameters
    assert describe_remark(config, name="x") is None


def test_an_unsupported_vision_tower_is_reported() -> None:
    """The text model is read all the same."""
    config = draw("llava", 1)
    config["vision_config"]["hidden_act"] = "tanhshrink"
    assert from_config(config, name="x").vision is None
    assert "hidden_act='tanhshrink' of its vision tower is not one of" in str(describe_remark(config, name="x"))
    wrapped = {"model_type": "idefics3", "text_config": {"model_type": "llama", **SMALL_TEXT}}
    assert from_config(wrapped, name="x").vision is None
    assert "the vision tower of idefics3 is not read" in str(describe_remark(wrapped, name="x"))
    config["vision_config"] = {"model_type": "dinov3_vit"}
    assert "a vision tower of type 'dinov3_vit' is not read" in str(describe_remark(config, name="x"))
    del config["vision_config"]  # its family's defaults, which may not fit the other keys
    assert from_config(config | {"image_seq_length": 5}, name="x").parameters


def test_a_broken_tower_is_an_error_and_no_warning() -> None:
    config = draw("llava", 1)
    with pytest.raises(UserError, match=r"^x: vision_config=\[1\] is not a table of keys$"):
        from_config(config | {"vision_config": [1]}, name="x")


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "wide"), ("num_attention_heads", 5), ("patch_size", [7, 14]), ("num_hidden_layers", 0)],
)
def test_values_that_no_vision_tower_has_are_reported(key: str, value: object) -> None:
    config = draw("llava", 1)
    config["vision_config"] |= {"hidden_size": 16, key: value}
    with pytest.raises(UserError, match=rf"^x: .*{'heads=5' if key == 'num_attention_heads' else key}"):
        from_config(config, name="x")
