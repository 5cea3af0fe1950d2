"""The newest checkpoint that is whole; one that was cut short or changed is set aside under a name of its own.

step-00000012  →  step-00000012.damaged-1      and the run goes on from step-00000008
"""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.record import Mistake
from fivefold.train import checkpoint_folder as folder
from fivefold.train.checkpoint import together
from fivefold.train.parallel.mesh import Ranks


def set_aside(path: Path, *, ranks: Ranks) -> str | None:
    """What is wrong with the files of ``path``, which then no longer counts; every rank calls it.

    ``None`` if nothing is, if a newer version wrote it, or if there is none before it: that is for the user to decide.
    """
    found = [line for line in together(lambda: _damage(path, ranks), ranks=ranks) if line]
    before = folder.way_out(path).startswith("remove")
    together(lambda: None, ranks=ranks)  # all have looked before the first renames
    if not found or not before:
        return None
    together(lambda: _rename(path) if ranks.rank == 0 else None, ranks=ranks)
    return f"{found[0].rpartition('; ')[0]}; set aside"


def _damage(path: Path, ranks: Ranks) -> str:
    """What this rank sees in its share of the files."""
    try:
        folder.verify(path, folder.read(path).files[ranks.rank :: ranks.world])
    except Mistake as error:
        return "" if "written by a newer version" in str(error) else str(error)
    return ""


def _rename(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, aside)
