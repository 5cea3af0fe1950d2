"""From a folder of Hugging Face to a run of two processes and back, by the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.machine.spec import Chip, Link, Machine
from fivefold.machine.toml import emit, write
from fivefold.text_files import read_file, read_lines
from fivefold.trainer.data.loader import Loader
from fivefold.trainer.data.shards import Shards
from fivefold.trainer.data.tokenizer import train_bpe
from fivefold.trainer.run import Run

MACHINE = Machine(
    name="here", ranks=2, ranks_per_node=2, backend="gloo",
    chip=Chip(name="core", peak_flops={"fp32": 1e11}, memory_bytes=2**32, memory_bandwidth=1e10, source="test"),
    links=(Link(name="loopback", span=2, bandwidth=1e9, latency_seconds=1e-4, source="test"),),
)  # fmt: skip
TEXTS = [f"document {number} says: " + "all work and no play, once more. " * 20 for number in range(20)]
RUN: dict[str, Any] = {
    "machine": "local:2", "layout": "dp2 zero3 mbs1", "sample": "", "evaluate_every": 100, "evaluate_sequences": 4,
    "job": {"sequence": 32, "global_batch": 4, "precision": "fp32", "steps": 2, "learning_rate": {"peak": 1e-3}},
    "data": {"corpus": "corpus", "heldout": 0.2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in: a corpus, a calibrated machine, and a random Llama with a tokenizer."""
    write(MACHINE, tmp_path / "cache" / "fivefold" / "local.toml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "corpus" / f"{number}.txt").write_text(text)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in llama.parameters():
            weight.mul_(3)  # so wide that its loss is none of a model without weights
    llama.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text(train_bpe(TEXTS, vocab=270).text)
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [*words], catch_exceptions=False)


def test_pretraining_continues_from_imported_weights_with_the_loss_of_transformers_and_is_exported(
    workspace: Path,
) -> None:
    facts = json.loads(run("import", "llama", "--to", "run.toml", "--json").stdout)
    assert (facts["family"], facts["tensors"], facts["dtypes"], facts["run"]) == ("llama", 21, ["F32"], "run.toml")
    assert (
        facts["bytes"]
        == 4 * facts["parameters"]
        == 4 * sum(weight.numel() for weight in LlamaForCausalLM.from_pretrained("llama").parameters())
    )
    written = read_file(Path("run.toml"))
    assert Run.read(written, origin="run.toml").start.weights == Path("llama")
    values = {
        key: {**written.get(key, {}), **value} if isinstance(value, dict) else value for key, value in RUN.items()
    }
    Path("run.toml").write_text(emit(written | values))

    done = subprocess.run([sys.executable, "-m", "fivefold", "train", "run.toml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = Path(written["folder"])
    first, second = (line for line in read_lines(folder / "log.jsonl") if "loss" in line)
    shards = Shards.open(folder / "data")
    tokens = Loader(shards, sequence=32, seed=0).batch(0, global_batch=4, rank=0, ranks=1, micro_batches=1, mbs=4)
    llama = AutoModelForCausalLM.from_pretrained("llama")
    batch = torch.from_numpy(tokens[0]).long()
    with torch.no_grad():
        logits = llama(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    assert first["loss"] == pytest.approx(loss, abs=1e-4)
    assert abs(second["loss"] - first["loss"]) > 1e-3

    facts = json.loads(run("export", str(folder), "--to", "out", "--dtype", "fp32", "--json").stdout)
    assert (facts["step"], facts["files"], facts["tensors"]) == (2, 1, 21)
    trained = AutoModelForCausalLM.from_pretrained("out")
    with torch.no_grad():
        assert (trained(batch[:, :-1]).logits - logits).abs().max() > 1e-3
    assert HuggingFaceTokenizer.from_file("llama/tokenizer.json").get_vocab_size() <= trained.config.vocab_size


def test_import_prints_family_parameters_and_dtypes() -> None:
    result = run("import", "llama")
    assert result.stdout == "llama: llama, 64.37 k parameters in 21 tensors, 251.44 KiB of F32\n"
    assert not Path("run.toml").exists()


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        run(*words)
    return str(caught.value)


def test_unsupported_input_is_an_error(workspace: Path) -> None:
    assert refusal("import", "nowhere").startswith("nowhere: no such folder; give one with config.json")
    assert refusal("export", "nowhere", "--to", "out").startswith("nowhere: no such folder; give the folder of a run")
    assert refusal("export", "x", "--to", "out", "--file-size", "much").startswith("--file-size 'much' is not a size")
    Path("run.toml").write_text("mine")
    assert refusal("import", "llama", "--to", "run.toml") == "run.toml exists already; remove it or give another file"
    assert Path("run.toml").read_text() == "mine"
    Path("llama/tokenizer.json").unlink()
    assert refusal("import", "llama", "--to", "new.toml").startswith("llama has no tokenizer.json")


def test_weights_of_another_model_are_rejected_before_the_corpus_is_read(workspace: Path) -> None:
    Path("run.toml").write_text(emit(RUN | {"model": "nano", "folder": "other", "start": {"weights": "llama"}}))
    assert refusal("train", "run.toml").startswith(
        "llama holds another model, with width=48 instead of 64; give the run "
    )
    assert not Path("other").exists()


@pytest.mark.long  # the next test trains, exports, merges and trains on
def test_adapters_are_trained_over_the_folder_and_go_on_from_a_checkpoint(workspace: Path) -> None:
    job = RUN["job"] | {"adapter": {"rank": 4}, "learning_rate": {"peak": 1e-2, "kind": "constant"}}
    values = RUN | {"model": "llama/config.json", "start": {"weights": "llama"}, "job": job}

    def train(folder: str, *, steps: int, **changes: Any) -> list[float]:
        Path("run.toml").write_text(emit(values | {"folder": folder, "job": job | {"steps": steps}} | changes))
        done = subprocess.run([sys.executable, "-m", "fivefold", "train", "run.toml"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line["loss"] for line in read_lines(Path(folder) / "log.jsonl") if "loss" in line]

    straight = train("straight", steps=4)
    train("half", steps=2)
    assert train("half", steps=4, sample="document ", sample_tokens=3) == straight
    assert straight[3] != straight[2]

    assert refusal("numerics", "run.toml").startswith("numerics: does not compare adapters yet; remove [job] adapter")
    Path("run.toml").write_text(emit(values | {"folder": "half", "noise_scale": True}))
    assert refusal("train", "run.toml").startswith("noise_scale is not supported with adapters yet; drop it")
    Path("run.toml").write_text(emit(values | {"folder": "half", "job": job | {"adapter": {"rank": 5}}}))
    done = subprocess.run([sys.executable, "-m", "fivefold", "train", "run.toml"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "was trained with adapter " in done.stderr


def test_adapters_are_trained_exported_merged_and_trained_on(workspace: Path) -> None:
    run("import", "llama", "--to", "run.toml")
    values = read_file(Path("run.toml"))
    adapter = {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}
    job = {**values["job"], **RUN["job"], "adapter": adapter, "learning_rate": {"peak": 1e-2}}
    data = {**values["data"], **RUN["data"]}
    Path("run.toml").write_text(emit({**values, **RUN, "job": job, "data": data}))
    trained = subprocess.run([sys.executable, "-m", "fivefold", "train", "run.toml"], capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr

    assert run("export", "runs/llama", "--to", "lora").stdout.startswith(
        "lora: llama after step 2, adapters in 8 tensors"
    )
    config = json.loads(Path("lora/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 8, ["q_proj", "down_proj"])
    assert config["base_model_name_or_path"] == str(workspace / "llama")
    merged = run("export", "runs/llama", "--to", "merged", "--merge", "--dtype", "fp32").stdout
    assert merged.startswith("merged: llama after step 2, merged weights in 21 tensors in 1 files")
    (Path("merged") / "tokenizer.json").write_bytes(Path("llama/tokenizer.json").read_bytes())

    words = ("--prompt", "all work", "--tokens", "8", "--temperature", "0", "--json")
    texts = [
        json.loads(run("generate", source, *words).stdout)["samples"] for source in ("runs/llama", "lora", "merged")
    ]
    assert texts[0] == texts[1] == texts[2]

    facts = json.loads(run("import", "lora", "--to", "more.toml", "--json").stdout)
    assert facts["adapter"] == {
        "folder": "lora", "kind": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj", "down_proj"],
        "rank_stabilized": False, "base": None, "double_quantization": True, "modules_to_save": [], "rank_pattern": [],
        "alpha_pattern": [],
    }  # fmt: skip
    values = read_file(Path("more.toml"))
    assert values["start"] == {"weights": str(workspace / "llama"), "adapter": "lora"}
    job = {**values["job"], **RUN["job"], "learning_rate": {"peak": 1e-9}, "steps": 1}
    Path("more.toml").write_text(emit({**values, **RUN, "folder": "runs/more", "job": job, "data": data}))
    again = subprocess.run([sys.executable, "-m", "fivefold", "train", "more.toml"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    run("export", "runs/more", "--to", "more")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (Path("lora"), Path("more")))
    assert before.keys() == after.keys()
    assert all((after[name] - before[name]).abs().max() < 1e-7 for name in before)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("export", "run", "--to", "out", "--merge"), "holds all weights and no adapter; drop --merge"),
        (("generate", "llama", "--base", "llama"), "has no adapters; drop --base"),
        (("import", "llama", "--base", "llama"), "has no adapter_config.json; drop --base"),
    ],
)
def test_adapter_options_for_a_run_without_adapters_are_errors(
    workspace: Path, words: tuple[str, ...], reason: str
) -> None:
    if words[0] == "export":
        run("import", "llama", "--to", "run.toml")
        values = read_file(Path("run.toml"))
        job, data = {**values["job"], **RUN["job"], "steps": 1}, {**values["data"], **RUN["data"]}
        Path("run.toml").write_text(emit({**values, **RUN, "folder": "run", "layout": "dp1", "job": job, "data": data}))
        subprocess.run([sys.executable, "-m", "fivefold", "train", "run.toml"], check=True, capture_output=True)
    with pytest.raises(UserError, match=reason):
        run(*words)
