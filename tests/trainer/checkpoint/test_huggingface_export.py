"""What comes from Hugging Face and goes back is the same to the bit, and transformers computes with it what we do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fivefold.errors import RunFailure, UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.experts import MoE
from fivefold.model.huggingface.read import from_config
from fivefold.model.huggingface.tensors import list_tensors
from fivefold.model.latent_attention import MLA
from fivefold.model.spec import Model
from fivefold.trainer.build import build
from fivefold.trainer.checkpoint import checkpoint, huggingface_export
from fivefold.trainer.checkpoint.full_weights import build_full_module
from fivefold.trainer.checkpoint.huggingface_export import export, find
from fivefold.trainer.checkpoint.huggingface_import import HuggingFaceFolder, start
from fivefold.trainer.engine import Engine
from tests.model.mutations import FAMILIES
from tests.selection import mark_share

JOB = Job(sequence=32, global_batch=4, precision=get_recipe("fp32"), steps=4)
PLAIN = {"width": 48, "heads": 6, "kv_heads": 2, "head_dim": 8, "ffn": 80, "vocab": 131, "positions": 64}
EXPERTS = MoE(experts=8, topk=2, ffn=24)
MODELS = {
    "llama": (Model(name="l", layers=4, tied_embeddings=True, rope_theta=1e3, **PLAIN), "dp2 pp2 zero3 mbs1"),
    "qwen3": (Model(name="q", layers=2, qk_norm="head", norm_epsilon=1e-6, **PLAIN), "dp2 tp2 zero2 mbs1"),
    "mixtral": (Model(name="m", layers=2, moe=EXPERTS.replace(ffn=80), **PLAIN), "dp2 tp2 ep2 zero3 mbs1"),
    "qwen3_moe": (
        Model(name="qm", layers=3, qk_norm="head", moe=EXPERTS.replace(normalized=False, dense_layers=1), **PLAIN),
        "dp2 tp2 ep2 etp2 mbs1",
    ),
    "deepseek_v3": (
        Model(
            name="d", layers=3, mla=MLA(q_rank=12, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6),
            moe=EXPERTS.replace(shared_experts=2, dense_layers=1, score="sigmoid", balance="free", groups=4,
                                topk_groups=2, scaling=2.5), **PLAIN | {"kv_heads": 6, "head_dim": 12},
        ),
        "tp2 pp2 ep2 mbs1",
    ),
}  # fmt: skip
Fork = Callable[..., list[Any]]


def ignore_progress(_what: str, _done: int, _of: int) -> None:
    """No progress bar."""


def tensors(folder: Path) -> dict[str, Tensor]:
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            result |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return result


def train_and_save(directory: Path, model: Model, layout: Layout) -> Tensor | None:
    """Train two steps at a great rate, save, and return logits of the full decoder on the first rank."""
    job = JOB.replace(learning_rate=JOB.learning_rate.replace(peak=1e-2))
    built = build(model=model, layout=layout, job=job, device=torch.device("cpu"))
    engine, micro = Engine(built, model=model, layout=layout, job=job), layout.micro_batches(job)
    for step in range(2):
        tokens = torch.randint(0, model.vocab, (4, 33), generator=torch.Generator().manual_seed(step))
        engine.step(tokens.view(micro, layout.dp, layout.mbs, 33)[:, built.ranks["dp"].rank])
        engine.zero_grad()
    progress = checkpoint.RunProgress(step=2, samples=8, tokens=256)
    checkpoint.save(directory, built=built, progress=progress, model=model, layout=layout, job=job)
    whole = build_full_module(built, model=model)
    return None if whole is None else whole(_tokens())


def _tokens() -> Tensor:
    return torch.randint(0, 131, (3, 40), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("family", mark_share(8, MODELS))
def test_transformers_computes_what_was_trained(forked: Fork, tmp_path: Path, family: str) -> None:
    model, text = MODELS[family]
    layout = Layout.parse(text)
    logits = forked(layout.world, train_and_save, tmp_path / "run" / "checkpoints", model, layout)[0]
    path = tmp_path / "out"
    done = export(find(tmp_path / "run"), path, dtype="fp32", file_bytes=60_000, report=ignore_progress)
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{done.files:05d}.safetensors" for n in range(1, done.files + 1)]
    assert (done.family, done.step) == (family, 2)
    assert done.files > 3
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.bytes == sum(t.nbytes for t in tensors(path).values())
    assert sorted(index["weight_map"]) == sorted(tensors(path))
    config = json.loads((path / "config.json").read_text())
    read = from_config(config, name=model.name)
    assert read.replace(source="") == model.replace(source="", attention_scale=read.attention_scale)
    assert read.attention_scale in (None, pytest.approx(model.head_dim**-0.5))
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype="auto", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(theirs(_tokens()).logits, logits, rtol=1e-5, atol=1e-5)


def save_imported(directory: Path, folder: Path, layout: Layout) -> None:
    """A checkpoint of no steps, with the weights of ``folder``."""
    model = HuggingFaceFolder.open(folder).model
    built = build(model=model, layout=layout, job=JOB, device=torch.device("cpu"))
    start(folder, built=built, model=model)
    progress = checkpoint.RunProgress(step=0, samples=0, tokens=0)
    checkpoint.save(directory, built=built, progress=progress, model=model, layout=layout, job=JOB)


THERE_AND_BACK = (
    "llama, tied and biased",
    "qwen3, yarn",
    "mixtral",
    "qwen3-moe",
    "deepseek-v3",
    "gpt-oss",
    "minimax-m2",
    "glm4-moe",
)


@pytest.mark.parametrize(
    ("case", "dtype"), mark_share(18, [(case, dtype) for case in THERE_AND_BACK for dtype in ("bf16", "fp32")])
)
def test_a_round_trip_is_bitwise_equal(forked: Fork, tmp_path: Path, case: str, dtype: str, cases: ModuleType) -> None:
    theirs = cases.reference(cases.CASES[case]).to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # is published in fp32 with weights in any dtype
            buffer.data = buffer.data.float() + 1e-6
    theirs.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    layout = Layout.parse("dp2 ep2 zero3 mbs1" if "num_experts_per_tok" in cases.CASES[case] else "tp2 mbs1")
    forked(2, save_imported, tmp_path / "checkpoints", tmp_path / "in", layout)
    export(find(tmp_path), tmp_path / "out", dtype=dtype, file_bytes=60_000, report=ignore_progress)
    wanted, result = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert wanted.keys() == result.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == result[name].dtype, name
        assert torch.equal(tensor, result[name]), name
    assert HuggingFaceFolder.open(tmp_path / "out").model.replace(name="", source="") == HuggingFaceFolder.open(
        tmp_path / "in"
    ).model.replace(name="", source="")


def test_modules_of_multi_token_prediction_are_written_as_they_were_read(forked: Fork, tmp_path: Path) -> None:
    """Transformers reads none of Nemotron 3's, which have layers of their own numbers and latent experts."""
    config = {"model_type": "nemotron_h", **FAMILIES["nemotron_h"], "num_nextn_predict_layers": 2}
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    parts = list_tensors(from_config(config, name="x"), family="nemotron_h")
    stored = {part.name: torch.rand(part.shape) for part in parts}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    forked(2, save_imported, tmp_path / "checkpoints", folder, Layout.parse("dp2 ep2 zero3 mbs1"))
    export(find(tmp_path), tmp_path / "out", dtype="fp32", file_bytes=60_000, report=ignore_progress)
    written = tensors(tmp_path / "out")
    assert sum(name.startswith("mtp.layers.") for name in written) == 2 * 32
    assert written.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in written.items())
    models = [HuggingFaceFolder.open(path).model.replace(name="", source="") for path in (folder, tmp_path / "out")]
    assert models[0] == models[1]


@pytest.fixture
def cases() -> ModuleType:
    """Their random models, which the test of reading has."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("reading", Path(__file__).with_name("test_huggingface_import.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What is refused, and what is left


@pytest.fixture
def saved(forked: Fork, tmp_path: Path) -> Path:
    forked(1, train_and_save, tmp_path / "checkpoints", MODELS["mixtral"][0], Layout.parse("mbs4"))
    return tmp_path


def refusal(source: Path, **options: Any) -> str:
    """The one line, after which nothing has been written."""
    before = sorted(source.parent.iterdir()), sorted(source.iterdir())
    with pytest.raises((UserError, RunFailure)) as caught:
        export(
            find(source), source / "out", **{"dtype": "bf16", "file_bytes": 10**6, "report": ignore_progress} | options
        )
    assert (sorted(source.parent.iterdir()), sorted(source.iterdir())) == before
    assert "\n" not in str(caught.value)
    return f"{type(caught.value).__name__}: {caught.value}".replace(str(source), "SOURCE")


def test_an_existing_folder_is_not_overwritten(saved: Path) -> None:
    (saved / "out").mkdir()
    assert refusal(saved) == "UserError: SOURCE/out exists already; remove it or give another folder"


def test_exporting_a_run_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    assert re.match("UserError: SOURCE holds no complete checkpoint", refusal(tmp_path))


def test_exporting_a_checkpoint_with_a_flipped_bit_is_an_error(saved: Path) -> None:
    file = find(saved) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "bytes have another SHA-256 than when written" in refusal(saved)


def test_exporting_without_enough_free_space_is_an_error(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_export.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2048}))
    assert re.fullmatch(r"RunFailure: SOURCE/out: needs .* KiB, but 2.00 KiB are free", refusal(saved))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("os error 28")])
def test_an_export_to_a_disk_that_fills_up_leaves_nothing(
    saved: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    save = huggingface_export.save_file
    calls = []

    def save_or_fail(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise error
        save(*arguments, **options)

    monkeypatch.setattr(huggingface_export, "save_file", save_or_fail)
    line = refusal(saved, file_bytes=20_000)
    reason = "No space left on device" if isinstance(error, OSError) else "os error 28"
    assert re.fullmatch(
        rf"RunFailure: SOURCE/out cannot be written: {reason} \(.* in all\); the partial output is removed", line
    )


def test_exporting_a_model_of_no_family_is_an_error(forked: Fork, tmp_path: Path) -> None:
    model = MODELS["mixtral"][0]
    model = model.replace(moe=EXPERTS.replace(ffn=24))  # Mixtral's config knows one width
    forked(1, train_and_save, tmp_path / "checkpoints", model, Layout.parse("mbs4"))
    assert (
        "no Hugging Face architecture can represent it; the nearest, mixtral, has moe.ffn=80 instead of 24"
        in refusal(tmp_path)
    )


def test_weights_are_exported_in_files_of_the_given_size(saved: Path) -> None:
    small, large = (
        export(find(saved), saved / f"out{size}", dtype="bf16", file_bytes=size, report=ignore_progress)
        for size in (1, 10**9)
    )
    assert (small.files, large.files) == (small.tensors, 1)
    assert sorted(path.name for path in (saved / f"out{10**9}").iterdir()) == ["config.json", "model.safetensors"]
    one, other = tensors(saved / "out1"), tensors(saved / f"out{10**9}")
    assert all(torch.equal(one[name], other[name]) for name in one | other)
