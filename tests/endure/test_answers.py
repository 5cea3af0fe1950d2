"""Some of the questions of ``answers.py``, and that its judge sees planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.endure.answers import (
    Question,
    check_risk_order,
    check_step,
    check_text,
    compare_with_predict,
    draw_question,
    run,
)
from tests.endure.commands import answer, isolate

NUMBERS = 3
WORDS = ["predict", "tiny", "h100:4", "dp4 zero1 mbs1", "--seq", "128", "--gbs", "8"]
QUESTION = Question(WORDS, "tiny", "h100:4", WORDS[3], WORDS[4:])


def test_random_answers_agree_with_each_other_and_with_predict() -> None:
    with isolate():
        ended = [run(number, seed=5) for number in range(NUMBERS)]
    assert [item.wrong for item in ended if item.wrong] == []
    assert sum(item.code == 0 for item in ended) > NUMBERS // 2


def test_a_number_and_a_seed_determine_the_question() -> None:
    assert draw_question(3, seed=1) == draw_question(3, seed=1) != draw_question(3, seed=2)


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    with isolate():
        code, out, _, _ = answer([*WORDS, "--json"], limit=10)
    assert code == 0
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.parametrize(
    "plant",
    [
        lambda step: step["memory"].update(risk=0.5),
        lambda step: step["memory"].update(reserved_bytes=1),
        lambda step: step["memory"].update(peak_bytes=step["memory"]["peak_bytes"] + 1),
        lambda step: step.update(world=8),
        lambda step: step["time"].update(step_seconds=1.0),
        lambda step: step["mfu"].update(causal=step["mfu"]["causal"] * 1.01),
        lambda step: step.update(mfu={name: 1.01 * share for name, share in step["mfu"].items()}),
    ],
)
def test_a_planted_fault_is_detected(plant: Callable[[dict[str, Any]], None], step: dict[str, Any]) -> None:
    assert list(check_step(QUESTION, step)) == []
    changed: dict[str, Any] = json.loads(json.dumps(step))
    plant(changed)
    assert list(check_step(QUESTION, changed))


def test_a_wrong_figure_in_the_text_is_detected(step: dict[str, Any]) -> None:
    with isolate():
        assert list(check_text(QUESTION, step)) == []
        changed = step | {"memory": step["memory"] | {"peak_bytes": 2**40}}
        assert list(check_text(QUESTION, changed))


def test_a_risk_that_rises_with_more_gpu_memory_is_detected(step: dict[str, Any]) -> None:
    words = [*WORDS[:3], "dp4 zero1 mbs2", *WORDS[4:-1], "16"]
    question = QUESTION._replace(words=words, layout=words[3], job=words[4:])
    with isolate():
        larger = json.loads(answer([*words, "--json"], limit=10)[1])
        assert list(check_risk_order(question, larger)) == []
        lower = larger | {"memory": larger["memory"] | {"risk": -1.0}}
        assert len(list(check_risk_order(question, lower))) == 2  # more memory, and half the micro-batch


@pytest.mark.parametrize("planted", [{"risk": 0.04}, {"verdict": "tight"}, {"fits": False}])
def test_a_verdict_that_differs_from_predict_is_detected(planted: dict[str, Any], step: dict[str, Any]) -> None:
    with isolate():
        assert list(compare_with_predict(QUESTION, step)) == []
        assert list(compare_with_predict(QUESTION, step | {"memory": step["memory"] | planted}))
