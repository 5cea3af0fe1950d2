"""What lives when: at chosen moments of a tape the largest groups of storages, by module and line, as at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fivefold.dry_run.memory.breakdown import CATEGORIES, lifetimes
from fivefold.dry_run.record.tape import Tape


class Living(NamedTuple):
    """Storages that one line has allocated in modules of one kind (``blocks.*.mlp``), and that live at a moment."""

    bytes: int  # of all together
    number: int
    category: str
    module: str
    line: str  # file:line function


def living(tape: Tape, places: Sequence[int], *, n: int = 5) -> list[list[Living]]:
    """Return the ``n`` largest groups that live after each of the events at ``places``."""
    lives = lifetimes(tape)
    names = [(".".join("*" if word.isdigit() else word for word in site.module.split(".")), site.line)
             for site in tape.sites]  # fmt: skip
    known: dict[tuple[int, str, str], int] = {}
    keys = (
        (category, *names[site]) for category, site in zip(lives.category.tolist(), lives.site.tolist(), strict=True)
    )
    group = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
    groups = list(known)
    found = []
    for place in places:
        alive = (lives.birth <= place) & (lives.death > place)
        size = np.bincount(group[alive], weights=lives.size[alive], minlength=len(groups))
        number = np.bincount(group[alive], minlength=len(groups))
        largest = [at for at in np.argsort(-size, kind="stable")[:n].tolist() if size[at]]
        found.append([
            Living(int(size[at]), int(number[at]), CATEGORIES[groups[at][0]], *groups[at][1:]) for at in largest
        ])  # fmt: skip
    return found
