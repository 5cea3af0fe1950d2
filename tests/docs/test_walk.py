"""The walk through one prediction: each function that the page names calls the next one, and the peak is near."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fivefold
from fivefold.cli import command_line
from fivefold.planner.predict import get_planner

Call = tuple[str, str]  # file and qualified name of a function

PACKAGE = Path(fivefold.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "explanation" / "how-a-step-costs" / "walk.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`: ", flags=re.MULTILINE)
COMMAND, BYTES, SECONDS = (ROW.findall(part) for part in PAGE.split("\n## ")[1:])
MAX_CALLS_TO_BYTES = 8  # below Planner.step


@pytest.fixture(scope="module")
def stacks() -> list[list[Call]]:
    """The calls of the package that are open at each call of a walk's last function, the outermost first."""
    ends, stacks = {BYTES[-1], SECONDS[-1]}, list[list[Call]]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and find_function(frame) in ends:
            stacks.append(open_calls(frame))

    (line,) = re.findall(r"^fivefold .*$", PAGE, flags=re.MULTILINE)
    get_planner.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", shlex.split(line))
        patch.setattr(command_line, "install_signal_handlers", lambda **_: None)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        sys.setprofile(note)
        try:
            with pytest.raises(SystemExit) as done:
                command_line.main()
        finally:
            sys.setprofile(None)
    assert not done.value.code
    return stacks


def find_function(frame: FrameType) -> Call | None:
    """Return the function of the package that a frame runs."""
    path = Path(frame.f_code.co_filename)
    return (path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname) if PACKAGE in path.parents else None


def open_calls(frame: FrameType | None) -> list[Call]:
    """Return the open calls of the package, without comprehensions and lambdas."""
    calls = []
    while frame is not None:
        call = find_function(frame)
        if call is not None and not frame.f_code.co_name.startswith("<"):
            calls.append(call)
        frame = frame.f_back
    return calls[::-1]


def list_outer_calls(calls: list[Call]) -> list[Call]:
    """Return the calls of functions that are not defined within others."""
    return [call for call in calls if "<locals>" not in call[1]]


@pytest.mark.slow
@pytest.mark.parametrize("walk", [BYTES, SECONDS], ids=["bytes", "seconds"])
def test_each_function_of_the_documented_call_chain_calls_the_next(stacks: list[list[Call]], walk: list[Call]) -> None:
    assert len(walk) > 1
    ways = {tuple(list_outer_calls(calls)) for calls in stacks if calls[-1] == walk[-1]}
    assert (*COMMAND, *walk) in ways


def test_few_calls_lead_from_a_step_to_the_bytes_of_an_operation(stacks: list[list[Call]]) -> None:
    step = next(call for call in COMMAND if call[1] == "Planner.step")
    ways = [calls for calls in stacks if calls[-1] == BYTES[-1]]
    assert ways
    assert max(len(calls) - calls.index(step) - 1 for calls in ways) <= MAX_CALLS_TO_BYTES
