"""Tests of a copy of the repository, each in a fork of one process that has imported the libraries that they need.

The package itself is imported by each fork, so that a file may change between two tests.
"""

from __future__ import annotations

import compileall
import importlib
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode

TEST_SECONDS = 600
LIBRARIES = ("torch", "numpy", "pydantic", "typer", "jinja2", "rich")  # none has a plugin of pytest, which rewrites it
LOG = "log_of_the_test.txt"


@contextmanager
def start_warm_tests(copy: Path) -> Iterator[Callable[[str], str]]:
    """Yield a function that runs a test of the copy and returns ``passes``, ``fails``, or how it ended otherwise.

    Compiled files are valid for the text that they were compiled from, whenever a file is written.
    """
    for name in ("fivefold", "tests"):
        compileall.compile_dir(copy / name, quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.endure.warm_tests"]
    with subprocess.Popen(
        words, cwd=copy, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin
        assert server.stdout
        requests, answers = server.stdin, server.stdout

        def run_test(test: str) -> str:
            print(f"tests/{test}", file=requests, flush=True)
            code = int(answers.readline())
            if code < 0:
                return "does not end"
            text = (copy / LOG).read_text(encoding="utf-8", errors="replace")
            return {0: "passes", 1: "fails"}.get(code, f"exit code {code}: {text[-300:]}")

        try:
            yield run_test
        finally:
            requests.close()


PASSED, NOTHING_RUN = 0, 5  # exit codes of pytest


def run_all_cases(test: str) -> int:
    """Run the cases of a test that ``make test`` runs, then those that are left to ``make endure``, until one fails."""
    codes = set[int]()
    for options in ((), ("--long",)):
        code = run_in_fork(test, *options)
        if code not in (PASSED, NOTHING_RUN):
            return code
        codes.add(code)
    return min(codes)


def run_in_fork(test: str, *options: str) -> int:
    """Run a test in a fork of this process; return the exit code of pytest, -1 if it does not end."""
    import pytest

    child = os.fork()
    if child == 0:
        os.setsid()
        with open(LOG, "wb") as log, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = 70  # of an error that pytest itself ends with
        try:
            code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--basetemp=tmp", *options, test]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    descriptor = os.pidfd_open(child)
    has_ended = bool(select.select([descriptor], [], [], TEST_SECONDS)[0])
    os.close(descriptor)
    if not has_ended:
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if has_ended else -1


def main() -> None:
    """Answer each line, the path of a test, with an exit code."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for line in sys.stdin:
        print(run_all_cases(line.strip()), flush=True)


if __name__ == "__main__":
    main()
