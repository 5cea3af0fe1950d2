"""Processes for distributed tests: forked from the test process, one thread each, joined by a file store."""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.forked_python import fork_interpreters
from tests.selection import ProcessGuard, mark
from tests.skipped import summarize_skips

# An example may take as long as a busy machine makes it.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

# Threads do not survive a fork, but what waits for them does: neither OpenMP nor the compiler may have any here.
os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# With several workers each keeps to one core: two that share all cores wait for each other's threads most of the time.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
    # There, whoever gets a message waits until its sender waits. If it took the core at once, as is usual, a sum over
    # four ranks would take four times as long (1.5 and 6.4 ms).
    with contextlib.suppress(OSError):  # not every sandbox lets a process choose
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Triton's kernels run in its interpreter where there is no GPU; it reads this when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer what ``make test-fast`` and ``make endure`` ask for."""
    parser.addoption(
        "--fast", action="store_true", help="leave out tests that start processes or a browser, and slow ones"
    )
    parser.addoption(
        "--long", action="store_true", help="run only the cases marked `long`, which are left out otherwise"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch for processes that the package starts."""
    if config.getoption("--fast"):
        config.pluginmanager.register(ProcessGuard())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they start."""
    if left_out := mark(items, fast=config.getoption("--fast"), long=config.getoption("--long")):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: no collection of garbage looks through it, and few are made."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


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
def no_garbage() -> Iterator[None]:
    """For brackets without end: what other tests left is not finalized at the bottom of the parser's recursion."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def forked(tmp_path: Path) -> Callable[..., list[Any]]:
    """``forked(ranks, function, *arguments)`` runs it in that many gloo processes and returns their results."""
    calls = 0

    def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        import torch._dynamo  # noqa: F401  once here, and not in each child: optimizers load it

        context = multiprocessing.get_context("fork")
        results: Any = context.Queue()
        store = tmp_path / f"store{calls}"
        workers = [
            context.Process(target=_child, args=(rank, ranks, str(store), results, function, arguments), daemon=True)
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        answers = {rank: pickle.loads(answer) for rank, answer in (results.get(timeout=120) for _ in workers)}
        for worker in workers:
            worker.join(timeout=30)
        failed = {rank: answer for rank, answer in answers.items() if isinstance(answer, _Failure)}
        assert not failed, "\n".join(f"rank {rank}:\n{answer.text}" for rank, answer in failed.items())
        return [answers[rank] for rank in range(ranks)]

    return run


class _Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _child(rank: int, ranks: int, store: str, results: Any, function: Callable[..., Any], arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        results.put((rank, pickle.dumps(function(*arguments))))  # bytes: no tensor handles across processes
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, pickle.dumps(_Failure(traceback.format_exc()))))
