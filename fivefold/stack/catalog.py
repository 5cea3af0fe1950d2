"""Named stacks: what each software does otherwise than ours, each fact with the file and commit where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fivefold.record import nearest
from fivefold.stack.spec import Stack

STACKS: Mapping[str, Stack] = MappingProxyType({"fivefold": Stack()})


def named(name: str) -> Stack:
    """The stack called ``name``."""
    if name not in STACKS:
        raise nearest(name, list(STACKS), kind="stack")
    return STACKS[name]
