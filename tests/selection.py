"""Selects tests: ``make test-fast`` leaves out processes and the browser, ``make test`` the long part of long lists.

Of a test with more than ``FAST_CASES`` cases ``make test-fast`` runs that many.

Of the examples that Hypothesis draws for a test, ``make test`` tries one in ``DRAWN_SHARE``, as most faults show in the
first few, and ``make endure`` all. Only there it also draws constants that the 800 modules of the project hold: each
worker would parse all of them, two of the 16 s of CPU of its start in a fresh checkout.

The marks ``processes``, ``browser`` and ``drawn`` come from the code: a test starts a process if it, a fixture of it or
a function of the tests that it calls uses ``fork``, ``subprocess`` or ``multiprocessing``. Processes that the package
starts for a test are not seen there, so ``--fast`` fails a test that starts one while it runs.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent
PROCESS_MODULES = {"subprocess", "multiprocessing"}
PROCESS_NAMES = {"fork", "Popen", "create_subprocess_exec", "get_context"}
BROWSER_NAMES = {"sync_playwright"}
STARTS = ("os.fork", "os.posix_spawn", "subprocess.Popen")  # audit events
FAST_EXAMPLES, FAST_CASES = 5, 4
FEWEST_EXAMPLES, DRAWN_SHARE = 8, 8
SECOND_TRY = ("processes", "browser")  # wait for other processes, which a busy machine may stop for seconds


def mark_share(share: int, cases: Iterable[Any]) -> list[Any]:
    """Return ``cases`` for ``parametrize``: ``make test`` runs one in ``share`` of them, ``make endure`` the others."""
    marked = [
        case if isinstance(case, type(pytest.param())) else pytest.param(*(case if type(case) is tuple else (case,)))
        for case in cases
    ]
    return [
        case if number % share == 0 else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.long])
        for number, case in enumerate(marked)
    ]


@cache
def is_ours(filename: str) -> bool:
    """Whether the file is one of the tests."""
    return Path(filename).is_relative_to(TESTS)


def unwrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function below Hypothesis's and other decorators."""
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return getattr(function, "__wrapped__", function)


def list_functions(members: Iterable[Any]) -> list[Callable[..., Any]]:
    """Return the tests' functions among ``members``, without their decorators."""
    functions = []
    for member in members:
        if callable(member) or isinstance(member, classmethod):  # a record would look for a near name
            below = unwrap(getattr(member, "__func__", member))
            code = getattr(below, "__code__", None)
            if isinstance(code, CodeType) and is_ours(code.co_filename):
                functions.append(below)
    return functions


@cache
def list_methods(kind: type) -> list[Callable[..., Any]]:
    """Return the tests' functions among the members of a class."""
    return list_functions(vars(kind).values())


@cache
def find_uses(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[Callable[..., Any]]]:
    """Return the names that the code of ``function`` uses, and the tests' functions and methods among them."""
    names, used = set[str](), set[Callable[..., Any]]()
    pending = [function.__code__]
    while pending:
        part = pending.pop()
        pending += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
        for name in part.co_names:
            value = function.__globals__.get(name)
            names.add(value.__name__ if isinstance(value, ModuleType) else name)
            used.update(list_methods(value) if isinstance(value, type) else list_functions([value]))
    return frozenset(names), frozenset(used)


@cache
def list_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names that a function uses, and those of the tests' functions and classes that it calls."""
    names, pending, seen = set[str](), [unwrap(function)], set[Callable[..., Any]]()
    while pending:
        below = pending.pop()
        if below not in seen and is_ours(below.__code__.co_filename):
            seen.add(below)
            own_names, used = find_uses(below)
            names |= own_names
            pending += used
    return frozenset(names)


def find_marks(item: pytest.Item) -> frozenset[str]:
    """Return which of ``processes``, ``browser`` and ``drawn`` a test is marked by."""
    functions = [getattr(item, "function", None)]
    fixtures = getattr(item, "_fixtureinfo", None)
    if fixtures is not None:
        functions += [entry.func for entry in (defs[-1] for defs in fixtures.name2fixturedefs.values() if defs)]
    return find_marks_of_code(*(function for function in functions if function is not None))


@cache
def find_marks_of_code(*functions: Callable[..., Any]) -> frozenset[str]:
    """Return the marks of a test that consists of ``functions``: all its cases have the same."""
    names = {name for function in functions for name in list_names(function)}
    marks = set()
    if names & PROCESS_NAMES or {name.split(".")[0] for name in names} & PROCESS_MODULES:
        marks.add("processes")
    if names & BROWSER_NAMES:
        marks.add("browser")
    if any(hasattr(function, "hypothesis") for function in functions):
        marks.add("drawn")
    return frozenset(marks)


def drop_long_cases(cases: list[Any]) -> list[Any]:
    """Return the ``cases`` of one test that ``make test`` runs, or all if it runs none: then the test is left out.

    No item is made of the others, 5,300 in each worker.
    """
    return [case for case in cases if not any(mark.name == "long" for mark in case.marks)] or cases


def count_examples(given: int, *, fast: bool, long: bool) -> int:
    """Return how many of the ``given`` examples of a drawn test are tried."""
    if long:
        return given
    return min(given, FAST_EXAMPLES if fast else max(FEWEST_EXAMPLES, given // DRAWN_SHARE))


def mark(items: list[pytest.Item], *, fast: bool, long: bool) -> list[pytest.Item]:
    """Mark ``items``, set how many examples drawn tests try, and return the items that are left out."""
    left_out = []
    for function in {item.function for item in items if hasattr(getattr(item, "function", None), "hypothesis")}:
        given = getattr(function, "_hypothesis_internal_use_settings", settings.default)
        examples = count_examples(given.max_examples, fast=fast, long=long)
        function._hypothesis_internal_use_settings = settings(given, max_examples=examples)
    for item in items:
        for name in find_marks(item):
            item.add_marker(name)
        if any(item.get_closest_marker(name) for name in SECOND_TRY):
            item.add_marker(pytest.mark.flaky(reruns=1))
        is_long = item.get_closest_marker("long") is not None or (long and item.get_closest_marker("drawn") is not None)
        too_slow = fast and any(item.get_closest_marker(name) for name in ("processes", "browser", "slow"))
        if is_long != long or too_slow:
            left_out.append(item)
    if fast:
        excluded = set(left_out)
        left_out += thin_out(item for item in items if item not in excluded)
    return left_out


def thin_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the items beyond ``FAST_CASES`` of each test with more cases; those that stay are spread evenly."""
    cases = defaultdict(list)
    for item in items:
        cases[getattr(item, "function", item)].append(item)
    return [
        item
        for row in cases.values()
        for number, item in enumerate(row)
        if len(row) > FAST_CASES and number * FAST_CASES // len(row) == (number - 1) * FAST_CASES // len(row)
    ]


class ProcessGuard:
    """Notes that the running test starts a process, and fails it for that."""

    def __init__(self) -> None:
        self.started = ""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS:
            self.started = f"{event} {arguments[:2]}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run the test, and fail it if it has started a process."""
        self.started = ""
        yield
        if self.started and os.environ.get("PYTEST_CURRENT_TEST"):
            pytest.fail(f"make test-fast starts no processes, but {item.name} did: {self.started}; mark it `processes`")
