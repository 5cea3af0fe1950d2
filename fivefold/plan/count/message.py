"""One message of a step, and how often it is sent."""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """``times`` equal messages per step; ``payload`` is the full tensor in bytes, among the ranks of ``group``."""

    axis: str
    collective: str
    times: int
    payload: int
    ranks: int
    group: str = "shard"  # as in ``mesh.group``
