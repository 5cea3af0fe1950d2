"""Where in the code an operation runs: module, file and line.

In the forward hooks tell which module runs. In the backward it is the one whose forward made the node that runs:
autograd numbers nodes in the order in which they are made.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from fivefold.check.dryrun.record.tape import Site

LEAF = 2**62  # nodes of leaves, which no module made, count from further up: they belong to the node before
TORCH, OWN = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
LIBRARY = (TORCH, OWN)  # who is called, and who watches
ROOT = str(Path(__file__).parents[4]) + "/"


class CallSites:
    """``categories`` of what is born in a function, by its qualified name; ``through``: files of which not they are
    the site but who calls them.
    """

    def __init__(self, *, categories: Mapping[str, str], through: tuple[str, ...]) -> None:
        self._categories, self._skipped = categories, (*LIBRARY, *through)
        self.module = self._back_in = ""
        self._since: tuple[list[int], list[str]] = ([0], [""])  # from which autograd node on which module ran
        self._lines: dict[tuple[CodeType, int], str] = {}

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow which module of ``module`` runs."""
        hooks = []
        for path, part in module.named_modules():
            if path:
                stack: list[str] = []
                hooks.append(part.register_forward_pre_hook(self._enters(path, stack), prepend=True))
                hooks.append(part.register_forward_hook(self._leaves(stack), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enters(self, path: str, stack: list[str]) -> Callable[..., None]:
        def enter(_module: object, _inputs: object) -> None:
            stack.append(self.module)
            self.enter(path)

        return enter

    def _leaves(self, stack: list[str]) -> Callable[..., None]:
        def leave(_module: object, _inputs: object, _output: object) -> None:
            self.enter(stack.pop())

        return leave

    def enter(self, path: str = "") -> None:
        """From here on this module runs."""
        self.module = path
        numbers, paths = self._since
        number = torch._C._autograd._get_sequence_nr()
        if numbers[-1] == number:
            paths[-1] = path
        else:
            numbers.append(number)
            paths.append(path)

    def enter_again(self) -> None:
        """The module that runs, which others have run beside."""
        self.enter(self.module)

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """As if ``module`` ran."""
        former, self.module = self.module, module
        try:
            yield
        finally:
            self.module = former

    def frame(self) -> FrameType:
        """The innermost that is not torch's or ours."""
        frame = sys._getframe(3)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(self._skipped):
            frame = frame.f_back
        return frame

    def site(self, func: Any, frame: FrameType) -> Site:
        """Of an operation."""
        key = frame.f_code, frame.f_lineno
        line = self._lines.get(key)
        if line is None:
            file = frame.f_code.co_filename.removeprefix(ROOT)
            line = self._lines[key] = f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
        return Site(self.where(), line, func.name(), self._categories.get(frame.f_code.co_qualname, ""))

    def where(self) -> str:
        """The module that runs."""
        node = torch._C._current_autograd_node()
        if node is None or self.module:  # what is recomputed runs through modules again
            return self.module
        self._back_in = self.maker(node)
        return self._back_in

    def maker(self, node: Any) -> str:
        """The module whose forward made a node; for a leaf the one whose node ran before."""
        number: int = node._sequence_nr()
        numbers, paths = self._since
        return paths[bisect_right(numbers, number) - 1] if number < LEAF else self._back_in
