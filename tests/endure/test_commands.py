"""Some of the random command lines of ``make endure``, and that the judge sees what is wrong."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest

from fivefold.cli.errors import run_with_exit_code
from fivefold.errors import UserError
from fivefold.job import Job, Recipe
from fivefold.stack.spec import FACTS
from tests.endure.commands import IDLE_TICKS, Idle, Waits, answer, isolate, judge, run
from tests.endure.facts import find_ignored, is_same
from tests.endure.settings import list_valid_settings, settings

INPUTS = 16


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with isolate():
        yield


@pytest.mark.slow
def test_random_command_lines_succeed_or_end_in_a_one_line_error() -> None:
    ended = [run(number, seed=0) for number in range(INPUTS)]
    assert [str(item) for item in ended if item.wrong] == []
    codes = Counter(item.code for item in ended)
    assert codes[0] > INPUTS // 10
    assert codes[2] > INPUTS // 10


def test_the_checker_detects_tracebacks_and_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["predict", "nano", "h100:8", "dp8"]
    assert answer(words, limit=5)[::3] == (0, "")
    monkeypatch.setattr("fivefold.model.catalog.resolve", lambda _: 1 // 0)
    assert "ZeroDivisionError" in answer(words, limit=5)[3]

    def spin(_: str) -> None:
        while time.process_time():
            pass

    monkeypatch.setattr("fivefold.model.catalog.resolve", spin)
    assert answer(words, limit=0.2)[3].startswith("more than 0 s: ")


def test_an_answer_to_another_question_is_detected() -> None:
    words = ["predict", "nano", "h100:8", "dp8", "--json", "--set", "loss=chunked", "--set", "overlap=dp,tp"]
    code, out, _, _ = answer([*words, "--seq", "64"], limit=5)
    assert (code, find_ignored([*words, "--seq", "64"], out)) == (0, "")
    assert find_ignored([*words, "--seq", "128"], out) == "asked for sequence='128', answered for 64"
    assert find_ignored([*words, "--set", "loss=plain"], out) == "asked for stack.loss='plain', answered for 'chunked'"
    assert find_ignored([*words, "--set", "emulate=true"], out) == "asked for emulate='true', answered for False"
    assert find_ignored(["predict", "nano", "h100:8", "zero0 dp8", "--json"], out) == ""
    words += ["--seq", "64", "--stack", "megatron-core", "--set", "stack.name=fivefold"]
    assert find_ignored(words, out) == ""  # a field that is set goes before the option
    assert is_same(str(2**60 - 1), 2**60 - 1)  # which is no double
    assert not is_same(str(2**60 - 1), 2**60)
    assert "answered for 'dp8" in find_ignored(["predict", "nano", "h100:8", "dp4", "--json"], out)


def test_a_hanging_process_is_detected() -> None:
    idle = Idle()
    for _ in range(IDLE_TICKS):  # the first has nothing to compare with
        idle()
    with pytest.raises(Waits):
        idle()


def test_every_kind_of_setting_is_drawn() -> None:
    fields = {text.partition("=")[0] for text in settings()}
    assert {*Job.model_fields, *FACTS, *(f"stack.{name}" for name in FACTS)} <= fields
    assert {f"precision.{name}" for name in Recipe.model_fields} <= fields
    assert {"loss=chunked", "compile=true", "compile=false", "sequence=0", "overlap=dp,tp,cp,ep,pp"} <= {*settings()}
    assert len(list_valid_settings()) > 400


@pytest.mark.parametrize(
    ("code", "err", "wrong"),
    [
        (2, "fivefold: layout 'dp8': no\n", ""),
        (3, "", ""),
        (2, "fivefold: m: keys without effect, as in transformers' Llama: x=1\nfivefold: layout 'dp8': no\n", ""),
        (4, "", "exit code 4"),
        (2, "", "exit code 2 with 0 lines"),
        (2, "fivefold: one\nfivefold: two\n", "exit code 2 with 2 lines"),
        (1, "fivefold: one\ntwo\n", "exit code 1 with 2 lines"),
        (0, "Traceback (most recent call last)\n", "traceback"),
        (2, "fivefold: Input should be a valid integer\n", "another library's words"),
        (2, f"fivefold: {'x' * 2000}\n", "a line of 2010 characters"),
    ],
)
def test_tracebacks_and_unexpected_exit_codes_are_recognized(code: int, err: str, wrong: str) -> None:
    assert judge(code, err).startswith(wrong)
    assert bool(judge(code, err)) == bool(wrong)


def test_a_word_of_thousands_of_letters_is_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise UserError(f"layout 'dp{'1' * 5000}' is none")

    assert run_with_exit_code(fail) == 2
    assert len(capsys.readouterr().err) < 300
