"""Parse stacks of Python frames: the line of the user's code, and the phase of a training step.

Frames are ordered from the innermost outward. A line is named as ``file:line function``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LIBRARY = re.compile(
    r"(^|/)(torch|torchgen|torchvision|triton|contextlib\.py|threading\.py|runpy\.py|typing_extensions\.py|importlib)(/|$)"
    r"|^<"
)
OPTIMIZER = re.compile(r"(^|/)(optim|optimizers?)/|(^|/)\w*(optimizer|adamw?|muon)\.py$", re.IGNORECASE)
FSDP_GATHER = re.compile(r"all_gather|unshard|unsharded")
OPERATION = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")
PARAMETER_MAKERS = ("_apply", "to_empty", "load_state_dict", "reset_parameters", "_init_weights", "from_pretrained")
INIT = re.compile(r"(^|/)(nn/parameter|nn/init|nn/modules/(linear|sparse|normalization))\.py$")


class Frame(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{shorten_path(self.file)}:{self.line} {self.function}" if self.line else self.function


def parse_frames(raw: object) -> tuple[Frame, ...]:
    """Parse frames as PyTorch writes them, dictionaries of filename, line and name; invalid entries are skipped."""
    parsed = []
    for entry in raw if isinstance(raw, list | tuple) else ():
        if isinstance(entry, dict):
            line = entry.get("line", 0)
            number = line if isinstance(line, int) else int(line) if str(line).isdecimal() else 0
            parsed.append(Frame(str(entry.get("filename", "")), number, str(entry.get("name", ""))))
    return tuple(parsed)


def find_user_line(stack: Sequence[Frame]) -> str:
    """Return the innermost line outside of torch and Python; else the innermost that has a file; else ""."""
    frames_with_file = [frame for frame in stack if frame.line and frame.file.endswith((".py", ">"))]
    user_frames = [frame for frame in frames_with_file if not LIBRARY.search(shorten_path(frame.file))]
    return str(user_frames[0]) if user_frames else str(frames_with_file[0]) if frames_with_file else ""


def find_operation(stack: Sequence[Frame]) -> str:
    """Return torch's operation, where C++ frames or this engine's own snapshots state it."""
    for frame in stack:
        if frame.file == "torch":  # dry_run/memory/snapshot.py
            return (frame.function.partition("::")[2] or frame.function).partition(".")[0]  # without its overload
        if match := OPERATION.search(frame.function):
            return match[1]
    return ""


def find_phase(stack: Iterable[Frame]) -> str:
    """Return update, backward, gather, forward, made (a module's weights) or "": the first of them that a frame shows.

    A stack without frames belongs to the autograd engine's own threads, in which no Python runs: backward.
    """
    stack = tuple(stack)
    if not stack:
        return "backward"
    names = [frame.function.rpartition(".")[2] for frame in stack]
    if any(
        "distributed/fsdp" in frame.file and FSDP_GATHER.search(function)
        for frame, function in zip(stack, names, strict=True)
    ):
        return "gather"
    if any(OPTIMIZER.search(frame.file) for frame in stack):
        return "update"
    if any(_runs_backward(frame, name) for frame, name in zip(stack, names, strict=True)):
        return "backward"
    if any(name in ("forward", "_call_impl", "_wrapped_call_impl") for name in names):
        return "forward"
    is_made = any(name in PARAMETER_MAKERS for name in names) or any(INIT.search(frame.file) for frame in stack)
    return "made" if is_made else ""


def _runs_backward(frame: Frame, name: str) -> bool:
    return name in ("backward", "_engine_run_backward") or "torch::autograd::Engine" in frame.function


def shorten_path(file: str) -> str:
    """Shorten a path: from the package's name on, or relative to the current folder."""
    package = re.split(r"(?:site|dist)-packages/", file)[-1]
    return package.removeprefix(f"{Path.cwd()}/")


def parse_traceback(lines: Iterable[str]) -> tuple[Frame, ...]:
    """Return the frames of a Python traceback, the innermost first."""
    outermost_first = [
        Frame(match[1], int(match[2]), match[3])
        for line in lines
        if (match := re.search(r'File "([^"]+)", line (\d{1,9}), in (\S+)', line))
    ]
    return tuple(reversed(outermost_first))


def parse_size(value: Any) -> int:
    """Return a size in bytes as an integer; 0 if the value is not a positive integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
