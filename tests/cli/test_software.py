"""A plan and a search for another software end in the config that runs there, or say what has to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.requests.settings import change_setting, load_settings, save_settings

WORDS = ["qwen3-0.6b", "h100:8", "--where", "tp=1 pp=1 cp=1 ac=none mbs<=2 order=default"]


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def torchtitan_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose setting is torchtitan, in an empty folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.chdir(tmp_path)
    save_settings(change_setting(load_settings(), "stack", "torchtitan"))


@pytest.mark.slow
@pytest.mark.usefixtures("torchtitan_user")
def test_a_plan_ends_in_the_config_of_the_software(tmp_path: Path) -> None:
    shown = run("plan", *WORDS, "--tokens", "1e10", "--write", "run.toml")
    (config,) = tmp_path.glob("*.py")
    assert config.read_text().rstrip() in shown
    assert "user settings: stack=torchtitan" in shown
    read = json.loads(run("read", str(config), "--gpus", "h100:8", "--json"))
    assert read["layout"]["dp"] == 8
    assert Path("run.toml").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("torchtitan_user")
def test_a_search_ends_in_the_config_of_the_software(tmp_path: Path) -> None:
    shown = run("search", *WORDS, "--seq", "2048", "--gbs", "32", "--top", "2")
    assert "With torchtitan" in shown
    run("search", *WORDS, "--seq", "2048", "--gbs", "32", "--top", "2", "--write", "best.py")
    assert Path("best.py").read_text().rstrip() in shown
    shown = run("search", *WORDS, "--seq", "2048", "--gbs", "32", "--top", "2", "--set", "optimizer.kind=muon")
    reason = "the config cannot express the job: read back, it has optimizer.kind='adamw'"
    assert f"no config can be written for torchtitan: {reason}" in " ".join(shown.split())
    assert "With" not in run("search", *WORDS, "--seq", "2048", "--gbs", "32", "--top", "2", "--stack", "fivefold")


@pytest.mark.usefixtures("torchtitan_user")
@pytest.mark.slow
def test_a_search_in_several_precisions_prints_and_writes_that_of_each_layout() -> None:
    words = ["qwen3-8b", *WORDS[1:], "--gbs", "32", "--top", "4"]  # narrower models are no faster in fp8-rowwise
    shown = run("search", *words, "--also", "fp8-rowwise", "--write", "best.py")
    assert " in fp8-rowwise\n" in shown
    assert "precision" in shown
    read = json.loads(run("read", "best.py", "--gpus", "h100:8", "--json"))
    assert read["job"]["precision"]["name"] == "fp8-rowwise"
    assert " in bf16\n" not in run("search", *words)
    refused = run("search", *words, "--also", "fp8")
    assert "no config can be written for torchtitan: precision fp8: torchtitan 0.3 has fp8-rowwise" in " ".join(
        refused.split()
    )
