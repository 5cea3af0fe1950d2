"""A kind of message of a step, and how often a rank takes part in it."""

from __future__ import annotations

from typing import NamedTuple


class RepeatedMessage(NamedTuple):
    """Equal messages of a step: ``times`` of them among the ``ranks`` of ``group``.

    ``payload``: the full tensor in bytes.
    """

    axis: str
    collective: str
    times: int
    payload: int
    ranks: int
    group: str = "shard"  # as in ``mesh.group``
