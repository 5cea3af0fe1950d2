"""What all tests share: threads, signals and settings of the test process, options of pytest, and skips told."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.bytecode import compile_share
from tests.cpu_times import CpuRecorder
from tests.forked_python import fork_interpreters
from tests.processes import run_forked as fork_ranks
from tests.selection import ProcessGuard, drop_long_cases, mark
from tests.skipped import summarize_skips

# An example may take as long as a busy machine makes it.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# Threads do not survive a fork, but what waits for them does: neither OpenMP nor the compiler may have any here.
os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
# Triton's kernels run in its interpreter where there is no GPU; it reads this when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A server and a browser, the predictions of all published runs, a copy of the package with additions: each is set up
# once where one worker runs all tests that share it.
SHARED_FIXTURES = frozenset({"server", "report", "small_report", "failures"})
# A script that starts the tests in its background hands SIGINT down ignored, and fivefold leaves ignored what it finds
# so. Here signals are as in a terminal, for this process and those that it starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No test reads or writes the settings of whoever runs it; those of settings put a folder of theirs here.
os.environ["XDG_CONFIG_HOME"] = os.devnull


# `python -m fivefold` is forked from this process, except within `true_interpreters()`.
fork_interpreters()
# A fork finalizes nothing of its parent's: the store of a group would wait there for a thread that it does not have.
os.register_at_fork(after_in_child=gc.freeze)
# What is imported and collected stays: to look through it for garbage takes a quarter of the start of a worker.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer what ``make test-fast`` and ``make endure`` ask for."""
    parser.addoption(
        "--fast", action="store_true", help="leave out tests that start processes or a browser, and slow ones"
    )
    parser.addoption(
        "--long",
        action="store_true",
        help="run only the cases marked `long`, which are left out otherwise, and all examples of drawn tests",
    )
    parser.addoption(
        "--throttle",
        type=float,
        metavar="N",
        help="slow the browser down by N, and delay what it is answered by 300 ms",
    )
    parser.addoption("--cpu-times", metavar="FILE", help="write there the CPU seconds of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Compile what is imported, and watch for processes that the package starts."""
    if WORKER:
        compile_share(config)
    if not config.getoption("--long"):
        providers.is_local_module_file = lambda path: False  # Hypothesis draws no constants of our modules
    if config.getoption("--fast"):
        config.pluginmanager.register(ProcessGuard())
    if path := config.getoption("--cpu-times"):
        config.pluginmanager.register(CpuRecorder(Path(path)), "cpu_times")


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Collect no cases that are left to ``make endure``."""
    if not metafunc.config.getoption("--long"):
        metafunc._calls = drop_long_cases(metafunc._calls)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they start, and order them."""
    if left_out := mark(items, fast=config.getoption("--fast"), long=config.getoption("--long")):
        config.hook.pytest_deselected(items=left_out)
        excluded = set(left_out)
        items[:] = [item for item in items if item not in excluded]
    # Of a worker's tests the last are stolen, and who takes one sets up its fixtures anew: those first that share one
    # that takes seconds.
    items.sort(key=lambda item: SHARED_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())))


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: no collection of garbage looks through it, and few are made."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    if WORKER and hasattr(os, "sched_setaffinity"):
        keep_to_one_core()


def keep_to_one_core() -> None:
    """Give each worker a core: two that share all cores wait for each other's threads most of the time.

    Only now, as three workers start on two cores together: the core of one would be idle while two share the other.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(WORKER.removeprefix("gw")) % len(cores)]})
    # There, whoever gets a message waits until its sender waits. If it took the core at once, as is usual, a sum over
    # four ranks would take four times as long (1.5 and 6.4 ms).
    with contextlib.suppress(OSError):  # not every sandbox lets a process choose
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what passed only at the second try, and what was skipped and how to have it."""
    if reruns := terminalreporter.stats.get("rerun", []):
        terminalreporter.section("failed at the first try")
        for report in reruns:
            terminalreporter.line(f"{report.nodeid}\n{report.longreprtext}")
    skips = [item.longrepr for item in terminalreporter.stats.get("skipped", [])]
    lines = [*summarize_skips((path, reason) for path, _, reason in skips)]
    if lines:
        terminalreporter.section("skipped, and how to have it")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture
def disable_garbage_collection() -> Iterator[None]:
    """For brackets without end: what other tests left is not finalized at the bottom of the parser's recursion."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def forked() -> Callable[..., list[Any]]:
    """Give ``forked(ranks, function, *arguments)``, as ``tests.processes`` has it."""
    return fork_ranks
