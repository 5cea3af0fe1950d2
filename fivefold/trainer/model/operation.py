"""The call of operations: blocks call each as ``module.run(name, function, *inputs)``, which recomputation replaces.

Names are those of ``planner/counts``: norm1, attention.qkv, rope.q, attention.core, attention.out, mlp.gate_up, ...
Functions that compiled code must not enter are marked with ``exclude_from_graphs``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Run = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def call_directly(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call ``function``; autograd saves tensors as usual (no recomputation)."""
    return function(*inputs)


def exclude_from_graphs(function: Function, *, recursive: bool = True) -> Function:
    """Return ``function`` under ``torch.compiler.disable``, without importing the compiler until it is needed.

    Importing it would take a second of a process's start.
    """
    disabled: Callable[..., Any] | None = None

    @wraps(function)
    def run(*inputs: Any, **options: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*inputs, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function, recursive=recursive)
        return disabled(*inputs, **options)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # the compiler checks it before it enters
    return cast(Function, run)


def take_all_rows(rows: Tensor) -> Tensor:
    """Return ``rows``, which are this rank's if it has the rows of all tokens."""
    return rows


def skip_wrappers() -> None:
    """Tell the compiler not to compile ``call_directly`` and the wrappers of ``exclude_from_graphs`` by themselves."""
    for function in (call_directly, exclude_from_graphs(call_directly)):  # all wrappers share one code object
        torch._dynamo.eval_frame.skip_code(function.__code__)
