"""Every answer that comes from a search says if the search ended at its work limit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.planner.search.work import SearchWork
from tests.selection import mark_share

ASKED = ("qwen3-0.6b", "h100:8")
JOB: dict[str, Any] = {"seq": 4096, "gbs": 64}
LINE = "the search ended at its work limit: its fastest layout is"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every search end at its limit at once."""
    monkeypatch.setattr("fivefold.planner.search.SearchWork", partial(SearchWork, exact_units=0, doubling_units=1))
    monkeypatch.setattr("fivefold.planner.questions.fewest_gpus.GPUS_UNITS", 0)


@pytest.mark.parametrize("question", mark_share(2, ["run", "batch", "gpus"]))
@pytest.mark.filterwarnings("ignore::fivefold.errors.UsageWarning")
def test_an_answer_to_a_question_without_a_layout_has_a_remark(question: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if question != "gpus":  # which tries numbers of ranks first
        monkeypatch.setattr("fivefold.planner.search.work.WorkBudget.remaining_units", 0)
    answers = ff.ask(question, *ASKED, **JOB)
    assert all(any(remark.startswith(LINE) for remark in answer.remarks) for answer in answers)


def test_a_sweep_has_the_remark_in_its_rows() -> None:
    asked = {"models": ["qwen3-0.6b"], "machines": ["h100"], "ranks": [8], "sequences": [4096], "batches": [64]}
    rows = ff.sweep(asked | {"layouts": ["best 1"]})
    assert all(row.why.startswith(LINE) for row in rows)


def test_a_run_on_several_machines_has_the_remark_of_each() -> None:
    words = [
        "search",
        *ASKED,
        "--seq",
        "4096",
        "--gbs",
        "64",
        "--tokens",
        "1e9",
        "--gpu-counts",
        "8-8",
        "--where",
        "cp=1 pp=1",
    ]
    output = CliRunner().invoke(app, words, env={"COLUMNS": "200"}, catch_exceptions=False).output
    assert f"h100:8  {LINE}" in output
