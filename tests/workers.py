"""Runs tests in several processes, which are forked once all tests are imported: ``pytest --workers 3``.

To import and collect the tests takes 17 seconds of CPU; here it is done once, not in every process. The tests of a
file run in one process, so that its fixtures are made once, and so do all tests that share the server and the browser.
A process that has done its file takes the next. Reports are sent to the first process, which counts and prints them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import chain, groupby, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

SHARED_FIXTURE = "server"
NUMBER_BYTES = 4
SECONDS = 5.0  # between looks at processes that send nothing; and for their end


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--workers``."""
    parser.addoption("--workers", type=int, default=0, help="run the tests in this many forked processes")


def pytest_configure(config: pytest.Config) -> None:
    """Run the tests in processes if there are to be any."""
    if (count := config.getoption("--workers")) and not config.option.collectonly:
        config.pluginmanager.register(Workers(config, count))


def group_items(items: list[pytest.Item]) -> list[list[int]]:
    """Return the places of tests that belong into one process: those of the server first, then file by file."""
    shared = [place for place, item in enumerate(items) if SHARED_FIXTURE in getattr(item, "fixturenames", ())]
    others = sorted(set(range(len(items))).difference(shared), key=lambda place: "/trainer/" not in items[place].nodeid)
    files = groupby(others, key=lambda place: items[place].path)
    return [group for group in (shared, *(list(places) for _, places in files)) if group]


class Workers:
    """Runs the collected tests in ``count`` processes."""

    def __init__(self, config: pytest.Config, count: int) -> None:
        self.config, self.count = config, count
        self.pids: dict[Connection, int] = {}  # of processes that run, by what they send through
        self.running: dict[Connection, pytest.Item] = {}  # the tests that they run
        self.finished = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Fork the processes and report what they send."""
        if session.testsfailed and not self.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        groups = group_items(session.items)
        queue, write_end = os.pipe()
        # All at once: the pipe holds 65,536 bytes, and a process that reads a number takes that group.
        os.write(write_end, b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in range(len(groups))))
        os.close(write_end)
        self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all processes
        self.config.get_terminal_writer().flush()
        if capture := self.config.pluginmanager.getplugin("capturemanager"):
            capture.read_global_capture()  # else every process would print it
        for number in range(self.count):
            self._fork(session, number, queue, groups)
        try:
            while self.pids and not session.shouldfail:
                self._report(session)
        finally:
            self._end()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if self.finished < len(session.items):
            raise session.Interrupted(f"{len(session.items) - self.finished} tests were not finished")
        return True

    def _fork(self, session: pytest.Session, number: int, queue: int, groups: list[list[int]]) -> None:
        receiver, sender = Pipe(duplex=False)
        pid = os.fork()
        if pid:
            sender.close()
            self.pids[receiver] = pid
            return
        code = 1
        try:
            for other in (receiver, *self.pids):
                other.close()
            occupy_core(number)
            self._run(session, iterate_places(groups, queue), sender)
            code = 0
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)

    def _run(self, session: pytest.Session, places: Iterable[int], sender: Connection) -> None:
        """Run the tests that fall to this process."""
        manager = self.config.pluginmanager
        manager.unregister(self)
        manager.unregister(name="terminalreporter")
        manager.register(Sender(self.config, sender))
        if self.config.option.capture == "fd":
            capture_apart(manager.getplugin("capturemanager"))
        try:
            for place, following in pairwise(chain(places, (None,))):
                assert place is not None
                item, next_item = session.items[place], None if following is None else session.items[following]
                sender.send(("begin", place))
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
                sender.send(("end", place))
                if session.shouldfail or session.shouldstop:
                    break
        finally:
            session._setupstate.teardown_exact(None)  # of a test that was interrupted
        sender.send(("done", None))

    def _report(self, session: pytest.Session) -> None:
        """Pass on what the processes have sent, and tests whose process has ended.

        A pipe may be open in processes that a test has started and left: its end is no sign.
        """
        ready = wait([*self.pids], timeout=SECONDS)
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                self._receive(session, receiver, *receiver.recv())
            except (EOFError, OSError):
                self._forget(receiver)
        for receiver, pid in [*self.pids.items()] if not ready else ():
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and not receiver.poll():
                self._forget(receiver)

    def _receive(self, session: pytest.Session, receiver: Connection, kind: str, content: Any) -> None:
        hook = self.config.hook
        if kind == "begin":
            self.running[receiver] = session.items[content]
        elif kind == "end":
            del self.running[receiver]
            self.finished += 1
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self.config, data=content)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            self._forget(receiver)

    def _forget(self, receiver: Connection) -> None:
        """Wait for a process that has ended; the test that it ran has failed."""
        os.waitpid(self.pids.pop(receiver), 0)
        if item := self.running.pop(receiver, None):
            self.config.hook.pytest_runtest_logreport(report=make_crash_report(item))

    def _end(self) -> None:
        """Interrupt the processes that still run, which then end their fixtures."""
        for pid in self.pids.values():
            os.kill(pid, signal.SIGINT)
        end = time.monotonic() + SECONDS
        for pid in self.pids.values():
            while not os.waitpid(pid, os.WNOHANG)[0]:
                time.sleep(0.05)
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)


class Sender:
    """Sends reports and warnings of a process to the first one."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self.config, self.sender = config, sender

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        content = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.sender.send(("report", content))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        """Send a warning of a test; those of before the fork are known."""
        if when != "runtest":
            return
        content = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self.sender.send(("warning", content))


def iterate_places(groups: list[list[int]], queue: int) -> Iterator[int]:
    """Yield the places of the tests of one group of the queue after the other."""
    while number := os.read(queue, NUMBER_BYTES):
        yield from groups[int.from_bytes(number, "little")]


def capture_apart(capture: Any) -> None:
    """Write what is captured of this process into files of its own; the streams, which modules may hold, stay."""
    capture.resume_global_capture()
    for stream in (sys.stdout, sys.stderr):
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), stream.fileno())
    capture.suspend_global_capture()


def make_crash_report(item: pytest.Item) -> pytest.TestReport:
    """Return the report of a test whose process has ended."""
    text = f"the process that ran {item.nodeid} ended; run it alone to see why"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")


def occupy_core(number: int) -> None:
    """Keep to one core: processes that share all cores would wait for each other's threads most of the time.

    There, whoever gets a message waits until its sender waits. If it took the core at once, as is usual, a sum over
    four ranks would take four times as long (1.5 and 6.4 ms).
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
        with contextlib.suppress(OSError):  # not every sandbox lets a process choose
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
