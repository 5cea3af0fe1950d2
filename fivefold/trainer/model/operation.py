"""Blocks call every operation as ``module.run(name, function, *inputs)``, which activation recomputation replaces.

Names are those of ``planner/counts``: norm1, attention.qkv, rope.q, attention.core, attention.out, mlp.gate_up, ...
What compiled code must not enter is ``outside_graphs``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

Run = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def direct(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call ``function``; autograd saves what it saves (no recomputation)."""
    return function(*inputs)


def outside_graphs(function: Function, *, recursive: bool = True) -> Function:
    """``torch.compiler.disable``, without loading the compiler, a second of a process's start, until it is needed."""
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def run(*inputs: Any, **options: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*inputs, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function, recursive=recursive)
        return disabled(*inputs, **options)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # what the compiler looks for before it enters
    return cast(Function, run)


def skip_wrappers() -> None:
    """Tell the compiler not to compile ``direct`` and what ``outside_graphs`` makes by themselves."""
    for function in (direct, outside_graphs(direct)):  # one code for all
        torch._dynamo.eval_frame.skip_code(function.__code__)
