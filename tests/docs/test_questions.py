"""The figures of docs/explanation/planning-questions.md are those that the commands print now of its proposals."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.where import Where
from fivefold.planner.search.alternatives import explain_choices
from fivefold.planner.search.simplest import Evaluated
from fivefold.units import show_bytes, show_risk, show_seconds
from tests.docs import questions
from tests.docs.figures import list_figures
from tests.docs.questions import PAGE, QUESTIONS
from tests.planner.search.test_alternatives import change_layout
from tests.selection import mark_share

PARTS = questions.sections(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_its_questions_and_their_table() -> None:
    assert len(PARTS) == len(QUESTIONS) == 10
    head = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    assert list_figures(head.partition("| ")[2]) == list_figures(questions.table(PARTS)), (
        "python -m tests.docs.questions 0"
    )
    stacks = {word for asked in QUESTIONS for word in re.findall(r"--stack (\S+)", asked.options)}
    assert len(stacks) >= 3


@pytest.mark.parametrize("number", range(1, 11))
def test_a_section_of_the_page_has_the_figures_that_the_commands_print(number: int) -> None:
    part, asked = PARTS[number - 1], QUESTIONS[number - 1]
    proposal, text = questions.read_proposal(part)
    made = questions.section(number, asked, proposal, text)
    assert list_figures(part) == list_figures(made), f"prices have moved: python -m tests.docs.questions {number}"
    assert Where.parse(asked.where).is_satisfied_by(Layout.parse(proposal))
    assert asked.why, "a published choice is explained"


@pytest.mark.parametrize("number", mark_share(2, range(1, 11)))
def test_printed_proposal_equals_its_prediction(number: int) -> None:
    """Its figures, and the line of each choice, without the search that found it."""
    part, asked = PARTS[number - 1], QUESTIONS[number - 1]
    proposal, text = questions.read_proposal(part)
    every = [questions.planner_of(asked, words) for words in (text, "", " (--set reduce=step)")]
    result = every[0].estimate(Layout.parse(proposal))
    risk = show_risk(every[0].out_of_memory_risk(result.layout, result.ranks))
    figures = f"{show_seconds(result.step_time.seconds)}, {show_bytes(result.peak_bytes)}, {risk}"
    assert set(list_figures(figures)) <= set(list_figures(text))
    assert every[0].fits(result.layout, result.ranks)
    chosen = Evaluated(result.layout, result.step_time, result.peak_bytes, every[0])
    others = every[1:] if asked.options.find("--stack") < 0 else []
    printed = list_figures(" ".join(text.partition("why")[2].split()))  # a line may end within a figure
    made = explain_choices(
        chosen,
        where=Where.parse(asked.where),
        planners=[entry for entry in others if entry.job != every[0].job],
        evaluated=list_printed_alternatives(" ".join(text.partition("why")[2].split()), chosen),
    )
    for item in made:
        assert set(list_figures(item.line)) <= set(printed), f"python -m tests.docs.questions {number}"


def list_printed_alternatives(text: str, chosen: Evaluated) -> Iterator[Evaluated]:
    """Yield the layouts of other degrees that a search found, as its reasons name them."""
    for words in re.findall(r"\b((?:tp|cp|pp|ep)\d+(?: (?!takes)[^ ;()]+)*) takes", text):
        words = words.partition(" leaves the node")[0]
        choice, *rest = words.split()
        name = " ".join(rest) if rest and rest[0][:2] == choice[:2] else words  # the choice's own word is before it
        layout = change_layout(chosen.layout, name)
        if is_legal(layout, model=chosen.planner.model, job=chosen.planner.job, machine=chosen.planner.machine):
            result = chosen.planner.estimate(layout)
            yield Evaluated(layout, result.step_time, result.peak_bytes, chosen.planner)


@pytest.mark.slow
def test_printed_search_equals_its_result() -> None:
    """Of the first question, which is the quickest to ask."""
    result = questions.search(QUESTIONS[0])
    assert list_figures(questions.proposal_text(result)) == list_figures(questions.read_proposal(PARTS[0])[1])
