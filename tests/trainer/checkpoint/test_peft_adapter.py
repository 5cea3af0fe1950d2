"""Adapters of a run as a PEFT adapter folder and back, and merged; tests/third_party loads them with peft."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5Config,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from fivefold.adapter import END_TARGETS, EXPERT_TARGETS, Adapter, Base
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.weights import list_adapter_weights, list_trained_weights
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint import checkpoint, huggingface_import, merged_adapter, peft_adapter
from fivefold.trainer.checkpoint.full_weights import build_full_module, gather_full_weights
from fivefold.trainer.checkpoint.huggingface_export import export, find
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder
from fivefold.trainer.engine import Engine
from fivefold.trainer.generate.source import WeightSource
from tests.selection import mark_share

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# rows of q and k in another order; no gate, other names; fused tensors
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig,
    "ernie4_5": Ernie4_5Config,
    "phi": PhiConfig,
    "phi3": Phi3Config,
    "qwen3_5_text": partial(Qwen3_5TextConfig, **DELTA),  # one tensor of several of our layers, in two ways
    "qwen3_next": partial(Qwen3NextConfig, **DELTA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}
ADAPTER = Adapter(rank=3, alpha=5, targets=("q_proj", "v_proj", "down_proj"), rank_stabilized=True)
Fork = Callable[..., list[Any]]


def ignore_progress(_what: str, _done: int, _of: int) -> None:
    """No progress bar."""


def base_of(path: Path, family: str, **changed: int) -> Path:
    """A small model of ``family`` with random weights, as transformers saves it."""
    torch.manual_seed(1)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    AutoModelForCausalLM.from_config(CONFIGS[family](**SIZES | special | changed)).save_pretrained(path)
    return path


def job_of(adapter: Adapter) -> Job:
    job = Job(sequence=32, global_batch=4, precision=get_recipe("fp32"), steps=4, adapter=adapter)
    return job.replace(learning_rate=job.learning_rate.replace(peak=1e-2))


def text_tokens() -> Tensor:
    return torch.randint(0, 131, (3, 40), generator=torch.Generator().manual_seed(7))


def train_and_save(
    folder: Path, base: Path, layout: Layout, adapter: Adapter
) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Train two steps, save; return the logits of the full decoder and its weights on the first rank."""
    job, model = job_of(adapter), HuggingFaceFolder.open(base).model
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(base, built=built, model=model)
    engine, micro = Engine(built, model=model, layout=layout, job=job), layout.micro_batches(job)
    for step in range(2):
        batch = torch.randint(0, model.vocab, (4, 33), generator=torch.Generator().manual_seed(step))
        engine.step(batch.view(micro, layout.dp, layout.mbs, 33)[:, built.ranks["dp"].rank])
        engine.zero_grad()
    progress = checkpoint.RunProgress(step=2, samples=8, tokens=256)
    checkpoint.save(
        folder / "checkpoints", built=built, progress=progress, model=model, layout=layout, job=job, base=str(base)
    )
    decoder, weights = build_full_module(built, model=model), gather_full_weights(built, model=model)
    return None if decoder is None else (decoder(text_tokens()), weights)


def start(folder: Path, base: Path, layout: Layout, adapter: Adapter) -> dict[str, Tensor]:
    """The full weights of a run that starts from a PEFT adapter folder, on the first rank."""
    job, model = job_of(adapter), HuggingFaceFolder.open(base).model
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(base, built=built, model=model)
    peft_adapter.start(folder, base=base, built=built, model=model, job=job)
    return gather_full_weights(built, model=model)


@pytest.mark.parametrize(
    ("family", "text", "adapter"),
    [
        ("ernie4_5", "tp2 mbs2", ADAPTER.replace(kind="dora")),
        ("phi", "pp3 mbs1", Adapter(rank=3, targets=("all-linear", *END_TARGETS))),
        *mark_share(
            12,
            [
                ("qwen3_next", "tp2 mbs2", Adapter(rank=3, targets=("v_proj", "in_proj_ba", "out_proj"))),
                ("phi", "dp2 zero3 mbs1", ADAPTER.replace(rank_pattern={"v_proj": 5}, alpha_pattern={"down_proj": 2})),
                ("phi", "tp2 mbs2", ADAPTER.replace(modules_to_save=("lm_head",))),
                ("phi", "dp2 zero2 mbs2", ADAPTER),
                ("llama", "dp2 zero3 mbs1", ADAPTER.replace(modules_to_save=("embed_tokens", "lm_head"))),
                ("llama", "dp2 pp3 zero3 mbs1", ADAPTER),
                ("llama", "dp2 pp3 zero1 mbs1", ADAPTER.replace(modules_to_save=("embed_tokens", "lm_head"))),
                ("ernie4_5", "tp2 dp2 zero1 mbs1", Adapter(rank=4)),
                ("ernie4_5", "tp2 dp2 zero3 mbs1", ADAPTER.replace(kind="dora")),
                ("qwen3_5_text", "tp2 dp2 zero3 mbs1", Adapter(kind="dora", rank=3, rank_pattern={"in_proj_qkv": 5})),
                ("qwen3_5_text", "dp2 pp3 zero1 mbs1", Adapter(rank=3, targets=("q_proj", "in_proj_z"))),
                ("qwen3_next", "dp2 zero2 mbs1", Adapter(rank=3, targets=("q_proj", "in_proj_qkvz", "in_proj_ba"))),
            ],
        ),
    ],
)
def test_adapters_read_back_from_a_peft_folder(
    forked: Fork, tmp_path: Path, family: str, text: str, adapter: Adapter
) -> None:
    base, layout = base_of(tmp_path / "base", family), Layout.parse(text)
    logits, weights = forked(layout.world, train_and_save, tmp_path / "run", base, layout, adapter)[0]
    model = HuggingFaceFolder.open(base).model

    done = export(find(tmp_path / "run"), tmp_path / "lora", file_bytes=10**9, report=ignore_progress)
    stored = set(load_file(tmp_path / "lora" / peft_adapter.WEIGHTS))
    parts = dict(peft_adapter._list_tensor_names(model, family, adapter))
    assert parts.keys() == {weight.name for weight in list_trained_weights(model, adapter)}
    assert stored == {name for name, _ in parts.values()}
    assert (done.family, done.holds, done.dtype, done.tensors) == (family, "adapters", "fp32", len(stored))
    again = forked(2, start, tmp_path / "lora", base, Layout.parse("dp2 zero3 mbs1"), adapter)[0]
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)

    merged = export(
        find(tmp_path / "run"), tmp_path / "out", dtype="fp32", file_bytes=60_000, report=ignore_progress, merge=True
    )
    assert merged.holds == "merged weights"
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")(text_tokens()).logits
        torch.testing.assert_close(theirs, logits, rtol=1e-5, atol=1e-5)
        for source in (tmp_path / "run", tmp_path / "lora"):  # as `generate` and `numerics` read it
            torch.testing.assert_close(WeightSource.find(source).decoder()(text_tokens()), logits, rtol=1e-5, atol=1e-5)


def resume(path: Path, base: Path, layout: Layout, adapter: Adapter) -> dict[str, Tensor]:
    """The full weights of a run that continues from the checkpoint ``path``, on the first rank."""
    job, model = job_of(adapter), HuggingFaceFolder.open(base).model
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    huggingface_import.start(base, built=built, model=model)
    checkpoint.load(path, built=built, model=model, job=job)
    return gather_full_weights(built, model=model)


# tp2 cuts its matrices between blocks of 64 elements, and of 128 x 128
BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 128}


@pytest.mark.parametrize(
    ("text", "other", "kind", "base", "sizes"),
    mark_share(
        6,
        [
            ("tp2", "dp2 zero3", "lora", "nf4", BLOCKS),
            ("dp2 zero3", "dp1", "lora", "nf4", {}),
            ("dp2 zero3", "tp2", "dora", "int8", {}),
            ("dp2 zero3", "tp2", "dora", "fp8", BLOCKS),
            ("tp2 nosp mbs4", "dp1", "lora", "fp8", BLOCKS),
            ("tp2", "dp1", "dora", "nf4", BLOCKS),
        ],
    ),
)  # fmt: skip
def test_a_base_in_few_bits_is_merged_and_continued_as_it_was_trained(
    forked: Fork, tmp_path: Path, text: str, other: str, kind: str, base: Base, sizes: dict[str, int]
) -> None:
    """Weights of its folder are quantized again, in full, and cut by the layout that continues."""
    folder, adapter = base_of(tmp_path / "base", "llama", **sizes), ADAPTER.replace(kind=kind, base=base)
    logits, weights = forked(2, train_and_save, tmp_path / "run", folder, Layout.parse(text), adapter)[0]
    layout = Layout.parse(other)
    continued = forked(layout.world, resume, find(tmp_path / "run"), folder, layout, adapter)[0]
    assert continued.keys() == weights.keys()
    for name, weight in weights.items():  # merged by other products
        torch.testing.assert_close(continued[name], weight, rtol=1e-6, atol=1e-7)
    export(find(tmp_path / "run"), tmp_path / "out", dtype="fp32", file_bytes=10**9, report=ignore_progress, merge=True)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")(text_tokens()).logits
        torch.testing.assert_close(theirs, logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            WeightSource.find(tmp_path / "run").decoder()(text_tokens()), logits, rtol=1e-5, atol=1e-5
        )


def test_routing_biases_of_a_merged_mixture_are_those_of_its_base(forked: Fork, tmp_path: Path) -> None:
    """Adapters of its dense MLPs and shared experts are exported merged, as peft would drop them."""
    torch.manual_seed(1)
    heads = {"num_key_value_heads": 6, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6}
    heads |= {"qk_rope_head_dim": 4, "v_head_dim": 8, "num_nextn_predict_layers": 0}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    experts |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1}
    mixture = AutoModelForCausalLM.from_config(DeepseekV3Config(**SIZES | heads | experts))
    for name, buffer in mixture.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)
    mixture.save_pretrained(tmp_path / "base")
    adapter = Adapter(rank=3, targets=("q_b_proj", "down_proj"))
    logits, _ = forked(1, train_and_save, tmp_path / "run", tmp_path / "base", Layout.parse("dp1 mbs2"), adapter)[0]
    write = partial(export, find(tmp_path / "run"), file_bytes=10**9, report=ignore_progress)
    write(tmp_path / "out", dtype="fp32", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    biases = {name: buffer for name, buffer in mixture.named_buffers() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    assert all(torch.equal(merged.get_buffer(name), buffer) for name, buffer in biases.items())
    with torch.no_grad():
        torch.testing.assert_close(merged(text_tokens()).logits, logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"takes down_proj of deepseek_v3 as those of its routed experts.*--merge"):
        write(tmp_path / "lora")
    assert not (tmp_path / "lora").exists()


def test_adapters_of_experts_read_back_from_a_peft_folder(forked: Fork, tmp_path: Path) -> None:
    """Trained under expert parallelism and ZeRO-3, read by one rank, and merged."""
    torch.manual_seed(1)
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path / "base")
    adapter = Adapter(rank=3, targets=("q_proj", *EXPERT_TARGETS), rank_pattern={"experts.gate_up_proj": 5})
    logits, weights = forked(
        2, train_and_save, tmp_path / "run", tmp_path / "base", Layout.parse("dp2 ep2 zero3 mbs2"), adapter
    )[0]
    write = partial(export, find(tmp_path / "run"), file_bytes=10**9, report=ignore_progress)
    write(tmp_path / "lora")
    config = json.loads((tmp_path / "lora" / peft_adapter.CONFIG).read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["rank_pattern"] == {"mlp.experts.gate_up_proj": 5}
    again = forked(1, start, tmp_path / "lora", tmp_path / "base", Layout.parse("dp1 mbs1"), adapter)[0]
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    write(tmp_path / "out", dtype="fp32", merge=True)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")(text_tokens()).logits
        torch.testing.assert_close(theirs, logits, rtol=1e-5, atol=1e-5)
        for source in (tmp_path / "run", tmp_path / "lora"):
            torch.testing.assert_close(WeightSource.find(source).decoder()(text_tokens()), logits, rtol=1e-5, atol=1e-5)


def test_adapters_that_peft_cannot_store_are_errors(tmp_path: Path) -> None:
    model = HuggingFaceFolder.open(base_of(tmp_path / "base", "phi3")).model
    factors = {weight.name: torch.zeros(weight.shape) for weight in list_adapter_weights(model, ADAPTER)}
    with pytest.raises(UserError, match=r"phi3 stores blocks\.0\.attention\.q fused with others"):
        peft_adapter.write(tmp_path, factors, model=model, family="phi3", adapter=ADAPTER, base=None)


def folder_of(path: Path, base: Path, *, family: str = "llama") -> Path:
    """A PEFT adapter folder with zeros."""
    model = HuggingFaceFolder.open(base).model
    factors = {weight.name: torch.zeros(weight.shape) for weight in list_adapter_weights(model, ADAPTER)}
    path.mkdir()
    peft_adapter.write(path, factors, model=model, family=family, adapter=ADAPTER, base=str(base))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"use_dora": True}, r"lora_magnitude_vector is missing"),
        ({"modules_to_save": ["norm"]}, "modules_to_save=norm, and only embed_tokens and lm_head of"),
        ({"modules_to_save": ["embed_tokens"]}, r"model\.embed_tokens\.weight is missing"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"rank_pattern": {"q_proj": 8}}, r"is \[3, 48\] instead of \[8, 48\]"),
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 8}}, r"rank_pattern of q_proj in only some blocks"),
        ({"rank_pattern": {"(q_proj)+*": 8}}, r"rank_pattern='\(q_proj\)\+\*', a pattern that is not read"),
        ({"alpha_pattern": {"q_proj": 8}}, r"alpha_pattern q_proj:8, and .job. adapter has kind lora"),
        ({"target_parameters": ["gate.weight"]}, "target_parameters=gate.weight, and only gate_up_proj and down_proj"),
        ({"r": 4}, r"is \[3, 48\] instead of \[4, 48\]"),
        ({"lora_alpha": 7}, "scale 4.04145 .* and .job. adapter has kind lora, rank 3, scale 2.88675"),
        ({"r": 0}, "rank must be 1 or more, not 0"),
    ],
    ids=str,
)
def test_another_adapter_than_the_jobs_is_an_error(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder, model = folder_of(tmp_path / "lora", base), HuggingFaceFolder.open(base).model
    assert peft_adapter.open_as(folder, base=base, model=model, job=job_of(ADAPTER))
    config = json.loads((folder / peft_adapter.CONFIG).read_text())
    (folder / peft_adapter.CONFIG).write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=words):
        peft_adapter.open_as(folder, base=base, model=model, job=job_of(ADAPTER))


def test_missing_and_unknown_factors_are_errors(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    folder = folder_of(tmp_path / "lora", base)
    model, file = HuggingFaceFolder.open(base).model, folder / peft_adapter.WEIGHTS
    stored = load_file(file)
    lost = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"
    save_file({name: tensor for name, tensor in stored.items() if name != lost}, file)
    with pytest.raises(UserError, match=r"layers\.2\.self_attn.q_proj.lora_B.weight is missing"):
        peft_adapter.open_as(folder, base=base, model=model, job=job_of(ADAPTER))
    save_file({**stored, "base_model.model.model.norm.lora_A.weight": torch.zeros(3, 48)}, file)
    with pytest.raises(UserError, match=r"1 tensors that are not factors .* base_model.model.model.norm.lora_A.weight"):
        peft_adapter.open_as(folder, base=base, model=model, job=job_of(ADAPTER))
    file.write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged or incomplete"):
        peft_adapter.open_as(folder, base=base, model=model, job=job_of(ADAPTER))
    file.unlink()
    with pytest.raises(UserError, match="no such file"):
        peft_adapter.open_as(folder, base=base, model=model, job=job_of(ADAPTER))


def test_adapters_of_the_text_model_of_an_image_text_model_are_read(tmp_path: Path) -> None:
    """transformers loads the text model of Qwen3.5 alone too, by the same names but for a prefix."""
    base = base_of(tmp_path / "base", "qwen3_5_text")
    folder, model = folder_of(tmp_path / "lora", base, family="qwen3_5_text"), HuggingFaceFolder.open(base).model
    text = json.loads((base / "config.json").read_text())
    config = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (base / "config.json").write_text(json.dumps(config))
    assert peft_adapter.find_family(base) == "qwen3_5_text"
    file = folder / peft_adapter.WEIGHTS
    prefix = f"{peft_adapter.PREFIX}model."
    inner = {name.replace(prefix, f"{prefix}language_model."): tensor for name, tensor in load_file(file).items()}
    save_file(inner, file)
    _, factors = peft_adapter.AdapterFolder.open(folder).read_factors(model, family="qwen3_5_text")
    assert factors.keys() == {weight.name for weight in list_adapter_weights(model, ADAPTER)}


def test_an_adapter_folder_without_a_base_asks_for_one(tmp_path: Path) -> None:
    """As of a run that began with random weights; the working directory is no base."""
    folder = folder_of(tmp_path / "lora", base_of(tmp_path / "base", "llama"))
    config = json.loads((folder / peft_adapter.CONFIG).read_text())
    (folder / peft_adapter.CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(UserError, match="names no base; give the base with --base FOLDER"):
        merged_adapter.open_adapter_folder(folder)


def test_adapters_over_random_weights_have_no_base() -> None:
    manifest: Any = SimpleNamespace(job=Job(sequence=8, global_batch=1, adapter=Adapter()), base=None)
    with pytest.raises(UserError, match=r"trained over random weights, which no folder holds; name a base"):
        merged_adapter.open_checkpoint(Path("step-00000020"), manifest)
