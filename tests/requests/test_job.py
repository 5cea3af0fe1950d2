from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from fivefold import cli
from fivefold.cli import command_line
from fivefold.errors import UserError
from fivefold.requests.commands import JobOptions
from fivefold.requests.job import load_job

PLANNING = ("predict", "search", "ask", "ratios", "dryrun")


def test_every_planning_command_takes_every_option_of_a_job() -> None:
    group: Any = typer.main.get_command(cli.app)
    for name in PLANNING:
        options = {parameter.name for parameter in group.commands[name].params}
        assert options >= set(JobOptions.model_fields), name


def test_options_override_the_job_file_and_settings_combine_with_them(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('sequence = 512\nloss = "plain"\nprecision = "fp32"\n')
    job = load_job(file, ["reduce=micro_batch", "stack.compile=true"], seq=1024, attention="flash2")
    assert (job.sequence, job.precision.name) == (1024, "fp32")
    assert (job.stack.loss, job.stack.reduce, job.stack.compile, job.stack.attention) == (
        "plain",
        "micro_batch",
        True,
        "flash2",
    )


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        (["stack=torchtitan"], {"stack": "fivefold"}, "--stack and --set 'stack=torchtitan' both set stack"),
        (["loss=gone"], {}, "--set loss must be 'plain'"),
        (["los=plain"], {}, "did you mean 'loss'"),
        (["name=mine"], {}, "--set name: no such field"),
        ([], {"stack": "megatorn"}, "unknown stack 'megatorn'"),
    ],
)
def test_user_errors_are_one_line_errors(settings: list[str], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as mistake:
        load_job(None, settings, **options)
    assert "\n" not in str(mistake.value)


def test_the_step_contains_its_stack(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["fivefold", "predict", "tiny", "h100:2", "dp2", "--stack", "fivefold", "--json"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as done:
        command_line.main()
    assert done.value.code == 0
    assert json.loads(capsys.readouterr().out)["stack"] == "fivefold"
