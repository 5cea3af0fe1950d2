"""Random command lines, legal and not: each ends within seconds, well or with one line that says what is wrong.

    python -m tests.endure.commands --inputs 5000 --seed 1

Run in this process through the command line's own ``main``, so that thousands take minutes. Allowed are the exit codes
of the documentation: 0, 2 (a mistake), 1 (a fault of the system), 3 (it would fail); never a traceback, a warning of
overflow, more seconds of this process than ``LIMIT_SECONDS``, a wait for what never comes, or an answer to another
question (``facts.py``). An input has a number: ``--only 17`` runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import math
import os
import resource
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import typer

from fivefold import bounded_file
from fivefold.cli import command_line
from fivefold.errors import StopSignal
from fivefold.requests.commands import COMMANDS
from tests.endure.facts import find_ignored
from tests.endure.files import folder
from tests.endure.stop_signals import end_at_stop_signal
from tests.endure.words import Draw

LIMIT_SECONDS = 10.0  # of this process's own time, whatever else the computer does
TICK_SECONDS = 2.0  # between two looks at whether it still computes
IDLE_TICKS = 10  # this number without any work, of its own or of its children, is a wait for what never comes
IDLE_SECONDS = 0.002  # of work in a tick
PIPE_SECONDS = 0.25  # for which a command waits for a pipe here; users wait longer
MEMORY_BYTES = 6 * 2**30


class TooLong(BaseException):
    """The time is up; no ``except Exception`` holds it."""


class Waits(BaseException):
    """Nothing has happened for long; no ``except Exception`` holds it."""


class Ended(NamedTuple):
    """How one input ended; ``wrong`` is empty if that is allowed."""

    number: int
    words: list[str]
    code: int
    seconds: float
    wrong: str

    def __str__(self) -> str:
        return f"{self.number}: fivefold {shlex.join(self.words)[:400]}\n    {self.wrong}"


def run(number: int, *, seed: int, limit: float = LIMIT_SECONDS) -> Ended:
    """One input in a folder of its own."""
    case = Draw(number, seed=seed).case()
    begin = time.process_time()
    with folder(case.files):
        code, out, err, wrong = answer(case.words, limit=limit)
        seconds = time.process_time() - begin
        wrong = wrong or judge(code, err) or (find_ignored(case.words, out) if code == 0 else "")
        if case.words[:1] == ["write"] and code == 0:
            wrong = wrong or read_back(case.words, limit=limit)
    return Ended(number, case.words, code, seconds, wrong)


def read_back(words: list[str], *, limit: float) -> str:
    """What is wrong with how each file that was written is read, for the model that it was written for and without."""
    models = [[], [word for option, word in pairwise(words) if option == "--model"]]
    ranks = Draw(0, seed=0).ranks_of(words[1])
    for file in sorted(path for path in Path("out").rglob("*") if path.is_file()):
        for model in models:
            reading = ["predict", *model, "--from", str(file), "--gpus", f"h100:{ranks or 8}"]
            code, _, err, wrong = answer(reading, limit=limit)
            if wrong := wrong or judge(code, err):
                return f"{shlex.join(reading)}: {wrong}"
    return ""


REMARK = ": keys without effect, as in transformers' "  # of a config's keys


def judge(code: int, err: str) -> str:
    """What is wrong with how a command ended."""
    if code not in (0, 1, 2, 3):
        return f"exit code {code}"
    if "Traceback" in err:
        return f"traceback: {err[-300:]}"
    if code not in (1, 2):
        return ""
    lines = [line for line in err.splitlines() if REMARK not in line]  # which are said besides
    told = [line for line in lines if line.startswith("fivefold: ")]
    if len(told) != 1 or lines[-1] != told[0]:
        return f"exit code {code} with {len(lines)} lines: {err[:300]!r}"
    if len(told[0]) > 1000:
        return f"a line of {len(told[0])} characters: {told[0][:300]!r}"
    words = ("Input should", "instance of", "pydantic", "validation error", "Value error", "Errno")
    return f"another library's words: {told[0][:300]!r}" if any(word in told[0] for word in words) else ""


def answer(words: list[str], *, limit: float) -> tuple[int, str, str, str]:
    """Exit code, stdout, stderr, and what it ended with that it must not."""
    out, err = io.StringIO(), io.StringIO()
    former = sys.argv, signal.getsignal(signal.SIGVTALRM)
    sys.argv = ["fivefold", *words]
    code, wrong = 0, ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            signal.signal(signal.SIGVTALRM, _raise_too_long)
            signal.signal(signal.SIGALRM, Idle())
            signal.setitimer(signal.ITIMER_VIRTUAL, limit)
            signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
            try:
                command_line.main()
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except TooLong:
        wrong = f"more than {limit:.0f} s: {_find_place()}"
    except Waits:
        wrong = f"waits for ever: {_find_place()}"
    except StopSignal:
        raise
    except BaseException:
        wrong = traceback.format_exc(limit=-4)
    finally:
        sys.argv = former[0]
        signal.signal(signal.SIGVTALRM, former[1])
    if (line := err.getvalue().rpartition("fivefold: stopped by ")[2]) != err.getvalue():  # a signal to this process
        raise StopSignal(line.partition(";")[0])
    return code, out.getvalue(), err.getvalue(), wrong


class Idle:
    """A handler of ticks that raises ``Waits`` when neither this process nor its children have worked for long."""

    def __init__(self) -> None:
        self.children: float | None = None  # most commands end before the first tick, and never pay for this look
        self.ticks, self.own = 0, 0.0

    def __call__(self, *_: object) -> None:
        begin, children = time.process_time(), _children_seconds()
        worked = math.inf if self.children is None else begin - self.own + children - self.children
        self.ticks = self.ticks + 1 if worked < IDLE_SECONDS else 0
        if self.ticks >= IDLE_TICKS:
            raise Waits
        self.children, self.own = children, time.process_time()  # without what this look has cost


def _children_seconds() -> float:
    """Return the seconds that children of this process have computed, those that still run included."""
    result = sum(os.times()[2:4])
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            result += (int(fields[11]) + int(fields[12])) / 100 if int(fields[1]) == os.getpid() else 0
    return result


def _raise_too_long(*_: object) -> None:
    raise TooLong


def _find_place() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    ours = [frame for frame in frames if "fivefold" in frame.filename]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in ours[-5:])


@contextlib.contextmanager
def isolate() -> Iterator[None]:
    """Without this computer's calibration and settings, and with the signals of the process as they were after it.

    A pipe without a writer is given up after ``PIPE_SECONDS``. The parsers of the commands are built once.
    """
    usual, bounded_file.PIPE_SECONDS = bounded_file.PIPE_SECONDS, PIPE_SECONDS
    build_app = command_line.build_app
    get_parser = functools.cache(lambda *names: typer.main.get_command(build_app(names)))
    command_line.build_app = lambda names=COMMANDS: get_parser(*names)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    places = {"XDG_CACHE_HOME": "/nowhere", "XDG_CONFIG_HOME": "settings"}
    former = {name: os.environ.get(name) for name in places}
    os.environ |= places
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # as a command says them, whatever the tests make of them
            yield
    finally:
        bounded_file.PIPE_SECONDS = usual
        command_line.build_app = build_app
        for name, value in former.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main() -> None:
    """Run them and print those that end badly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--commands", nargs="*", default=(), help="of these alone, such as predict ask")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, resource.RLIM_INFINITY))
    numbers = range(asked.first, asked.first + asked.inputs) if asked.only is None else [asked.only]
    bad, codes, slowest = 0, dict.fromkeys(range(4), 0), (0.0, 0)
    with end_at_stop_signal(), isolate():
        for number in numbers:
            if asked.commands and [*Draw(number, seed=asked.seed).case().words, ""][0] not in asked.commands:
                continue
            ended = run(number, seed=asked.seed)
            codes[ended.code] = codes.get(ended.code, 0) + 1
            slowest = max(slowest, (ended.seconds, number))
            if ended.wrong:
                bad += 1
                print(ended, flush=True)
    counts = ", ".join(f"{count} x {code}" for code, count in codes.items())
    print(
        f"{sum(codes.values())} inputs, exit codes {counts}; {bad} ended badly; "
        f"the slowest, {slowest[1]}, took {slowest[0]:.1f} s"
    )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
