"""Locks the folder of a run and prepares its corpus there, for the commands that read or train."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.errors import find_launcher
from fivefold.cli.options import print_line

if TYPE_CHECKING:
    from fivefold.model.spec import Model
    from fivefold.trainer.data.shards import Index
    from fivefold.trainer.run import Run


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Lock the run's folder against other runs: the launcher locks it for its ranks, else rank 0 for all."""
    from fivefold.trainer.run_lock import hold

    is_owner = find_launcher() is None and os.environ.get("RANK", "0") == "0"
    return hold(folder, report=lambda line: print_line(f"fivefold: {line}")) if is_owner else nullcontext()


def prepare_corpus(run: Run, model: Model) -> Index:
    """Prepare the run's corpus as shards: enough for one step, and without tokens that ``model`` does not have."""
    from fivefold.trainer.data.prepare import prepare, show_progress

    with show_progress() as progress:
        index = prepare(
            run.data.corpus,
            tokenizer=run.data.tokenizer,
            directory=run.folder / "data",
            holdout=run.data.heldout,
            key=run.data.key or "text",
            samples=run.samples(),
            progress=progress,
        )
    run.shards(model)
    return index
