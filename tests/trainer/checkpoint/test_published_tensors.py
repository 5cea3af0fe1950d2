"""Folders in few bits, as DeepSeek and gpt-oss are published, against what transformers reads of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    Mxfp4Config,
    Qwen3MoeConfig,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from typer.testing import CliRunner

import fivefold as ff
from fivefold.adapter import Adapter
from fivefold.base_format import BASE_FORMATS, BaseFormat
from fivefold.cli import app
from fivefold.errors import UsageWarning, UserError
from fivefold.layout.spec import Layout
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint import huggingface_import
from fivefold.trainer.checkpoint.full_weights import gather_full_weights
from fivefold.trainer.checkpoint.huggingface_export import export, find
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from fivefold.trainer.generate.source import WeightSource
from fivefold.trainer.model.quantized.four_bit import list_scale_values, list_values, quantize_four_bit, quantize_scales
from tests.selection import mark_share
from tests.trainer.checkpoint.test_peft_adapter import (
    BLOCKS,
    SIZES,
    Fork,
    ignore_progress,
    job_of,
    text_tokens,
    train_and_save,
)

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
ON_EXPERTS = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
OF_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 128}


def publish(path: Path, config: object, table: dict[str, Any], quantize: Callable[..., dict[str, Tensor]]) -> Path:
    """A small model whose tensors ``quantize`` changes, in bf16 otherwise."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tensors = {
        new: value.contiguous()
        for name, tensor in load_file(path / "model.safetensors").items()
        for new, value in quantize(name, tensor).items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stored | {"quantization_config": table}))
    return path


def publish_fp8(path: Path, config: object = None) -> Path:
    quantizer = type("Quantizer", (), {"quantization_config": FineGrainedFP8Config()})()

    def quantize(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "_proj" not in name:
            return {name: tensor if name.endswith("bias") else tensor.bfloat16()}
        stored: dict[str, Tensor] = Fp8Quantize(quantizer).convert({name: tensor})
        scales = f"{name}_scale_inv"
        return {name: stored[name], scales: stored[scales] * 1.37}  # which quantizing the values would not give again

    return publish(path, config or LlamaConfig(**SIZES | BLOCKS), FP8, quantize)


EXPERTS_IN_BLOCKS = {"moe_intermediate_size": 128, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}


def publish_experts_in_fp8(path: Path, **changed: object) -> Path:
    """As Qwen3-30B-A3B-FP8: each matrix of an expert has codes and scales."""
    return publish_fp8(path, Qwen3MoeConfig(**SIZES | BLOCKS | EXPERTS_IN_BLOCKS | {"num_experts": 4} | changed))


def publish_latents_in_fp8(path: Path, **changed: object) -> Path:
    """As DeepSeek-V3: the rotary rows of a head, which lie within a block, are interleaved."""
    latent = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 128}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = SIZES | BLOCKS | EXPERTS_IN_BLOCKS | latent | experts | {"num_key_value_heads": 2, "v_head_dim": 128}
    sizes.pop("head_dim")
    return publish_fp8(path, DeepseekV3Config(**sizes | {"num_nextn_predict_layers": 0} | changed))


def publish_fp8_by_tensor(path: Path, **changed: object) -> Path:
    """As Ministral 3: one scale of a matrix, and one of its input."""

    def quantize(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "_proj" not in name:
            return {name: tensor.bfloat16()}
        scale = tensor.abs().max() / 300
        stem = name.removesuffix("weight")
        codes = (tensor / scale).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scale, f"{stem}activation_scale": torch.tensor(0.3)}

    table = FP8 | {"activation_scheme": "static", "weight_block_size": None}
    return publish(path, LlamaConfig(**SIZES | BLOCKS | changed), table, quantize)


def publish_mxfp4(path: Path, **changed: object) -> Path:
    def quantize(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor.bfloat16()}
        experts, rows, columns = tensor.shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(116, 122, (experts, columns, rows // 32), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    sizes = SIZES | OF_EXPERTS | {"head_dim": 16, "sliding_window": 8} | changed
    return publish(path, GptOssConfig(**sizes), MXFP4, quantize)


def publish_four_bit(path: Path, base: BaseFormat, *, skipped: tuple[str, ...] = ()) -> Path:
    """As unsloth/Llama-3.2-3B-bnb-4bit, by bitsandbytes' algorithm; scales that quantizing values would not give.

    ``skipped``: modules in bf16, as of unsloth/Llama-3.2-3B-unsloth-bnb-4bit.
    """
    is_double = base.double_quantization

    def quantize(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "_proj" not in name or name.startswith(skipped):
            return {name: tensor.bfloat16()}
        packed, absmax = quantize_four_bit(tensor, base.name)
        scales, largest, mean = quantize_scales(absmax)
        state = {"quant_type": base.name, "blocksize": 64, "dtype": "bfloat16", "shape": list(tensor.shape)}
        tensors = {
            name: packed[:, None],
            f"{name}.absmax": scales if is_double else absmax * 1.1,
            f"{name}.quant_map": list_values(base.name, tensor.device).clone(),
        }
        if is_double:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean.item() * 1.1}
            tensors[f"{name}.nested_absmax"] = largest * 1.3
            tensors[f"{name}.nested_quant_map"] = list_scale_values(tensor.device).clone()
        packed_state = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return tensors | {f"{name}.quant_state.bitsandbytes__{base.name}": packed_state}

    table = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": base.name}
    table |= {"bnb_4bit_use_double_quant": True} if is_double else {}
    table |= {"llm_int8_skip_modules": ["lm_head", *skipped]} if skipped else {}
    return publish(path, LlamaConfig(**SIZES | BLOCKS), table, quantize)


publish_nf4 = partial(publish_four_bit, base=BASE_FORMATS["nf4"])


@pytest.mark.long  # a folder in nf4 is trained in test_layers_that_a_folder_keeps_in_16_bits_are_computed_in_16_bits
@pytest.mark.parametrize(
    ("text", "kind", "base"),
    [
        ("tp2", "lora", {"base": "nf4"}),
        ("dp2 zero3", "dora", {"base": "nf4"}),
        ("dp1", "lora", {"base": "fp4"}),
        ("dp2 zero3", "lora", {"base": "fp4", "double_quantization": False}),
        ("tp2", "lora", {"base": "nf4", "double_quantization": False}),
    ],
)
def test_adapters_are_trained_over_a_folder_of_bitsandbytes(
    forked: Fork, tmp_path: Path, text: str, kind: Literal["lora", "dora"], base: dict[str, Any]
) -> None:
    """Its codes and scales are kept, also in merged weights; bitsandbytes itself is in ``tests/third_party``."""
    adapter, layout = Adapter(kind=kind, rank=3, **base), Layout.parse(text)
    assert adapter.base_format is not None
    folder = publish_four_bit(tmp_path / "base", adapter.base_format)
    opened = HuggingFaceFolder.open(folder)
    assert (opened.model.quantization, opened.model.double_quantization) == (adapter.base, adapter.double_quantization)
    weights = forked(layout.world, start, folder, layout, adapter)[0]
    for ours, weight in weights.items():
        stored = opened.read(ours, offsets=(0,) * weight.dim(), sizes=tuple(weight.shape)).float()
        torch.testing.assert_close(weight, stored, rtol=1e-6 * (kind == "dora"), atol=1e-8 * (kind == "dora"))
    logits, _ = forked(layout.world, train_and_save, tmp_path / "run", folder, layout, adapter)[0]
    export(find(tmp_path / "run"), tmp_path / "out", dtype="fp32", file_bytes=10**9, report=ignore_progress, merge=True)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")(text_tokens()).logits
        torch.testing.assert_close(merged, logits, rtol=1e-5, atol=1e-5)


SKIPPED = ("model.layers.0.mlp", "model.layers.2.self_attn.o_proj")


@pytest.mark.parametrize("text", mark_share(4, ["dp1", "tp2", "dp2 zero3", "pp2"]))
def test_layers_that_a_folder_keeps_in_16_bits_are_computed_in_16_bits(forked: Fork, tmp_path: Path, text: str) -> None:
    """They are no base in 4 bits: the weights of a run are those of the folder, and merged ones have no rounding."""
    folder, layout = publish_nf4(tmp_path / "base", skipped=SKIPPED), Layout.parse(text)
    opened, adapter = HuggingFaceFolder.open(folder), Adapter(rank=3, base="nf4")
    kept = ["blocks.0.mlp.gate", "blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.2.attention.out"]
    assert sorted(opened.model.unquantized) == sorted(kept)
    weights = forked(layout.world, start, folder, layout, adapter)[0]
    for ours, weight in weights.items():
        stored = opened.read(ours, offsets=(0,) * weight.dim(), sizes=tuple(weight.shape))
        assert torch.equal(weight, stored.float())
        assert (stored.dtype == torch.bfloat16) == (ours.removesuffix(".weight") in kept or "blocks" not in ours or
                                                   "norm" in ours)  # fmt: skip
    logits, _ = forked(layout.world, train_and_save, tmp_path / "run", folder, layout, adapter)[0]
    export(find(tmp_path / "run"), tmp_path / "out", dtype="fp32", file_bytes=10**9, report=ignore_progress, merge=True)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")(text_tokens()).logits
        torch.testing.assert_close(merged, logits, rtol=1e-5, atol=1e-5)


def test_a_run_holds_no_layer_in_4_bits_that_its_folder_keeps_in_16(forked: Fork, tmp_path: Path) -> None:
    (line,) = forked(1, start_all_quantized, publish_nf4(tmp_path / "base", skipped=SKIPPED))
    assert "keeps blocks.0.mlp.gate.weight in 16 bits, and the run's model has it in nf4; give the run model =" in line


def start_all_quantized(base: Path) -> str:
    """The error of a run over ``base`` whose model says that it keeps no layer in 16 bits."""
    model = HuggingFaceFolder.open(base).model.replace(unquantized=())
    job = job_of(Adapter(rank=3, base="nf4"))
    built = build(model=model, layout=Layout(), job=job, device=torch.device("cpu"))
    with pytest.raises(UserError) as raised:
        huggingface_import.start(base, built=built, model=model)
    return str(raised.value)


def test_commands_know_a_folder_of_bitsandbytes(tmp_path: Path) -> None:
    """``import`` writes a run of an adapter over it, as which ``predict`` counts it."""
    folder = publish_nf4(tmp_path / "base")
    (folder / "tokenizer.json").write_text("{}")
    imported = CliRunner().invoke(
        app, ["import", str(folder), "--to", str(tmp_path / "run.toml")], catch_exceptions=False
    )
    assert "of BF16, NF4" in imported.output
    written = tomllib.loads((tmp_path / "run.toml").read_text())
    assert written["job"]["adapter"] == {"rank": 16, "base": "nf4"}
    with pytest.warns(UsageWarning, match="adapter.base=nf4"):
        step = ff.predict(str(folder), "rtx4090:1", "mbs1", seq=32, gbs=8, adapter="lora:3")
    assert step.job["adapter"]["base"] == "nf4"  # type: ignore[index, call-overload]


PUBLISHED: dict[str, tuple[Callable[[Path], Path], object]] = {
    "fp8": (publish_fp8, FineGrainedFP8Config(dequantize=True)),
    "fp8 of experts": (publish_experts_in_fp8, FineGrainedFP8Config(dequantize=True)),
    "fp8 of latents": (publish_latents_in_fp8, FineGrainedFP8Config(dequantize=True)),
    "fp8 by tensor": (publish_fp8_by_tensor, FineGrainedFP8Config(dequantize=True, weight_block_size=None)),
    "mxfp4": (publish_mxfp4, Mxfp4Config(dequantize=True)),
}


def read_as_transformers(path: Path, name: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=PUBLISHED[name][1], dtype=torch.float32)
    return model.float()  # some tensors stay in bf16


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "of" not in name])
def test_a_published_folder_is_read_as_transformers_dequantizes_it(tmp_path: Path, name: str) -> None:
    folder = PUBLISHED[name][0](tmp_path / "base")
    theirs = read_as_transformers(folder, name)
    opened = HuggingFaceFolder.open(folder)
    assert (sorted(opened.dtypes()), opened.ignored) == (sorted(["BF16", name.split()[0].upper()]), ())
    for tensor_name, tensor in theirs.state_dict().items():
        assert torch.equal(opened.tensors[tensor_name][...].float(), tensor)
    with torch.no_grad():
        logits = WeightSource.find(folder).decoder()(text_tokens())
        torch.testing.assert_close(logits, theirs(text_tokens()).logits, rtol=1e-5, atol=1e-5)


def test_a_box_of_a_published_tensor_is_that_of_the_full_one(tmp_path: Path) -> None:
    for write, name in ((publish_fp8, "model.layers.0.mlp.up_proj.weight"),
                        (publish_mxfp4, "model.layers.0.mlp.experts.gate_up_proj")):  # fmt: skip
        tensor = HuggingFaceFolder.open(write(tmp_path / name)).tensors[name]
        *experts, rows, columns = tensor.get_shape()
        for row, column in ((slice(0, rows), slice(33, 50)), (slice(31, 64), slice(0, columns)), (slice(5, 5),) * 2):
            box = (*(slice(1, 3) for _ in experts), row, column)
            assert torch.equal(tensor[box], tensor[...][box])


def dequantize_as_transformers(path: Path, name: str, target: Path) -> HuggingFaceFolder:
    """Open a folder of the weights that transformers dequantizes, without a quantization in its config."""
    theirs = read_as_transformers(path, name)
    config = type(theirs.config)(**{**theirs.config.to_dict(), "quantization_config": None})
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(theirs.state_dict())
    plain.save_pretrained(target)
    stored = json.loads((target / "config.json").read_text())
    stored.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(stored))
    return HuggingFaceFolder.open(target)


def start(base: Path, layout: Layout, adapter: Adapter) -> dict[str, Tensor]:
    """The full weights of a run over ``base`` before its first step, on the first rank."""
    job, model = job_of(adapter), HuggingFaceFolder.open(base).model
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(base, built=built, model=model)
    return gather_full_weights(built, model=model)


@pytest.mark.parametrize(
    ("name", "text", "adapter"),
    [
        *mark_share(
            14,
            [
                ("fp8 of latents", "dp2 ep2 zero2", Adapter(rank=3, base="fp8", targets=("kv_b_proj", *ON_EXPERTS))),
                ("fp8 of experts", "dp2 ep2 zero3 ac=full", Adapter(rank=3, base="fp8", targets=ON_EXPERTS)),
                ("fp8 of experts", "tp2 ep2", Adapter(rank=3, base="fp8", targets=("v_proj",))),
                ("fp8 of experts", "dp1", Adapter(rank=3, base="mxfp4", targets=ON_EXPERTS)),
                ("fp8 by tensor", "dp2 zero3", Adapter(rank=3, base="fp8")),
                ("mxfp4", "tp2 etp2 ac=full", Adapter(rank=3, base="mxfp4", targets=("q_proj",))),
                ("mxfp4", "pp2 mbs2", Adapter(rank=3, base="mxfp4", targets=ON_EXPERTS)),
                ("mxfp4", "dp4 ep2 zero3/2", Adapter(rank=3, base="mxfp4", targets=ON_EXPERTS)),
                ("mxfp4", "dp2 ep2 zero3", Adapter(rank=3, base="bf16")),
                ("fp8", "dp2 zero3", Adapter(kind="dora", rank=3, base="fp8")),
                ("fp8", "dp2 zero3", Adapter(rank=3)),
                ("fp8", "tp2", Adapter(rank=3, base="fp8")),
                ("mxfp4", "dp2 ep2", Adapter(rank=3, base="mxfp4", targets=("q_proj", "v_proj"))),
                ("mxfp4", "tp2", Adapter(rank=3)),
            ],
        ),
    ],
)
def test_adapters_are_trained_over_a_published_base(
    forked: Fork, tmp_path: Path, name: str, text: str, adapter: Adapter
) -> None:
    """The base is the published one to the bit, also where its codes and scales are kept; merged, it computes so."""
    adapter = adapter.replace(base="fp32") if adapter.base == "bf16" else adapter
    folder, layout = PUBLISHED[name][0](tmp_path / "base"), Layout.parse(text)
    theirs = dequantize_as_transformers(folder, name, tmp_path / "dequantized")
    weights = forked(layout.world, start, folder, layout, adapter)[0]
    assert weights.keys() >= theirs.parts.keys()
    for ours, shape in theirs.shapes.items():
        weight, experts = weights[ours], range(shape[0] if len(shape) == 3 else 1)
        sizes = (1, *shape[1:]) if len(shape) == 3 else shape
        boxes = [(expert, *(0 for _ in shape[1:])) for expert in experts]
        published = torch.cat([theirs.read(ours, offsets=offsets, sizes=sizes) for offsets in boxes])
        if adapter.has_magnitudes or (adapter.base == "mxfp4") != (name == "mxfp4"):
            torch.testing.assert_close(weight, published, rtol=1e-6, atol=1e-8 if adapter.has_magnitudes else 0.04)
        else:
            assert torch.equal(weight, published), ours

    logits, _ = forked(layout.world, train_and_save, tmp_path / "run", folder, layout, adapter)[0]
    export(find(tmp_path / "run"), tmp_path / "out", dtype="fp32", file_bytes=10**9, report=ignore_progress, merge=True)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")(text_tokens()).logits
        torch.testing.assert_close(merged, logits, rtol=1e-5, atol=1e-5)
        ours = WeightSource.find(tmp_path / "run").decoder()(text_tokens())
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


def change(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= fields
    (path / "config.json").write_text(json.dumps(config))


def edit(path: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), path / "model.safetensors")


UP, EXPERTS = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("fp8", lambda path: change(path, weight_block_size=[1, 32]), r"are quantized \(fp8, blocks of \[1, 32\]\)"),
        ("fp8", lambda path: change(path, weight_block_size=None), r"F32, but a matrix as F8_E4M3 with one scale is"),
        ("fp8", lambda path: change(path, quant_method="gptq"), r"quantized \(gptq, .*; convert"),
        ("fp8", lambda path: edit(path, UP, None), f"{UP}_scale_inv scales no tensor, as {UP} is missing"),
        ("fp8", lambda path: edit(path, UP, torch.zeros(256, 128)), r"is stored as F32 with scales \[2, 1\] in F32"),
        ("fp8", lambda path: edit(path, f"{UP}_scale_inv", torch.zeros(1, 1)), r"with scales \[1, 1\] in F32, but"),
        (
            "nf4",
            lambda path: edit(path, f"{UP}.nested_absmax", None),
            f"{UP} is in nf4 with blocks of 64 .*lacks a tensor",
        ),
        ("nf4", lambda path: edit(path, f"{UP}.quant_map", torch.zeros(16)), "quant_map has other values than bitsand"),
        ("mxfp4", lambda path: edit(path, f"{EXPERTS}_scales", None), f"{EXPERTS}_blocks has no {EXPERTS}_scales"),
    ],
)
def test_other_weights_in_few_bits_are_an_error(
    tmp_path: Path, name: str, harm: Callable[[Path], None], words: str
) -> None:
    folder = (publish_nf4 if name == "nf4" else PUBLISHED[name][0])(tmp_path / "base")
    harm(folder)
    with pytest.raises(UserError, match=words):
        HuggingFaceFolder.open(folder)
