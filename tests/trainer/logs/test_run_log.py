"""What goes to Weights & Biases, by a stand-in for its package; what is in the folder: ``test_faults.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.errors import RunFailure, UserError
from fivefold.text_files import read_lines
from fivefold.trainer.logs.run_log import Logs
from fivefold.trainer.run import Run


class Refused(Exception):
    """What the package raises."""


class Board:
    """Stands in for ``wandb``: keeps what it is given."""

    Error = Refused

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, dict[str, Any]]] = []
        self.finished = 0

    def Settings(self, **values: Any) -> SimpleNamespace:  # noqa: N802  its name
        return SimpleNamespace(**values)

    def init(self, **asked: Any) -> Board:
        self.asked.append(asked)
        return self

    def define_metric(self, name: str, **values: Any) -> None:
        self.metrics.append((name, values))

    def log(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    result = Board()
    monkeypatch.setitem(sys.modules, "wandb", result)  # type: ignore[arg-type]
    return result


def logs(folder: Path, project: str = "words") -> Logs:
    return Logs(folder, report=lambda line: None, run=Run.read({"logs": {"wandb": project}}, origin="run.toml"))


def test_a_resumed_run_continues_the_same_wandb_run(tmp_path: Path, board: Board) -> None:
    with logs(tmp_path / "run") as first:
        first.start(0)
        first.write({"step": 1, "loss": 5.5})
        first.write({"step": 1, "expert_load": {"0": [1.0]}})
        first.start(0)  # went back over bad data: the same run, still open
        first.write({"step": 1, "loss": 5.0})
    assert (len(board.asked), board.finished) == (1, 1)
    with logs(tmp_path / "run") as second:
        second.start(1)
        second.write({"step": 2, "loss": 4.5})
    before, after = board.asked
    assert before["id"] == after["id"] == (tmp_path / "run" / "wandb-id").read_text().strip()
    assert (after["resume"], after["project"], after["name"]) == ("allow", "words", "run")
    assert after["config"]["job"]["sequence"] == 4096
    assert ("*", {"step_metric": "step"}) in board.metrics
    assert board.lines == [{"step": 1, "loss": 5.5}, {"step": 1}, {"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.5}]
    assert [line["loss"] for line in read_lines(tmp_path / "run" / "log.jsonl")] == [5.0, 4.5]
    with logs(tmp_path / "other") as third:
        third.start(0)
    assert board.asked[2]["id"] != before["id"]


def test_runs_without_wandb_log_nothing_to_it(tmp_path: Path, board: Board) -> None:
    with logs(tmp_path, "") as quiet:
        quiet.start(0)
        quiet.write({"step": 1, "loss": 5.5})
    assert board.asked == []


def test_a_missing_wandb_login_says_what_to_do(tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_asked: Any) -> None:
        raise Refused("api_key not configured (no-tty)\nmore of it")

    monkeypatch.setattr(board, "init", refuse)
    wanted = r"cannot be started: api_key not configured \(no-tty\); `wandb login`, set WANDB_MODE=offline"
    with logs(tmp_path) as refused, pytest.raises(RunFailure, match=wanted):
        refused.start(0)


def test_a_missing_wandb_package_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    path = tmp_path / "run.toml"
    path.write_text(
        f'model = "nano"\nmachine = "h100:8"\nlayout = "dp8 mbs1"\nfolder = "{tmp_path}/run"\n[logs]\nwandb = "words"\n'
    )
    with pytest.raises(UserError, match=r"\[logs\] wandb needs the extra wandb: pip install 'fivefold\[wandb\]', or"):
        CliRunner().invoke(app, ["train", str(path)], catch_exceptions=False)
    assert not (tmp_path / "run").exists()
