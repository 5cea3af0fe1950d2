"""Finds the site of an operation: the model's module, and file and line of the code.

In a forward, module hooks tell which module runs. In a backward, it is the module whose forward created the running
autograd node: autograd numbers nodes in the order of their creation.
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

from fivefold.dry_run.record.tape import CodeSite

# AccumulateGrad nodes, which no module created, have higher numbers; they belong to the node that ran before
LEAF_NODE_NUMBER = 2**62
TORCH_FOLDER = str(Path(torch.__file__).parent)
DRY_RUN_FOLDER = str(Path(__file__).parents[1])
LIBRARY_FOLDERS = (TORCH_FOLDER, DRY_RUN_FOLDER)  # folders whose frames are never a site: torch, and the dry run itself
REPOSITORY_FOLDER = str(Path(__file__).parents[3]) + "/"


class CallSites:
    """A tracker of the running module, which names sites.

    ``categories``: memory category of the storages that a function allocates, by its qualified name.
    ``skipped_files``: files whose caller is the site.
    """

    def __init__(self, *, categories: Mapping[str, str], skipped_files: tuple[str, ...]) -> None:
        self._categories, self._skipped = categories, (*LIBRARY_FOLDERS, *skipped_files)
        self.module = self._last_backward_module = ""
        self._module_starts: tuple[list[int], list[str]] = ([0], [""])  # first autograd node number, module path
        self._lines: dict[tuple[CodeType, int], str] = {}

    @contextmanager
    def install_hooks(self, module: nn.Module) -> Iterator[None]:
        """Install forward hooks on all submodules of ``module``, which track the one that runs."""
        hooks = []
        for path, submodule in module.named_modules():
            if path:
                stack: list[str] = []
                hooks.append(submodule.register_forward_pre_hook(self._enter_hook(path, stack), prepend=True))
                hooks.append(submodule.register_forward_hook(self._leave_hook(stack), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter_hook(self, path: str, stack: list[str]) -> Callable[..., None]:
        def enter(_module: object, _inputs: object) -> None:
            stack.append(self.module)
            self.enter(path)

        return enter

    def _leave_hook(self, stack: list[str]) -> Callable[..., None]:
        def leave(_module: object, _inputs: object, _output: object) -> None:
            self.enter(stack.pop())

        return leave

    def enter(self, path: str = "") -> None:
        """Set ``path`` as the running module, from the next autograd node on."""
        self.module = path
        numbers, paths = self._module_starts
        number = torch._C._autograd._get_sequence_nr()
        if numbers[-1] == number:
            paths[-1] = path
        else:
            numbers.append(number)
            paths.append(path)

    def reenter(self) -> None:
        """Enter the running module again, after nodes of other modules were created in between."""
        self.enter(self.module)

    @contextmanager
    def enter_module(self, module: str) -> Iterator[None]:
        """Report ``module`` as the running module within."""
        previous, self.module = self.module, module
        try:
            yield
        finally:
            self.module = previous

    def find_frame(self) -> FrameType:
        """Return the innermost frame outside of torch, the dry run and ``skipped_files`` files."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(self._skipped):
            frame = frame.f_back
        return frame

    def site(self, func: Any, frame: FrameType) -> CodeSite:
        """Return the site of operation ``func`` called in ``frame``."""
        key = frame.f_code, frame.f_lineno
        line = self._lines.get(key)
        if line is None:
            file = frame.f_code.co_filename.removeprefix(REPOSITORY_FOLDER)
            line = self._lines[key] = f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
        return CodeSite(
            self.find_running_module(), line, func.name(), self._categories.get(frame.f_code.co_qualname, "")
        )

    def find_running_module(self) -> str:
        """Return the path of the running module, in forward or backward; "" if none."""
        node = torch._C._current_autograd_node()
        if node is None or self.module:  # recomputation runs through modules again
            return self.module
        self._last_backward_module = self.find_creating_module(node)
        return self._last_backward_module

    def find_creating_module(self, node: Any) -> str:
        """Return the module whose forward created an autograd node; for a leaf's node, that of the previous node."""
        number: int = node._sequence_nr()
        numbers, paths = self._module_starts
        return paths[bisect_right(numbers, number) - 1] if number < LEAF_NODE_NUMBER else self._last_backward_module
