"""The figures of docs/explanation/how-a-step-costs/search.md are those that the planner gives now."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.layout.spec import Layout
from fivefold.planner.predict import Planner
from fivefold.planner.search.alternatives import explain_choices
from fivefold.planner.search.simplest import Evaluated
from fivefold.units import show_bytes, show_risk, show_seconds
from tests.docs.figures import list_figures
from tests.docs.questions import Asked, planner_of

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "how-a-step-costs" / "search.md"
PROPOSED, WALKED = re.findall(r"```text\n\$ fivefold (search .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def planners() -> list[Planner]:
    """The planners that reduce gradients as the search tries it."""
    words = PROPOSED.splitlines()[0].split()
    asked = Asked("", words[1], words[2], " ".join(words[3:]), where="", published="", source="", why="")
    return [planner_of(asked, text) for text in ("", " (--set reduce=step)")]


def test_the_proposal_has_the_figures_of_its_prediction(planners: list[Planner]) -> None:
    planner = planners[0]
    _, proposal, time, *_ = PROPOSED.splitlines()
    result = planner.estimate(Layout.parse(proposal.removeprefix("Proposal")))
    risk = show_risk(planner.out_of_memory_risk(result.layout, result.ranks))
    figures = f"{show_seconds(result.step_time.seconds)}, {show_bytes(result.peak_bytes)} ({risk} risk)"
    assert list_figures(time)[:3] == list_figures(figures)


def test_the_reasons_have_the_figures_of_the_alternatives(planners: list[Planner]) -> None:
    planner = planners[0]
    layout = Layout.parse(PROPOSED.splitlines()[1].removeprefix("Proposal"))
    result = planner.estimate(layout)
    chosen = Evaluated(layout, result.step_time, result.peak_bytes, planner)
    lines = {item.choice: item.line for item in explain_choices(chosen, planners=planners)}
    printed = [line.partition(" ") for line in PROPOSED.partition("why\n")[2].strip().splitlines()]
    assert len(printed) == 3
    for choice, _, line in printed:
        assert list_figures(line) == list_figures(lines[choice])


def test_the_walk_is_what_the_command_prints() -> None:
    command, _, printed = WALKED.partition("\n")
    ended = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "120", "TERM": "dumb"})
    assert list_figures(printed) == list_figures(ended.stdout.partition("fivefold\n")[2])
