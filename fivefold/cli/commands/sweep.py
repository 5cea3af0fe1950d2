"""``fivefold sweep``: many layouts of many models, machines and jobs, predicted and measured; rows and pictures."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.cli.options import print_line, show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import SweepOptions
from fivefold.requests.machines import find_local_machine_file
from fivefold.requests.sweep import choose_default_path, plan_trials

if TYPE_CHECKING:
    from fivefold.layout.spec import Layout
    from fivefold.machine.spec import Machine
    from fivefold.results.sweep_row import SweepRow
    from fivefold.trainer.run import Run


@accept_request(SweepOptions)
def sweep(request: SweepOptions) -> None:
    """Predict, and measure if asked, every combination of models, machines, ranks, layouts and jobs."""
    from fivefold.rendering.charts import check_folder
    from fivefold.rendering.progress import show_progress
    from fivefold.rendering.sweep import table
    from fivefold.sweeps import rows_file
    from fivefold.sweeps.journal import open_journal
    from fivefold.sweeps.spec import Sweep
    from fivefold.sweeps.sweep import SweepPlan, run

    plan = SweepPlan.from_sweep(Sweep.load(request.file), local=find_local_machine_file())
    charts = request.charts
    if request.dry:
        size = {"rows": plan.rows, "settings": len(plan.parts)}
        show(json_module.dumps(size) if request.as_json else _format_size(**size))
        return
    path = request.out or choose_default_path(request.file)
    rows_file.check(path)
    if charts is not None:
        check_folder(charts)
    with open_journal(path.with_name(f"{path.name}.journal")) as journal, show_progress("sweeping") as progress:
        submit = _submit if request.slurm else None
        measures = request.measure or request.slurm
        measurement = (
            plan_trials(path, steps=request.steps, timeout=request.timeout, submit=submit) if measures else None
        )
        rows = run(plan, journal, trials=measurement, report=progress, risk=request.risk)
        rows_file.write(rows, path)
        journal.drop("predicted")
    print_line(f"wrote {len(rows):,} rows to {path}")
    if charts is not None:
        _draw(rows, charts)
    show(
        json_module.dumps([row.model_dump() for row in rows], indent=2) if request.as_json else table.render_page(rows)
    )


def _format_size(*, rows: int, settings: int) -> str:
    return f"{rows:,} rows at most, of {settings:,} settings of model, machine, ranks and job"


def _submit(run: Run, file: Path, layout: Layout, machine: Machine) -> str:
    from fivefold.cli.slurm import submit

    return submit(run, path=file, layout=layout, machine=machine)


def _draw(rows: list[SweepRow], folder: Path) -> None:
    """Draw all pictures of a sweep into a folder, and print which were drawn."""
    from fivefold.rendering import charts
    from fivefold.rendering.sweep.charts import PICTURES

    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        chart = picture(rows)
        if isinstance(chart, str):
            print_line(f"not drawn: {name}, which {chart}")
        else:
            charts.save(chart, folder / f"{name}.svg")
            print_line(f"drew {folder / name}.svg")
