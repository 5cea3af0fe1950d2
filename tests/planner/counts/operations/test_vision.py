"""The operations of vision towers: FLOPs by hand, what autograd saves in transformers' towers, sharding, freezing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

import fivefold as ff
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.sharding import is_trained
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons
from fivefold.machine.catalog import resolve
from fivefold.model.huggingface.read import from_config
from fivefold.model.spec import Model
from fivefold.model.vision_weights import is_vision, list_vision_weights
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.flops import work
from fivefold.planner.counts.operations.local_shapes import LocalDegrees
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.predict import predict
from tests.model.huggingface.test_vision import TEXT_WIDTH, draw, small_text
from tests.model.judged import silence_transformers
from tests.selection import mark_share

Config = dict[str, Any]
TOWERS: dict[str, Config] = {
    "gemma3": {
        "mm_tokens_per_image": 4,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 4, "vision_use_head": False,
        },
    },
    "llava": {
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3,
            "num_attention_heads": 2, "image_size": 32, "patch_size": 8, "hidden_act": "quick_gelu",
        },
        "vision_feature_layer": -1,
    },
    "internvl": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 2,
            "image_size": [32, 32], "patch_size": [4, 4], "attention_bias": True,
        },
    },
    "qwen2_5_vl": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 72, "depth": 3, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": TEXT_WIDTH, "window_size": 16, "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 72, "depth": 3, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": TEXT_WIDTH, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
        },
    },
}  # fmt: skip

H100 = resolve("h100:8", local=Path("/nowhere"))


def config_of(kind: str) -> Config:
    return {"model_type": kind, "text_config": small_text(kind), **TOWERS[kind]}


def model_of(kind: str) -> Model:
    return from_config(config_of(kind), name="x")


def job_of(kind: str, **fields: Any) -> Job:
    tokens = {} if model_of(kind).vision.patches else {"image_tokens": 16}  # type: ignore[union-attr]
    return Job(**{"sequence": 128, "global_batch": 4, "images": 2, "precision": "fp32", **tokens, **fields})


def tower_ops(kind: str, *, tp: int = 1, **fields: Any) -> list[Op]:
    ops = Counts(model_of(kind), job_of(kind, **fields)).unit(LocalDegrees(1, tp=tp, sp=tp > 1), "embed").ops
    return [op for op in ops if op.name.startswith("vision.")]


def test_flops_of_qwen3_vl_by_hand() -> None:
    """Two images of 16 tokens, so 64 patches of 2 · 3 · 4² numbers; width 32 in 2 heads, MLPs of 72, 3 layers."""
    patches, width, ffn = 64, 32, 72
    layer = 2 * patches * (4 * width * width + 2 * width * ffn) + 4 * patches * patches * width
    projector = 2 * 16 * ((4 * width) ** 2 + 4 * width * TEXT_WIDTH)
    image = 2 * patches * width * (2 * 3 * 4**2) + 3 * layer + 3 * projector
    assert sum(op.flops for op in tower_ops("qwen3_vl")) == 2 * image
    patch_gradient = 2 * patches * width * (2 * 3 * 4**2)  # pixels need no gradient
    counted = work(model_of("qwen3_vl"), layout=Layout(), job=job_of("qwen3_vl"))
    assert counted.vision_flops == 4 * 2 * (3 * image - patch_gradient)
    text = work(model_of("qwen3_vl"), layout=Layout(), job=job_of("qwen3_vl", images=0, image_tokens=None))
    assert counted.model_flops_causal - counted.vision_flops == text.model_flops_causal
    assert counted.parameters - text.parameters == counted.vision_parameters


def test_flops_of_windows_by_hand() -> None:
    """Qwen2.5-VL: in 2 of 3 layers 64 patches attend within windows of 16 (16 pixels: 4 patches a side)."""
    cores = [op.flops for op in tower_ops("qwen2_5_vl") if op.kind == "attention"]
    full, windowed = 2 * 4 * 64 * 64 * 32, 2 * 4 * 4 * 16 * 16 * 32
    assert cores == [windowed, full, windowed]


@pytest.mark.parametrize("kind", TOWERS)
def test_every_weight_of_a_tower_is_used_once(kind: str) -> None:
    tower = model_of(kind).vision
    assert tower is not None
    unused = sum(w.numel for w in list_vision_weights(tower) if "final_norm" in w.name and tower.final_norm == "unused")
    unused += TEXT_WIDTH * tower.newline
    assert sum(op.parameters for op in tower_ops(kind)) == sum(w.numel for w in list_vision_weights(tower)) - unused


def saved_storages(theirs: nn.Module, run: Any) -> int:
    """Count the bytes of the storages that autograd saves in ``run``, but parameters."""
    mine = {weight.untyped_storage().data_ptr() for weight in theirs.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(item.untyped_storage().nbytes() for key, item in saved.items() if key not in mine)


@pytest.mark.parametrize("kind", ["gemma3", "llava", "internvl"])
def test_blocks_keep_what_autograd_saves_in_transformers(kind: str) -> None:
    """All blocks of a tower in fp32, from their input to their output."""
    config = config_of(kind)
    with silence_transformers():
        keys = {key: value for key, value in config.items() if key != "model_type"}
        full = AutoModelForImageTextToText.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(kind, **keys), attn_implementation="sdpa"
        )
    tower = model_of(kind).vision
    assert tower is not None
    assert tower.patches is not None
    rows = tower.patches + tower.class_token
    x = torch.randn(2, rows, tower.width, requires_grad=True)
    encoder = full.model.vision_tower.encoder
    theirs = saved_storages(full, lambda: encoder(x))
    ops = tower_ops(kind, stack="ddp")
    blocks = [op for op in ops if op.name.startswith(("vision.norm", "vision.attention", "vision.mlp"))]
    sizes = {name: size for op in ops for name, size in op.writes.items()}
    kept = {name for op in blocks for name in op.keeps}
    assert sum(sizes[name] for name in kept) == theirs


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_rotary_blocks_keep_what_autograd_saves_in_transformers(kind: str) -> None:
    """All blocks in fp32, but for one fused projection, which is kept for its values, and the way through SDPA.

    That computes each image by itself and copies the outputs into one tensor.
    """
    config = config_of(kind)
    with silence_transformers():
        keys = {key: value for key, value in config.items() if key != "model_type"}
        full = AutoModelForImageTextToText.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(kind, **keys), attn_implementation="sdpa"
        )
    tower = model_of(kind).vision
    assert tower is not None
    images, patches = 2, 64
    x = torch.randn(images * patches, tower.width, requires_grad=True)
    angles = torch.randn(images * patches, tower.head_dim)
    tables = angles.cos(), angles.sin()

    def run() -> None:
        stream, ends = x, torch.arange(images + 1, dtype=torch.int32) * patches
        for layer in full.model.visual.blocks:
            stream = layer(stream, cu_seqlens=ends, position_embeddings=tables)

    theirs = saved_storages(full, run)
    ops = tower_ops(kind, stack="ddp")
    blocks = [op for op in ops if op.name.startswith(("vision.norm", "vision.attention", "vision.mlp"))]
    sizes = {name: size for op in ops for name, size in op.writes.items()}
    kept = sum(sizes[name] for name in {name for op in blocks for name in op.keeps})
    queries_and_keys, outputs = 2 * x.nbytes, x.nbytes
    assert theirs == kept + tower.layers * (queries_and_keys + outputs) + sum(table.nbytes for table in tables)


@pytest.mark.parametrize("kind", TOWERS)
def test_tensor_parallelism_divides_flops_and_weights_of_heads_and_mlps(kind: str) -> None:
    alone, halves = ([op for op in tower_ops(kind, tp=tp) if op.flops] for tp in (1, 2))
    for op, half in zip(alone, halves, strict=True):
        is_split = any(part in op.name for part in (".attention.", ".mlp.", ".up", ".down"))
        assert (half.name, half.flops) == (op.name, op.flops // (2 if is_split else 1))
    counts, layout = Counts(model_of(kind), job_of(kind)), Layout.parse("tp2")
    local = {
        weight.name: weight.numel for unit, *_ in counts.list_local_parts(layout, "embed") for weight in unit.weights
    }
    tower = model_of(kind).vision
    assert tower is not None
    for weight in list_vision_weights(tower):
        is_split = weight.kind in ("column", "row") or (
            weight.kind == "bias" and not weight.name.endswith(WHOLE_BIASES)
        )
        assert local[weight.name] == weight.numel // (2 if is_split else 1), weight.name


WHOLE_BIASES = ("out.bias", "down.bias")


@pytest.mark.parametrize("kind", TOWERS)
def test_a_frozen_tower_has_no_backward_and_keeps_nothing(kind: str) -> None:
    trained = tower_ops(kind)
    frozen = tower_ops(kind, freeze_vision_tower=True)
    assert [op.flops for op in frozen] == [op.flops for op in trained]
    for op in frozen:
        if not op.name.startswith("vision.connector"):
            assert (op.keeps, op.backward_products, op.wgrad_numels) == ((), 0, ()), op.name
    connector = [op for op in frozen if op.name.startswith("vision.connector") and op.kind == "matmul"]
    assert {op.backward_products for op in connector} <= {1, 2}
    both = tower_ops(kind, freeze_vision_tower=True, freeze_projector=True)
    assert {op.backward_products for op in both} == {0}
    assert not any(op.keeps for op in both)


def step_of(kind: str, layout: str = "dp2", **fields: Any) -> ff.Step:
    return predict(model=model_of(kind), machine=H100, layout=Layout.parse(layout), job=job_of(kind, **fields))


@pytest.mark.parametrize("kind", TOWERS)
def test_states_are_those_of_the_weights_and_of_the_trained_ones(kind: str) -> None:
    """fp32 with AdamW: 4 bytes of each weight, and of each trained one 4 of its gradient and 8 of its moments."""
    tower = model_of(kind).vision
    assert tower is not None
    images = {"images": 0, "image_tokens": None}
    text = step_of(kind, "dp1", **images).memory.stages[0]
    for fields in (
        {},
        {"freeze_vision_tower": True},
        {"freeze_vision_tower": True, "freeze_projector": True},
    ):
        job, stage = job_of(kind, **fields), step_of(kind, "dp1", **fields).memory.stages[0]
        weights = list(list_vision_weights(tower))
        trained = sum(weight.numel for weight in weights if is_trained(weight, job))
        steps = 4 * sum(is_trained(weight, job) for weight in weights)  # AdamW's step counts
        assert stage.parameters_bytes - text.parameters_bytes == 4 * sum(weight.numel for weight in weights)
        assert stage.optimizer_bytes - text.optimizer_bytes == 8 * trained + steps
        assert stage.gradients_bytes - text.gradients_bytes == 4 * trained


@pytest.mark.parametrize("kind", TOWERS)
@pytest.mark.parametrize(
    "layout", mark_share(3, ["dp2", "dp2 zero3", "tp2", "cp2", "dp2 zero1 tp2", "dp2 zero2", "dp4 zero3 tp2"])
)
def test_a_frozen_tower_takes_less_memory_time_and_messages(kind: str, layout: str) -> None:
    images = {"images": 0, "image_tokens": None}
    text, trained = step_of(kind, layout, **images), step_of(kind, layout)
    frozen = step_of(kind, layout, freeze_vision_tower=True)
    for of in (
        lambda step: step.memory.peak_bytes,
        lambda step: step.time.step_seconds,
        lambda step: sum(traffic.bytes for traffic in step.traffic),
        lambda step: step.work.hardware_flops,
    ):
        assert of(text) <= of(frozen) <= of(trained)


def test_the_tower_is_on_the_first_stage() -> None:
    config = config_of("qwen3_vl") | {"text_config": small_text("qwen3_vl") | {"num_hidden_layers": 4}}
    model = from_config(config, name="x")
    layout = Layout.parse("pp2 mbs1")
    with_images, text = (
        predict(model=model, machine=H100, layout=layout, job=job).memory.stages
        for job in (job_of("qwen3_vl"), job_of("qwen3_vl", images=0, image_tokens=None))
    )
    assert with_images[0].parameters_bytes > text[0].parameters_bytes
    assert with_images[1].parameters_bytes == text[1].parameters_bytes


@pytest.mark.parametrize(
    ("fields", "layout", "reason"),
    [
        ({"image_tokens": None}, "dp1", r"images of x may have any size; give image_tokens, one for 8 x 8 pixels"),
        ({"images": 9}, "dp1", r"images=9 have 144 tokens, more than the sequence of 128; try seq 144"),
        ({"objective": "dpo"}, "dp1", r"images=2 are not counted with objective=dpo; use sft"),
        ({"adapter": "lora:4"}, "dp1", r"an adapter next to a trained projector; use freeze_vision_tower"),
        ({"precision": "fp8-wire"}, "dp1", r"precision fp8-wire, which gathers weights in fp8; use bf16"),
        ({}, "tp4", r"tp=4 does not divide heads=2 and MLPs of the vision tower; try tp2"),
    ],
)
def test_uncounted_combinations_with_images_are_rejected_by_name(fields: Config, layout: str, reason: str) -> None:
    job = job_of("qwen3_vl", **fields)
    found = list(list_reasons(Layout.parse(layout), model=model_of("qwen3_vl"), job=job, machine=None))
    assert any(re.search(reason, line) for line in found), found


def test_fixed_images_and_models_without_a_tower_are_rejected_by_name() -> None:
    wrong = list(list_reasons(Layout(), model=model_of("gemma3"), job=job_of("gemma3", image_tokens=5), machine=None))
    assert any("makes 4 tokens of every image" in line for line in wrong)
    text = from_config({"model_type": "llama", **small_text("llava")}, name="x")
    lines = list(list_reasons(Layout(), model=text, job=Job(images=1, image_tokens=4), machine=None))
    assert any("images=1: x has no vision tower that is read; leave images out" in line for line in lines)
    for fields in ({"image_tokens": 4}, {"freeze_vision_tower": True}):
        with pytest.raises(UserError, match=r"is given without images"):
            Job.read(fields, origin="job")
    with pytest.raises(UserError, match=r"freeze_projector without freeze_vision_tower"):
        Job.read({"images": 1, "freeze_projector": True}, origin="job")


def test_an_answer_without_images_says_that_the_tower_is_not_counted() -> None:
    said = "model 'x': its vision tower (0.00 B parameters) is not counted, as the job has no images"
    assert any(remark.startswith(said) for remark in step_of("qwen3_vl", images=0, image_tokens=None).remarks)
    assert not any("vision" in remark for remark in step_of("qwen3_vl").remarks)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["llava", "llama4", "glm4v", "kimi_k25", "mistral3", "qwen3_5"])
def test_operations_of_random_vision_towers_are_counted(kind: str, seed: int) -> None:
    """Every weight but that of unused norms, heads and layers is used by one operation."""
    model = from_config(draw(kind, seed), name="x")
    tower = model.vision
    assert tower is not None
    tokens = {} if tower.patches else {"image_tokens": 9}
    job = Job(sequence=4096, images=2, precision=get_recipe("bf16"), **tokens)
    ops = Counts(model, job).unit(LocalDegrees(2), "embed").ops
    used = sum(op.parameters for op in ops if op.name.startswith("vision."))
    numels = {weight.name: weight.numel for weight in list_vision_weights(tower)}
    unused = [name for name in numels if is_unused(name, tower)]
    assert used == sum(numels.values()) - sum(numels[name] for name in unused)
    assert all(is_vision(weight) for weight in list_vision_weights(tower))


def is_unused(name: str, tower: Any) -> bool:
    if name.startswith("vision.blocks."):
        return int(name.split(".")[2]) >= tower.computed_layers
    if name == "vision.connector.newline" or name.startswith("vision.pool."):
        return True
    return name.startswith("vision.final_norm") and tower.final_norm == "unused"
