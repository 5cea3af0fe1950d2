"""Decides where the rows of a sweep go, and how they are measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.sweeps.measure import Submit
    from fivefold.sweeps.sweep import Trials


def choose_default_path(file: Path) -> Path:
    """Return the default path for the rows of a sweep file."""
    return Path("runs/sweeps") / f"{file.stem}.jsonl"


def plan_trials(path: Path, *, steps: int, timeout: float, submit: Submit | None = None) -> Trials:
    """Return how the rows of ``path`` are measured: each in a folder next to it."""
    from fivefold.sweeps.sweep import Trials
    from fivefold.sweeps.trial import MIN_STEPS

    if steps < MIN_STEPS:
        raise UserError(f"--steps {steps} is too few to time one; use {MIN_STEPS} or more")
    folder = path.with_name(f"{path.name}.trials").absolute()
    return Trials(folder, steps=steps, timeout_seconds=timeout, submit=submit)
