"""The command dryrun: a whole step of the real training code on one CPU, for any number of ranks, without a GPU.

A job that would fail is shown with what would go wrong first, and ends with exit code 3.
"""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.pictures import ChartFolder, OverTime, TraceFile
from fivefold.cli.words import (
    AsJson,
    Attention,
    GlobalBatch,
    JobFile,
    LayoutText,
    MachineName,
    ModelName,
    Precision,
    Sequence,
    Settings,
    load_job,
    load_machine,
    say,
    show,
)
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.check.dryrun import Rehearsal
    from fivefold.machine.spec import Machine
    from fivefold.step import Step

WOULD_FAIL = 3  # exit code

Ranks = Annotated[str | None, typer.Option("--ranks", help="Ranks for --trace and --snapshot, such as 0,3.")]


def dryrun(
    model: ModelName,
    machine: MachineName,
    layout: LayoutText,
    job: JobFile = None,
    seq: Sequence = None,
    gbs: GlobalBatch = None,
    precision: Precision = None,
    attention: Attention = None,
    settings: Settings = None,
    schedule: Annotated[Path | None, typer.Option(help="A pipeline schedule of one's own (.csv).")] = None,
    every_rank: Annotated[
        bool, typer.Option("--every-rank", help="Rehearse all ranks, not one of each pipeline rank.")
    ] = False,
    every_layer: Annotated[
        bool, typer.Option("--every-layer", help="Run all layers, and do not play one for those like it.")
    ] = False,
    ranks: Ranks = None,
    over_time: OverTime = False,
    charts: ChartFolder = None,
    trace: TraceFile = None,
    snapshot: Annotated[
        Path | None, typer.Option(help="Write the memory as PyTorch's memory viewer reads it (.pickle).")
    ] = None,
    json: AsJson = False,
) -> None:
    """Rehearse a step: the real training code on one CPU, for any number of ranks. Exit code 3 if it would fail."""
    from fivefold.check.dryrun import dryrun as run
    from fivefold.layout.spec import Layout, refuse
    from fivefold.model.catalog import resolve
    from fivefold.show.progress import bar
    from fivefold.train.run import Run

    chosen, spec, chips, asked = Layout.parse(layout), resolve(model), load_machine(machine), _ranks(ranks)
    task = load_job(job, settings, sequence=seq, global_batch=gbs, precision=precision, attention=attention)
    refuse(chosen, model=spec, job=task, machine=chips)
    table = Run(schedule=schedule, job=task).table(chosen)
    with bar("rehearsing") as progress:
        found = run(
            model=spec, machine=chips, layout=chosen, job=task, table=table, every_rank=every_rank,
            replay=not every_layer, ranks=asked, progress=lambda done, total: progress("ranks", done, total),
        )  # fmt: skip
    predicted = _predicted(spec, chips, chosen, task)
    _print(found, predicted, json=json)
    if found.step is not None:
        ...
    if found.findings:
        raise SystemExit(WOULD_FAIL)
