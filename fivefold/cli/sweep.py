"""The command sweep: many layouts of many models, machines and jobs, predicted and measured; rows and pictures."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import AsJson, say, show
from fivefold.record import Mistake
from fivefold.requests.machines import local_file
from fivefold.requests.sweep import default_path, trials

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.results.sweep_row import Row
    from fivefold.trainer.run import Run


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep file (.toml).")],
    out: Annotated[
        Path | None, typer.Option(help="Where rows go: .parquet, .csv or .jsonl. Without it runs/sweeps/NAME.jsonl.")
    ] = None,
    charts: Annotated[Path | None, typer.Option(help="Draw what the sweep varies, as .svg, into this folder.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also run each row that fits for a few steps.")] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Measure by Slurm jobs: submit them, or collect what is done.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Steps of each measured run.")] = 8,
    timeout: Annotated[float, typer.Option(help="Seconds after which a measured run is ended.")] = 300.0,
    dry: Annotated[bool, typer.Option("--dry", help="Only say how many rows there would be.")] = False,
    json: AsJson = False,
) -> None:
    """Every combination of models, machines, ranks, layouts and jobs: a row each, predicted and measured."""
    from fivefold.rendering.progress import bar
    from fivefold.rendering.sweep import table
    from fivefold.sweeps import rows_file
    from fivefold.sweeps.journal import opened
    from fivefold.sweeps.spec import Sweep
    from fivefold.sweeps.sweep import Plan, run

    plan = Plan.of(Sweep.load(file), local=local_file())
    if dry:
        size = {"rows": plan.rows, "settings": len(plan.parts)}
        show(json_module.dumps(size) if json else _size(**size))
        return
    path = out or default_path(file)
    rows_file.check(path)
    if charts is not None and charts.exists() and not charts.is_dir():
        raise Mistake(f"--charts {charts}: is a file; name a folder")
    with opened(path.with_name(f"{path.name}.journal")) as journal, bar("sweeping") as progress:
        how = (
            trials(path, steps=steps, timeout=timeout, submit=_submit if slurm else None) if measure or slurm else None
        )
        rows = run(plan, journal, trials=how, report=progress)
        rows_file.write(rows, path)
        journal.drop("predicted")
    say(f"wrote {len(rows):,} rows to {path}")
    if charts is not None:
        _draw(rows, charts)
    show(json_module.dumps([row.model_dump() for row in rows], indent=2) if json else table.page(rows))


def _size(*, rows: int, settings: int) -> str:
    return f"{rows:,} rows at most, of {settings:,} settings of model, machine, ranks and job"


def _submit(run: Run, file: Path, layout: Layout, machine: Machine) -> str:
    from fivefold.cli.slurm import submit

    return submit(run, path=file, layout=layout, machine=machine)


def _draw(rows: list[Row], folder: Path) -> None:
    from fivefold.rendering import charts
    from fivefold.rendering.sweep.charts import PICTURES

    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        drawn = picture(rows)
        if isinstance(drawn, str):
            say(f"not drawn: {name}, which {drawn}")
        else:
            charts.save(drawn, folder / f"{name}.svg")
            say(f"drew {folder / name}.svg")
