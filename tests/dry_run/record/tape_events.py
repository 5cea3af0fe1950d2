"""What a tape says, for comparing two tapes whose storages and handles have other numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold.dry_run.record.tape import ALLOC, FREE, KERNEL, SCOPE, START, WAIT, Tape


def list_events(tape: Tape) -> list[Any]:
    """What a tape says, its storages and handles named in order. When an elementwise kernel is written down depends on
    what follows it, so kernels stand apart, among the messages."""
    names: dict[tuple[str, int], int] = {}

    def name(kind: str, number: int) -> int:
        return names.setdefault((kind, number), len(names))

    def events() -> Iterator[Any]:
        for kind, first, second, third in tape:
            if kind == ALLOC:
                yield kind, name("storage", first), second, tape.sites[third]
            elif kind == FREE:
                yield kind, name("storage", first)
            elif kind == KERNEL:
                kernel = tape.kernels[first]
                yield kind, kernel._replace(site=0), tape.sites[kernel.site]
            elif kind == START:
                message = tape.messages[second]
                carried = names.get(("storage", third), -1)
                yield kind, name("handle", first), message._replace(site=0), tape.sites[message.site], carried
            elif kind == WAIT:
                yield kind, name("handle", first)
            else:
                assert kind == SCOPE
                yield kind, tape.scopes[first]

    result = list(events())
    kernels = [event for event in result if event[0] in (KERNEL, START, WAIT)]
    return [event for event in result if event[0] != KERNEL] + kernels
