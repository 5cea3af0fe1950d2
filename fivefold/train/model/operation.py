"""Blocks call every operation as ``module.run(name, function, *inputs)``, which activation recomputation replaces.

Names are those of ``plan/count``: norm1, attention.qkv, rope.q, attention.core, attention.out, mlp.gate_up, ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., Any]


def direct(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Call ``function``; autograd saves what it saves (no recomputation)."""
    return function(*inputs)
