"""What ``make test-fast`` leaves out is known from the code of a test."""

from __future__ import annotations

import itertools
import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import _get_local_constants

from tests.selection import FAST_CASES, ProcessGuard, count_examples, find_marks, mark, mark_share


class Starter:
    def __init__(self) -> None:
        self.pid = os.fork()


def start() -> None:
    subprocess.run(["true"], check=True)


@pytest.fixture
def started() -> None:
    start()


def uses_a_class() -> None:
    Starter()


def uses_a_function() -> None:
    [start() for _ in range(2)]


@given(st.integers())
def draws(number: int) -> None:
    assert number == number


def uses_nothing() -> None:
    assert os.getpid()


def marks_of(function: object, request: pytest.FixtureRequest) -> set[str]:
    item = pytest.Function.from_parent(request.node.parent, name="x", callobj=function)
    return find_marks(item)


@pytest.mark.parametrize(
    ("function", "marks"),
    [
        (uses_a_class, {"processes"}), (uses_a_function, {"processes"}), (draws, {"drawn"}), (uses_nothing, set()),
    ],
)  # fmt: skip
def test_marks_of_a_test_follow_from_its_code(
    function: object, marks: set[str], request: pytest.FixtureRequest
) -> None:
    assert marks_of(function, request) == marks


def test_a_fixture_that_starts_processes_marks_its_test(request: pytest.FixtureRequest) -> None:
    def use_fixture(started: None) -> None: ...

    assert marks_of(use_fixture, request) == {"processes"}
    assert "processes" not in marks_of(lambda tmp_path: None, request)


def test_make_test_and_make_endure_have_all_cases_together(request: pytest.FixtureRequest) -> None:
    """``make test`` and ``make endure`` have all cases together, and none twice."""
    cases = mark_share(3, [*range(7), pytest.param(7, id="eight")])
    assert [case.values for case in cases] == [(number,) for number in range(8)]
    items = []
    for case in cases:
        items.append(pytest.Function.from_parent(request.node.parent, name=str(case.values), callobj=uses_nothing))
        for entry in case.marks:
            items[-1].add_marker(entry)
    short, long = (
        {item.name for item in items} - {item.name for item in mark(items, fast=False, long=long)}
        for long in (False, True)
    )
    assert short == {"(0,)", "(3,)", "(6,)"}
    assert short | long == {item.name for item in items}
    assert not short & long


@pytest.mark.parametrize("cases", [1, FAST_CASES, FAST_CASES + 1, 100])
def test_few_of_many_cases_are_fast(cases: int, request: pytest.FixtureRequest) -> None:
    items = [
        pytest.Function.from_parent(request.node.parent, name=str(number), callobj=uses_nothing)
        for number in range(cases)
    ]
    assert mark(items, fast=False, long=False) == []
    left_out = {int(item.name) for item in mark(items, fast=True, long=False)}
    kept = [number for number in range(cases) if number not in left_out]
    assert len(kept) == min(cases, FAST_CASES)
    gaps = {after - before for before, after in itertools.pairwise([*kept, cases])}
    assert max(gaps) <= min(gaps) + 1


def test_starts_of_package_processes_are_detected() -> None:
    guard = ProcessGuard()
    assert not guard.started
    start()
    assert "subprocess.Popen" in guard.started


def test_few_of_many_examples_are_tried_and_all_by_make_endure(request: pytest.FixtureRequest) -> None:
    assert [count_examples(n, fast=False, long=False) for n in (5, 25, 100)] == [5, 8, 12]
    assert [count_examples(100, fast=fast, long=not fast) for fast in (True, False)] == [5, 100]
    items = [pytest.Function.from_parent(request.node.parent, name="x", callobj=draws)]
    assert mark(items, fast=False, long=True) == mark(items, fast=False, long=False) == []


def test_only_long_tests_draw_constants_of_our_modules(pytestconfig: pytest.Config) -> None:
    assert (len(_get_local_constants()) > 0) == pytestconfig.getoption("--long")
