"""Renames a checkpoint that is damaged, or after which the loss keeps spiking, so that the run resumes earlier.

step-00000012  →  step-00000012.damaged-1 or .doubted-1      and the run resumes from step-00000008
"""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.errors import UserError
from fivefold.trainer.checkpoint import checkpoint_folder as folder
from fivefold.trainer.checkpoint.checkpoint import run_on_all_ranks
from fivefold.trainer.parallel.mesh import Ranks


def quarantine_damaged(path: Path, *, ranks: Ranks) -> str | None:
    """Verify the files of ``path``; if damaged, rename it and return the reason in one line. Every rank calls it.

    ``None`` if it is intact, or is left for the user to decide: written by a newer version, or none comes before it.
    """
    errors = [line for line in run_on_all_ranks(lambda: _find_damage(path, ranks), ranks=ranks) if line]
    previous = folder.find_previous(path)
    run_on_all_ranks(lambda: None, ranks=ranks)  # barrier: all ranks have looked before rank 0 renames
    if not errors or previous is None:
        return None
    _rename(path, "damaged", ranks=ranks)
    return f"{errors[0].rpartition('; ')[0]}; set aside"


def _find_damage(path: Path, ranks: Ranks) -> str:
    """Verify this rank's share of the files; return the error in one line, or an empty string."""
    try:
        folder.verify(path, folder.read(path).files[ranks.rank :: ranks.world])
    except UserError as error:
        return "" if "written by a newer version" in str(error) else str(error)
    return ""


def skip_checkpoint(path: Path, *, ranks: Ranks) -> Path | None:
    """Rename the intact checkpoint ``path`` and return the one before it; every rank calls it.

    ``None``, and no rename, if there is none before it.
    """
    previous = run_on_all_ranks(lambda: folder.find_previous(path), ranks=ranks)[0]
    if previous is not None:
        _rename(path, "doubted", ranks=ranks)
    return previous


def _rename(path: Path, suffix: str, *, ranks: Ranks) -> None:
    def rename() -> None:
        number = 1
        while (target := path.with_name(f"{path.name}.{suffix}-{number}")).exists():
            number += 1
        os.rename(path, target)

    run_on_all_ranks(lambda: rename() if ranks.rank == 0 else None, ranks=ranks)
