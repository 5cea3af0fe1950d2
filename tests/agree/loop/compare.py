"""Compare the log of a run with that of the reference: the largest difference of any number in any line."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from typing import Any

from tests.agree.loop import reference
from tests.agree.loop.cases import Case, make
from tests.agree.loop.rank import train_rank
from tests.processes import run_forked

Values = dict[str, Any]
TOLERANCE = 1e-6  # relative; of a mean over 256 tokens and more in fp32, whose sums are made in other orders
KINDS = ("loss", "heldout_loss")


@lru_cache(maxsize=1)
def place() -> Path:
    """What all runs share, made once, and gone when this process ends."""
    folder, process = Path(tempfile.mkdtemp(prefix="loop-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder) if os.getpid() == process else None)
    run_forked(1, make, folder)
    return folder


@lru_cache(maxsize=64)
def _train_reference(run: str) -> list[Values]:
    lines: list[Values] = run_forked(1, reference.train, json.loads(run), place() / "data")[0]
    return lines


def get_reference_log(case: Case) -> list[Values]:
    """What the reference logs."""
    return _train_reference(json.dumps(case.run(place())))


def folder_of(path: Path) -> Path:
    """A run's folder with the shards in it."""
    path.mkdir()
    (path / "data").symlink_to(place() / "data")
    return path


def train_and_log(
    case: Case, folder: Path, sabotage: Callable[[], None] | None = None, stop_after: int | None = None
) -> list[Values]:
    """What the first rank of the real loop logs of steps and evaluations."""
    lines = run_forked(case.world, train_rank, case.run(place()), folder, sabotage, stop_after)[0]
    return [line for line in lines if any(kind in line for kind in KINDS)]


def distance(ours: list[Values], theirs: list[Values]) -> float:
    """The largest relative difference; infinite where a line is missing, or one too many."""
    wanted = {_key(line): line for line in theirs}
    if {_key(line) for line in ours} != wanted.keys():
        return inf
    return max(
        _relative_difference(line[name], value)
        for line in ours
        for name, value in wanted[_key(line)].items()
        if name != "step"
    )


def _key(line: Values) -> tuple[int, str]:
    return line["step"], next(kind for kind in KINDS if kind in line)


def _relative_difference(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs) if isfinite(ours) else inf
