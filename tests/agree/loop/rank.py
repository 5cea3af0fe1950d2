"""One process of a run: the real loop, as ``fivefold train`` starts it, which may be sabotaged first."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401  np.unique wants it; what is imported before a fork need not be after
import torch

import fivefold.layout.validity  # noqa: F401
from fivefold.layout.spec import Layout
from fivefold.model.catalog import resolve
from fivefold.text_files import read_lines
from fivefold.trainer.build import build
from fivefold.trainer.logs.run_log import Logs, NoLogs
from fivefold.trainer.loop import Loop
from fivefold.trainer.run import Run

Values = dict[str, Any]


def train_rank(
    values: Values, folder: Path, sabotage: Callable[[], None] | None = None, stop_after: int | None = None
) -> list[Values]:
    """The lines of the run's log; ``stop_after``: a signal comes when that step is logged."""
    gc.freeze()  # what the parent has is not looked through again, and so not copied
    if sabotage is not None:
        sabotage()
    run = Run.read(values | {"folder": str(folder)}, origin="run.toml")
    model, layout = resolve(run.model), Layout.parse(run.layout)
    shards = run.shards(model)
    built = build(model=model, layout=layout, job=run.job, device=torch.device("cpu"))
    loops: list[Loop] = []

    def report(line: Values) -> None:
        if line["step"] == stop_after and "loss" in line:
            loops[0].signal = "SIGTERM"

    with Logs(folder, report=report, run=run) if built.ranks.rank == 0 else NoLogs() as logs:
        loops.append(Loop(run, model=model, layout=layout, built=built, shards=shards, logs=logs, ideal_seconds=1.0))
        loops[0].train()
    return read_lines(folder / "log.jsonl") if built.ranks.rank == 0 else []
