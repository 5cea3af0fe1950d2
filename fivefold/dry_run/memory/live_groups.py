"""Lists the largest groups of live storages at chosen moments of a tape, by module and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fivefold.dry_run.memory.breakdown import CATEGORIES, list_lifetimes
from fivefold.dry_run.record.tape import Tape


class LiveGroup(NamedTuple):
    """A group of live storages that one line of code has allocated in modules of one kind (``blocks.*.mlp``)."""

    bytes: int  # sum over the group
    number: int
    category: str
    module: str
    line: str  # file:line function


def list_live_groups(tape: Tape, event_indices: Sequence[int], *, n: int = 5) -> list[list[LiveGroup]]:
    """Return the ``n`` largest groups that are live after each of the events at ``event_indices``."""
    lives = list_lifetimes(tape)
    names = [
        (".".join("*" if part.isdigit() else part for part in site.module.split(".")), site.line) for site in tape.sites
    ]
    group_numbers: dict[tuple[int, str, str], int] = {}
    keys = (
        (category, *names[site]) for category, site in zip(lives.category.tolist(), lives.site.tolist(), strict=True)
    )
    group = np.array([group_numbers.setdefault(key, len(group_numbers)) for key in keys], dtype=np.int64)
    groups = list(group_numbers)
    groups_by_event = []
    for event in event_indices:
        is_live = (lives.birth <= event) & (lives.death > event)
        sizes = np.bincount(group[is_live], weights=lives.size[is_live], minlength=len(groups))
        counts = np.bincount(group[is_live], minlength=len(groups))
        largest = [i for i in np.argsort(-sizes, kind="stable")[:n].tolist() if sizes[i]]
        groups_by_event.append(
            [LiveGroup(int(sizes[i]), int(counts[i]), CATEGORIES[groups[i][0]], *groups[i][1:]) for i in largest]
        )
    return groups_by_event
