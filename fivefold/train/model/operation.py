"""Every operation of a block runs through ``module.run(name, function, *inputs)``, so that recomputation can step in.

Names are those of ``plan/count``: norm1, attention.qkv, rope.q, attention.core, attention.out, mlp.gate_up, ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Run = Callable[..., Any]


def direct(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """Run it, and keep what autograd keeps."""
    return function(*inputs)
