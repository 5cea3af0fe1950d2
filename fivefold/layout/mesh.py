"""Where the ranks lie: the order of the mesh axes, and so which of them stay within a node.

Innermost (neighbouring ranks) to outermost: tp, cp, dp, pp. Tensor parallelism speaks most and sits nearest.
"""

from __future__ import annotations

from fivefold.layout.spec import Layout

AXES = ("pp", "dp", "cp", "tp")  # outermost first, as in torch's DeviceMesh


def span(layout: Layout, axis: str) -> int:
    """How many neighbouring ranks one group of ``axis`` reaches across, itself included."""
    inner = 1
    for name in reversed(AXES):
        if name == axis:
            return inner * int(getattr(layout, axis))
        inner *= int(getattr(layout, name))
    raise KeyError(axis)
