"""``read``, ``write`` and ``--from`` on the command line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from fivefold.interop.format import Overrides
from fivefold.interop.read import read
from fivefold.model.catalog import build_model
from tests.cli.commands import run

FILE = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 2048
[parallelism]
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "none"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text(FILE)
    return path


def test_read_shows_records_and_keys(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "read", file, "--gpus", "h100:8") == 0
    shown = capsys.readouterr().out
    assert "dp8 zero3 mbs2, 8 ranks" in shown
    assert "parallelism.tensor_parallel_degree = 1  layout.tp" in shown
    assert run(monkeypatch, "read", file, "--gpus", "h100:8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layout"]["dp"] == 8


def test_predict_from_a_config_file_reads_layout_and_software_and_options_override(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "predict", "--from", file, "--gpus", "h100:8", "--json") == 0
    step = json.loads(capsys.readouterr().out)
    assert (step["layout"], step["stack"], step["world"]) == ("dp8 zero3 mbs2", "torchtitan", 8)
    assert run(monkeypatch, "predict", "--from", file, "--gpus", "h100:8", "--seq", "512", "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory"]["peak_bytes"] < step["memory"]["peak_bytes"]


def test_compare_takes_a_model_before_configs_that_name_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    files = ("--from", f"{file} max_length=512", "--from", f"{file} max_length=256")
    assert run(monkeypatch, "compare", "tiny", *files, "--gpus", "h100:8", "--json") == 0
    assert '"tiny"' in capsys.readouterr().out
    assert run(monkeypatch, "compare", *files, "--gpus", "h100:8") == 2
    assert "does not say the model: name it before --from" in capsys.readouterr().err


def test_a_deepspeed_config_has_one_zero_stage_and_no_keys_of_other_strategies(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": "auto", "bf16": {"enabled": true}}')
    defaulted = read([str(file), "max_length=512"], Overrides(ranks=8, model=build_model("tiny"))).defaulted
    assert [key.key for key in defaulted if key.means.startswith("layout.zero")] == [
        "deepspeed.zero_optimization.stage"
    ]
    assert not [key.key for key in defaulted if key.key.startswith(("accelerate.", "fsdp_config."))]
    assert not [key.key for key in defaulted if key.key in ("bf16", "fp16", "pure_bf16")]  # DeepSpeed's key says it


def test_what_a_config_leaves_out_can_be_given_after_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}')
    assert run(monkeypatch, "predict", "--from", file, "--gpus", "h100:8") == 2
    said = capsys.readouterr().err
    assert "the model: name it before --from, or with `read` and `write` by --model NAME" in said
    assert "add max_length=4096 after the file (in quotes with --from); `predict` and `write` take --seq too" in said
    assert run(monkeypatch, "predict", "tiny", "--from", file, "--gpus", "h100:8", "--seq", "512", "--json") == 0
    by_option = json.loads(capsys.readouterr().out)
    words = (file, "--model", "tiny", "--gpus", "h100:8", "--seq", "512", "--to", "fivefold")
    assert run(monkeypatch, "write", *words) == 0
    assert "sequence = 512" in capsys.readouterr().out
    assert run(monkeypatch, "predict", "tiny", "--from", f"{file} max_length=512", "--gpus", "h100:8", "--json") == 0
    said = capsys.readouterr()
    step = json.loads(said.out)
    assert (step["model"], step["layout"], step["stack"]) == ("tiny", "dp8 zero3 mbs1", "deepspeed")
    assert [by_option[part] for part in ("memory", "time")] == [step[part] for part in ("memory", "time")]
    assert "defaults" not in said.err  # the file states its batches by other keys than the trainer's
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    line += "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 8 --bf16 "
    line += "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --vocab-size 32000"
    assert len(line) > 255  # more than a file's name may have
    assert run(monkeypatch, "predict", "--from", line, "--gpus", "h100:8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "dp8 zero0 mbs1"
    named = f"{file} max_length=512 model_name_or_path=meta-llama/Llama-3.2-1B"
    assert run(monkeypatch, "predict", "--from", named, "--gpus", "h100:8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "llama3.2-1b"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("predict", "--from", "FILE"), "needs a machine: add --gpus h100:64"),
        (("predict", "tiny", "h100:8", "--from", "FILE", "--gpus", "h100:8"), "leave out 'h100:8'"),
        (("predict", "tiny", "h100:8", "dp8", "--seq", "1k", "--seq=2k"), "--seq is given 2 times: give it once"),
        (("compare", "tiny", "h100:8", "dp8", "--precision", "bf16", "--precision", "fp8"), "or --precisions with all"),
        (("predict", "--from", "a.json 'b", "--gpus", "h100:8"), "No closing quotation; close the quotes"),
        (("predict", "tiny", "h100:8", "dp8", "--gpus", "h100:8"), "is valid with --from FILE only"),
        (("predict", "--from", "FILE", "--gpus", "h100"), "does not say on how many GPUs it runs"),
        (("search", "--from", "none.toml", "--gpus", "h100:8"), "none.toml: no such file"),
        (("write", "dp8", "--to", "torchtitan"), "needs a model; add --model NAME"),
        (("write", "dp8 zero3", "--model", "tiny", "--to", "torchtitn"), "unknown format 'torchtitn'; did you mean"),
        (("read", "README.md"), "ends in .md; configs end in"),
        (("read", "pyproject.toml"), "unknown kind of config"),
    ],
)
def test_user_errors_are_one_line_errors(
    words: tuple[str, ...],
    reason: str,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *(file if word == "FILE" else word for word in words)) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert said.count("\n") == 1


def test_a_config_goes_from_one_software_to_another(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there, misnamed = tmp_path / "there.py", tmp_path / "there.toml"
    assert run(monkeypatch, "write", file, "--gpus", "h100:8", "--to", "torchtitan", "-o", there) == 0
    assert f"wrote {there}\n" in capsys.readouterr().err
    assert run(monkeypatch, "write", file, "--gpus", "h100:8", "--to", "torchtitan", "-o", misnamed) == 0
    assert f"wrote {misnamed}, which its software reads as a .py file" in capsys.readouterr().err
    assert run(monkeypatch, "read", there, "--gpus", "h100:8") == 0
    assert "dp8 zero3 mbs2, 8 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stack", "name", "line"),
    [
        ("torchtitan", "x.toml", ""),
        ("torchtitan", "x.yml", "torchtitan reads a .py file, not .yml; name x.py"),
        ("megatron-core", "x.toml", "megatron reads a .sh file, not .toml; name x.sh"),
        ("deepspeed", "x.toml", "deepspeed takes 5 files (run.sh, arguments.yaml, config.json, train.py, "
         "deepspeed.json); name a folder"),
    ],
)  # fmt: skip
def test_search_writes_the_format_of_the_software_to_the_named_file(
    stack: str,
    name: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("search", "llama3-8b", "h100:8", "--stack", stack, "--gbs", "32", "--top", "1")
    narrowed = ("--where", "tp=1 pp=1 cp=1 ac=full mbs=1", "--write", name)
    if line:
        assert run(monkeypatch, *words, *narrowed) == 2
        assert capsys.readouterr().err == f"fivefold: --write {name}: {line}\n"
        assert list(tmp_path.iterdir()) == []
        return
    assert run(monkeypatch, *words, *narrowed) == 0
    assert " as torchtitan-0.2" in capsys.readouterr().err
    assert tomllib.loads((tmp_path / name).read_text())["training"]["global_batch_size"] == 32


@pytest.mark.slow
def test_search_writes_the_best_layout_that_the_config_of_the_software_can_express(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    best = tmp_path / "best.py"
    words = (
        "search",
        "llama3-8b",
        "h100:8",
        "--stack",
        "torchtitan",
        "--seq",
        "2048",
        "--gbs",
        "32",
        "--top",
        "2",
        "--where",
        "pp=1 cp=1 ac=none,full",
    )
    assert run(monkeypatch, *words, "--write", best) == 0
    said = capsys.readouterr().err
    assert run(monkeypatch, "read", best, "--gpus", "h100:8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layout"]["dp"] == 8
    assert "as torchtitan" in said


def test_compare_takes_configs_and_other_layouts(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "compare", "--from", file, "--gpus", "h100:8", "dp4 tp2 zero3", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [variant["step"]["layout"] for variant in result["variants"]] == ["dp8 zero3 mbs2", "dp4 tp2 zero3 mbs1"]
    other = file.with_name("other.toml")
    other.write_text(FILE.replace("= 2048", "= 1024"))
    assert run(monkeypatch, "compare", "--from", file, "--from", other, "--gpus", "h100:8", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [variant["step"]["job"]["sequence"] for variant in result["variants"]] == [2048, 1024]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "nothing to compare; give"),
        (("--gpus", "h100:8"), "is valid with --from FILE only"),
        (("--from", "FILE", "dp8"), "needs a machine"),
        (("--from", "FILE", "--gpus", "h100:8"), "compare takes 2 to 12 different steps, not 1"),
        (("--from", "FILE", "--gpus", "h100:8", "--seq", "512", "dp8 zero3"), "drop the job options"),
    ],
)
def test_compare_reports_what_is_missing(
    words: tuple[str, ...], reason: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "compare", *(str(file) if word == "FILE" else word for word in words)) == 2
    assert reason in capsys.readouterr().err
