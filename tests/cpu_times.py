"""Where the CPU time of the tests goes: ``pytest --cpu-times FILE`` writes the seconds of each test.

CPU seconds hold on a busy machine, where the durations that pytest prints do not. Those of a test are what its process
and the processes that ended meanwhile have used since the test before: with its fixtures, and with those of its module
or session where it is the first to ask for them. What workers need to start and to collect is a row of its own, and so
is each fixture of the session that ends: a server or a browser that many tests have used, not the last of them. What
the processes of a browser's pages use is in no row, as nothing waits for them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40
STARTING, ENDING = "starting and collecting", "at the end:"
ROWS = "rows of no test"  # in what a worker sends


def read_cpu() -> float:
    """Return the CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


def sum_folders(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of each folder of ``tests``, the largest first."""
    sums = Counter[str]()
    for name, cpu in seconds.items():
        parts = Path(name.split("::")[0]).parts
        sums["/".join(parts[:2]) if len(parts) > 2 else parts[0]] += cpu
    return dict(sums.most_common())


class CpuRecorder:
    """Takes the CPU seconds of each test; the process that gathers the reports of all workers writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seconds = Counter[str]()  # of each test
        self.rows = Counter[str]()  # of what belongs to no test
        self.last = 0.0

    def pytest_collection_finish(self) -> None:
        """Tests begin here."""
        self.last = read_cpu()
        self.rows[STARTING] += self.last

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> Any:
        """Take what the end of a fixture of the session has used from the test that happens to be the last."""
        result = yield
        if fixturedef.scope == "session" and self.last:
            now = read_cpu()
            self.rows[f"{ENDING} {fixturedef.argname}"] += now - self.last
            self.last = now
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Any:
        """Give the report of a phase what was used since the last one."""
        report = yield
        now = read_cpu()
        report.cpu = now - self.last
        self.last = now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a phase to its test."""
        self.seconds[report.nodeid] += report.cpu

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker of pytest-xdist used for no test."""
        self.rows.update(getattr(node, "workeroutput", {}).get(ROWS, {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what this worker used for no test, or write all."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[ROWS] = dict(self.rows)
            return
        if self.last == 0.0:  # the process that only hands out tests
            self.rows[STARTING] += sum(os.times()[:2])
        self.seconds.update(self.rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{cpu:.2f}\t{name}\n" for name, cpu in self.seconds.most_common()))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the sum of each folder and the most expensive tests."""
        terminalreporter.section(f"{self.seconds.total():.0f} s of CPU; all tests: {self.path}")
        for rows in (sum_folders(self.seconds), dict(self.seconds.most_common(SHOWN))):
            for name, cpu in rows.items():
                terminalreporter.line(f"{cpu:7.1f} {name}")
