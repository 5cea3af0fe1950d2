"""``--from``: keys with an effect that are not modelled are an error in every command, and never silent."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

import fivefold as ff
from fivefold import cli
from fivefold.trainer.run import Run
from tests.cli.commands import run

CONFIG = """
base_model: meta-llama/Llama-3.2-1B
datasets: [{path: mine}]
sequence_len: 512
micro_batch_size: 1
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
bf16: true
output_dir: out
fsdp_version: 2
fsdp_config: {auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
LORA = CONFIG + "layer_offloading: true\ns2_attention: true\ngptq: true\nrelora: true\nunsloth_lora_mlp: true\n"
KEYS = ("layer_offloading", "s2_attention", "gptq", "relora", "unsloth_lora_mlp")
COMMANDS = ("predict", "search", "compare", "report", "dryrun", "plan", "ask")


@pytest.fixture
def lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "lora.yml"
    path.write_text(LORA)
    return path


def test_every_command_that_takes_a_config_is_tested() -> None:
    taking = {
        command.callback.__name__
        for command in cli.app.registered_commands
        if command.callback and {"from_file", "from_files"} & inspect.signature(command.callback).parameters.keys()
    }
    assert taking == set(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "write"])
def test_a_key_that_is_not_modelled_is_a_one_line_error(
    command: str, lora: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    question = ["micro-batch"] if command == "ask" else []
    words = [lora, "--to", "megatron"] if command == "write" else [*question, "--from", lora]
    assert run(monkeypatch, command, *words, "--gpus", "h100:2") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert all(key in said.err for key in KEYS)
    assert f"--ignore {','.join(KEYS)}" in said.err
    assert run(monkeypatch, command, *words, "--gpus", "h100:2", "--ignore", ",".join(KEYS[1:])) == 2
    assert "a key may change" in capsys.readouterr().err
    assert list(lora.parent.iterdir()) == [lora]  # nothing was written


@pytest.mark.parametrize("command", ["predict", "compare", "search"])
def test_an_answer_lists_ignored_keys(
    command: str, lora: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = [word for key in KEYS for word in ("--ignore", key)]
    own = ["dp2 zero3 mbs2"] if command == "compare" else []
    assert run(monkeypatch, command, "--from", lora, "--gpus", "h100:2", *ignored, *own, "--json") == 0
    said = capsys.readouterr()
    config = json.loads(said.out)["config"]
    config = config[0] if command == "compare" else config
    assert [key["key"] for key in config["ignored"]] == list(KEYS)
    assert [key["key"] for key in config["harmless"]] == ["output_dir"]
    lines = [line for line in said.err.splitlines() if line.startswith("fivefold: ")]
    assert "layer_offloading=true" in lines[0]
    assert lines[1].endswith(": output_dir")


def test_a_search_from_a_config_begins_with_its_own_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yml"
    path.write_text(CONFIG)
    assert run(monkeypatch, "predict", "--from", path, "--gpus", "h100:2", "--json") == 0
    step = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, "search", "--from", path, "--gpus", "h100:2", "--json") == 0
    own = json.loads(capsys.readouterr().out)["own"]["step"]
    assert (own["layout"], own["time"], own["memory"]) == (step["layout"], step["time"], step["memory"])
    assert run(monkeypatch, "search", "--from", path, "--gpus", "h100:2") == 0
    said = capsys.readouterr().out
    assert f"yours: {step['layout']}, step time" in said
    assert "\nyours  " in said


def test_ask_uses_the_layout_and_job_of_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yml"
    path.write_text(CONFIG)
    assert run(monkeypatch, "ask", "run", "--from", path, "--gpus", "h100:2", "--tokens", "1e9", "--json") == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, "predict", "--from", path, "--gpus", "h100:2", "--json") == 0
    step = json.loads(capsys.readouterr().out)
    assert (answer["layout"], answer["step_seconds"]) == (step["layout"], step["time"]["step_seconds"])
    assert answer["step_interval"] == step["time"]["interval"]
    assert answer["config"] == step["config"]
    assert run(monkeypatch, "ask", "run", "llama3.2-1b", "h100:2", "--from", path, "--gpus", "h100:2") == 2
    assert "leave out 'h100:2'" in capsys.readouterr().err
    assert run(monkeypatch, "ask", "run", "llama3-8b") == 2
    assert "Missing argument 'machine'; add it, such as h100:64, or set it for all commands" in capsys.readouterr().err


def test_values_that_a_config_states_are_not_listed_as_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_file = tmp_path / "config.yml", tmp_path / "run.toml"
    config.write_text(CONFIG.replace("512", "4096"))
    assert run(monkeypatch, "predict", "--from", config, "--gpus", "h100:2") == 0
    said = capsys.readouterr().out
    assert "\nseq 4096, global batch 4, bf16-grad16, AdamW, software fsdp2," in said
    assert "defaults" not in said
    run_file.write_text('model = "nano"\nmachine = "h100:2"\nlayout = "dp2"\n[job]\nsequence = 4096\n')
    assert run(monkeypatch, "predict", "--from", run_file, "--gpus", "h100:2") == 0
    assert "seq 4096; defaults: global batch 8, bf16, AdamW, software fivefold\n" in capsys.readouterr().out
    assert run(monkeypatch, "predict", "--from", run_file, "--gpus", "h100:2", "--gbs", "8") == 0
    assert "seq 4096, global batch 8; defaults: bf16, AdamW" in capsys.readouterr().out


def test_a_report_and_a_written_config_list_ignored_keys(
    lora: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ",".join(KEYS)
    assert run(monkeypatch, "report", "--from", lora, "--gpus", "h100:2", "--ignore", keys) == 0
    text = (lora.parent / "report.html").read_text()
    assert "layer_offloading=true" in text
    assert f"--ignore {keys}" in text
    assert run(monkeypatch, "write", lora, "--gpus", "h100:2", "--to", "accelerate", "--ignore", keys) == 0
    assert "layer_offloading=true" in capsys.readouterr().err


def test_json_of_a_prediction_from_a_config_is_loaded(
    lora: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "predict", "--from", lora, "--gpus", "h100:2", "--ignore", ",".join(KEYS), "--json") == 0
    (lora.parent / "step.txt.json").write_text(capsys.readouterr().out)
    assert isinstance(ff.load(lora.parent / "step.txt.json"), ff.Step)


def test_the_python_api_also_reports_unmodelled_keys_of_a_config(lora: Path) -> None:
    with pytest.raises(ff.UserError, match=r"layer_offloading=true .* --ignore layer_offloading,s2_attention"):
        ff.read_config(lora, gpus="h100:2")
    config = ff.read_config(lora, gpus="h100:2", ignore=KEYS)
    assert [said.key for said in config.notes.ignored] == list(KEYS)
    step = ff.predict(config.model, "h100:2", config.layout, job=config.job)
    assert (step.world, step.layout) == (2, "dp2 zero3 mbs1")


def test_the_ignore_option_is_an_error_without_a_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ["predict", "tiny", "h100:2", "dp2"],
        ["compare", "tiny", "h100:2", "dp2"],
        ["report", "tiny", "h100:2"],
    ):
        assert run(monkeypatch, *words, "--ignore", "adapter") == 2
        assert "is valid with --from FILE only" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["lora=16", "lora_rank=8", "quantization=nf4", "optimizer.adapter=1"])
def test_unknown_adapter_keys_point_to_the_field_adapter(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "predict", "tiny", "h100:2", "dp2", "--set", setting) == 2
    said = capsys.readouterr().err
    assert "are the field adapter: lora:16, qlora:16, dora:16, or a table" in said
    assert "the keys are sequence, global_batch, precision" in said


def test_write_lists_the_defaults_that_it_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["write", "dp8 zero3 mbs1", "--model", "llama3-8b", "--to", "torchtitan", "-o", tmp_path / "config.py"]
    assert run(monkeypatch, *words) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Fivefold's defaults" in line]
    assert "sequence 4096 (--seq), global batch 8 (--gbs), precision bf16 (--precision), 1000 steps" in line
    assert run(monkeypatch, *words, "--seq", "2048", "--gbs", "16") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Fivefold's defaults" in line]
    assert line.startswith("note: left at Fivefold's defaults: precision bf16")


def test_write_lists_the_defaults_of_a_run_file_that_does_not_state_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "llama3-8b"\nmachine = "h100:8"\nlayout = "dp8 zero3 mbs1"\n[job]\nglobal_batch = 8\n')
    assert run(monkeypatch, "write", path, "--to", "torchtitan", "-o", tmp_path / "config.py") == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Fivefold's defaults" in line]
    assert line.startswith("note: left at Fivefold's defaults: sequence 4096 (--seq), precision bf16")


def test_write_lists_the_settings_that_a_config_leaves_to_its_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\n[parallelism]\n[activation_checkpoint]\nmode = "none"\n'
    )
    assert run(monkeypatch, "write", path, "--gpus", "h100:8", "--to", "torchtitan", "-o", tmp_path / "config.py") == 0
    said = capsys.readouterr().err
    assert "left to the defaults of torchtitan 0.2.2: training.seq_len=2048, training.local_batch_size=8" in said


def test_a_config_of_conversations_becomes_a_run_file_in_another_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one GPU such a config trains under autocast, which our trainer does not run."""
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").touch()
    chat = CONFIG.replace("{path: mine}", "{path: chat.jsonl, type: chat_template}").replace("fsdp", "# fsdp")
    Path("chat.yml").write_text(chat)
    words = ["write", "chat.yml", "--gpus", "h100:1", "--model", "llama3.2-1b", "--to", "fivefold", "-o", "run.toml"]
    assert run(monkeypatch, *words) != 0
    assert "precision bf16-autocast is PyTorch's autocast" in capsys.readouterr().err
    assert run(monkeypatch, *words, "--precision", "bf16", "--seq", "1024") == 0
    settings = Run.load(Path("run.toml"))
    assert (settings.job.objective, settings.job.precision.name, settings.job.sequence) == ("sft", "bf16", 1024)
    assert settings.data.format == "messages"


@pytest.mark.parametrize(
    ("name", "text", "batch"),
    [
        ("run.toml", 'model = "llama3.2-1b"\nlayout = "dp2 zero3 mbs2"\njob = {global_batch = 12}\n', 12),
        (
            "train.sh",
            "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --model meta-llama/Llama-3.2-1B --max_length 512 "
            "--tuner_type full --per_device_train_batch_size 3 --gradient_accumulation_steps 2 --dataset mine\n",
            12,
        ),
        (
            "train.toml",
            '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 512\nlocal_batch_size = 3\n'
            "[parallelism]\ndata_parallel_shard_degree = 2\n",
            6,
        ),
        ("mesh.yml", CONFIG.replace("steps: 2", "steps: 3") + "dp_shard_size: 2\n", 6),
    ],
)
def test_a_search_on_another_number_of_gpus_keeps_the_batch_of_the_config(
    name: str,
    text: str,
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert run(monkeypatch, "search", "--from", path, "--gpus", "h100:6", "--where", "tp=1 cp=1 pp=1", "--json") == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    step = answer["best"][0]["step"]
    assert (step["job"]["global_batch"], step["world"]) == (batch, 6)
    assert answer["config"]["launched_ranks"] == 2
    assert f"{path}: read as it is launched, on 2 GPUs; its global batch is that of 2 GPUs" in said.err
    assert run(monkeypatch, "predict", "--from", path, "--gpus", "h100:6") == 2
    assert "2" in capsys.readouterr().err
