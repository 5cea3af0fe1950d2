"""The verbs in Python against the command line's ``--json``: same words, same defaults, same answers, same mistakes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.errors import RunFailure, UserError
from fivefold.job import Job
from fivefold.requests.commands import JobOptions
from fivefold.trainer.run_lock import hold
from tests.profiling.traces import kineto

ROOT = Path(__file__).parents[2]
LLAMA = ("llama3-8b", "h100:8")
WORDS = {
    "seq": 2048,
    "gbs": 16,
    "precision": "fp8",
    "stack": "megatron-core",
    "loss": "chunked",
    "optimizer": {"kind": "sgd"},
}
OPTION = (
    "--seq", "2048", "--gbs", "16", "--precision", "fp8", "--stack", "megatron-core", "--set", "loss=chunked", "--set",
    "optimizer.kind=sgd",
)  # fmt: skip


def command(*words: str) -> Any:
    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_predict_returns_what_the_command_prints() -> None:
    layout = "dp2 tp2 pp2 v2 zero1 mbs1 ac=selective"
    step = ff.predict(*LLAMA, layout, **WORDS)  # type: ignore[arg-type]
    assert step.model_dump(mode="json") == command("predict", *LLAMA, layout, *OPTION)
    assert ff.predict(*LLAMA, layout, seq=2048).job["sequence"] == 2048


def test_predict_takes_records_and_files(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("sequence = 1024\nglobal_batch = 64\n")
    of_file = ff.predict(*LLAMA, "dp8 zero2", job=file, gbs=32)
    assert of_file == ff.predict(*LLAMA, "dp8 zero2", job=Job(sequence=1024), gbs=32)
    assert of_file == ff.predict(*LLAMA, "dp8 zero2", job={"sequence": 1024}, global_batch=32)
    assert of_file.model_dump(mode="json") == command("predict", *LLAMA, "dp8 zero2", "--job", str(file), "--gbs", "32")


def test_predict_takes_a_config_of_transformers() -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            return values

    values: dict[str, object] = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    step = ff.predict(values, "h100:1", "dp1", seq=128, gbs=4)
    assert step == ff.predict(Config(), "h100:1", "dp1", seq=128, gbs=4)  # type: ignore[arg-type]
    assert step.work.parameters == 2 * 512 * 64 + 2 * (64 * 64 * 3 + 64 * 128 * 3 + 2 * 64) + 64
    with pytest.raises(ff.UserError, match="model is a list; give a name, a path, a Model, or the config of a model"):
        ff.predict([1], "h100:1", "dp1")  # type: ignore[arg-type]


@pytest.mark.slow
def test_search_returns_what_the_command_prints() -> None:
    words = {"where": "tp<=2", "top": 3, "also": ["fp8"], "front": 2, "seq": 256, "gbs": 8}
    result = ff.search("nano", "h100:2", **words).model_dump(mode="json")  # type: ignore[arg-type]
    said = command(
        "search",
        "nano",
        "h100:2",
        "--where",
        "tp<=2",
        "--top",
        "3",
        "--also",
        "fp8",
        "--front",
        "2",
        "--seq",
        "256",
        "--gbs",
        "8",
    )
    assert result.pop("seconds") >= 0 < len(result["best"])
    assert result == {name: value for name, value in said.items() if name != "seconds"}
    assert ff.search("nano", "h100:2", exact=True).proposal is None


def test_compare_returns_what_the_command_prints() -> None:
    words = (*LLAMA, "dp8 zero3 mbs1", "dp4 tp2 zero1 mbs1")
    result = ff.compare(*words, precisions="bf16,fp8", seq=2048, gbs=16)
    assert result.model_dump(mode="json") == command(
        "compare", *words, "--precisions", "bf16,fp8", "--seq", "2048", "--gbs", "16"
    )
    assert result.to_frame("arrow").num_rows == 4
    assert ff.compare("nano", ["h100:8"], ["dp8", "dp4 tp2"]) == ff.compare("nano", "h100:8", "dp8", "dp4 tp2")
    assert "trains most tokens per second" in result._repr_html_()


def test_walk_returns_what_search_with_keep_prints() -> None:
    result = ff.walk("nano", "h100:8", "dp4 tp2", gbs=16, where="pp=1", memory="20GiB")
    words = ("search", "nano", "h100:8", "--keep", "dp4 tp2", "--gbs", "16", "--where", "pp=1", "--memory", "20GiB")
    assert result.model_dump(mode="json") == command(*words)


@pytest.mark.slow
def test_ask_returns_what_the_command_prints() -> None:
    """``tests/web/test_ask_page.py`` compares all questions with the command."""
    result = ff.ask("changes", "nano", "h100:8", "dp8 zero3", gbs=64, seq=256)
    assert [item.model_dump(mode="json") for item in result] == command(
        "ask", "changes", "nano", "h100:8", "dp8 zero3", "--gbs", "64", "--seq", "256"
    )
    assert f"{len(result):,} rows" in result._repr_html_()


@pytest.mark.slow
def test_dryrun_returns_what_the_command_prints() -> None:
    result = ff.dryrun("nano", "h100:2", "dp2 zero2 mbs1", seq=64, gbs=4)
    said = command("dryrun", "nano", "h100:2", "dp2 zero2 mbs1", "--seq", "64", "--gbs", "4")
    assert result.step is not None
    assert result.step.model_dump(mode="json") == said["dry_run"]
    assert (list(result.findings), list(result.assumed)) == (said["findings"], said["assumed"])
    assert len(repr(result)) < 250
    assert "dry run" in result._repr_html_()


@pytest.mark.slow
def test_sweep_returns_the_rows_that_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = {"models": ["nano"], "machines": ["h100"], "ranks": [1, 2], "layouts": ["dp*", "best 1"], "batches": [4]}
    Path("few.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in tables.items()))
    said = command("sweep", "few.toml", "--out", "said.jsonl")
    sweep = ff.sweep("few.toml")
    assert [row.model_dump() for row in sweep] == said
    assert ff.sweep(tables) == sweep == ff.load("runs/sweeps/few.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few.toml", "runs", "said.jsonl"]
    with pytest.raises(UserError, match=r"sweep: missing: .*; unknown key 'model'; did you mean 'models'"):
        ff.sweep({"model": ["nano"]})


def test_trace_returns_what_the_command_prints(tmp_path: Path) -> None:
    kineto.write(kineto.draw(1), tmp_path, zipped=True)
    against = ("nano", "h100:2", "dp2 zero2 mbs2")
    result = ff.trace(tmp_path, against=against, gbs=8, seq=128, top=3)
    said = command("trace", str(tmp_path), "--against", *against, "--gbs", "8", "--seq", "128", "--top", "3")
    assert result.model_dump(mode="json") == said
    assert "Compared with the prediction" in result._repr_html_()
    with pytest.raises(UserError, match="apply to a prediction only; add against="):
        ff.trace(tmp_path, gbs=8)


@pytest.mark.processes
def test_an_invalid_run_raises_the_error_line_of_the_command(tmp_path: Path) -> None:
    run = {"model": "nanno", "machine": "h100:2", "layout": "dp2", "folder": str(tmp_path / "run")}
    with pytest.raises(
        UserError,
        match=r"^unknown model 'nanno'; did you mean nano\? ff.models\(\) lists all; or .* config.json$",
    ):
        ff.train(run)


@pytest.mark.processes
@pytest.mark.parametrize(("code", "kind"), [(1, RunFailure), (2, UserError)])
def test_a_failed_run_raises_the_error_line_of_the_command(
    code: int,
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = tmp_path / "python"
    command.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/words\necho step 1 >&2\necho "fivefold: no" >&2\nexit {code}\n'
    )
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    with pytest.raises(kind, match=r"^no$"):
        ff.train({"folder": str(tmp_path / "run")}, layout="dp2", machine="h100:2", force=True, trace=2)
    assert capsys.readouterr().err == "step 1\nfivefold: no\n"
    said = (tmp_path / "words").read_text().split()
    assert said == [
        "-m",
        "fivefold",
        "train",
        f"{tmp_path}/run/run.json",
        *["--layout", "dp2", "--force", "--machine", "h100:2", "--trace", "2"],
    ]


def test_the_file_of_a_running_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with hold(tmp_path), pytest.raises(UserError, match="has been using this folder since"):
        ff.train({"folder": str(tmp_path)})
    assert (tmp_path / "run.json").read_text() == "{}"


ELSEWHERE = {  # options of search that are functions of their own in Python
    "search": {"keep", "machines", "tokens", "price", "deadline", "gpu_counts", "assume"},  # walk, across
}
SKIPPED = {
    *JobOptions.model_fields,
    "json",
    "as_json",
    "charts",
    "chart",
    "operations",
    "over_time",
    "trace",
    "snapshot",
    "slurm",
    "dry",
}
SKIPPED |= {"from_file", "from_files", "gpus", "ignore", "write"}  # files that a command reads (read_config) or writes
SKIPPED |= {"no_calibrate"}  # a function measures only what it is asked to


@pytest.mark.parametrize("verb", ["predict", "search", "compare", "ask", "dryrun", "sweep", "train", "trace"])
def test_keyword_arguments_and_defaults_are_those_of_the_command_line(verb: str) -> None:
    """Every option of the command is a parameter with its default, but for pictures and forms of printing."""
    theirs: Any = get_command(app)
    skipped = (SKIPPED - {"trace"} if verb == "train" else SKIPPED) | ELSEWHERE.get(verb, set())
    options = {item.name: item for item in theirs.commands[verb].params if item.name not in skipped}
    ours = {
        name: parameter
        for name, parameter in inspect.signature(getattr(ff, verb)).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in JobOptions.model_fields
    }
    named = {name for name, option in options.items() if option.param_type_name == "option"}
    assert named == set(ours), verb
    for name in named:
        default = 1e12 if options[name].default == "1T" else options[name].default  # as a user writes it
        assert (default or None) == (ours[name].default or None), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: ff.predict("nanno", "h100:8", "dp8"), "unknown model 'nanno'; did you mean nano? ff.models()"),
        (lambda: ff.predict("nano", "h100:8", "pd8"), "unknown layout token 'pd8'"),
        (lambda: ff.predict("nano", "h100:8", "dp8", los="chunked"), "job: unknown key 'los'; did you mean 'loss'?"),
        (lambda: ff.predict("nano", "h100:8", "dp8", seq=1, sequence=2), "seq= and sequence= both set sequence"),
        (lambda: ff.predict("nano", "h100:8", "dp8", job="no.toml"), "no.toml: no such file"),
        (lambda: ff.search("nano", "h100:8", top=0), "top=0 must be 1 to 10000"),
        (lambda: ff.ask("gpu", "nano", "h100:8"), "unknown question 'gpu'; did you mean gpus?"),
        (lambda: ff.load("no.json"), "no.json: no such file"),
        (lambda: ff.load("no.jsonl"), "no.jsonl: no such file"),
    ],
)  # fmt: skip
def test_a_user_error_is_a_one_line_error(call: Any, line: str) -> None:
    with pytest.raises(ff.UserError) as told:
        call()
    assert line in str(told.value)
    assert "\n" not in str(told.value)


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    ).stdout


def test_importing_the_package_is_fast() -> None:
    code = "import time; t = time.process_time(); import fivefold, sys; print(time.process_time() - t, *sys.modules)"
    seconds, *loaded = python(code).split()
    assert float(seconds) < 0.15
    assert {"pydantic", "numpy", "rich", "typer", "fivefold.api"}.isdisjoint(loaded)
    assert set(dir(ff)) >= {*ff.__all__, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'prediction'"):
        _ = ff.prediction


def test_one_price_one_assumption_and_tokens_as_text_are_understood() -> None:
    words: dict[str, Any] = {"gbs": 64, "layout": "dp8 zero3 mbs1"}
    (plain,) = ff.ask("run", *LLAMA, tokens="20B", price=2.5, assume="failures=2", **words)
    (listed,) = ff.ask("run", *LLAMA, tokens=20e9, price=["2.5"], assume=["failures=2"], **words)
    assert plain == listed
    assert plain.dollars == pytest.approx(2.5 * plain.gpu_hours)
    with pytest.raises(UserError, match=r"^tokens='many' must be a number, such as 2e12 or 2T$"):
        ff.ask("run", *LLAMA, tokens="many", **words)
