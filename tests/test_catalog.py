"""Every model of the catalog through every command that answers questions of it, on a small and on a large machine.

Here with few layers on the small machine, and of the large one with few layouts; ``python -m tests.endure.catalog`` has
full models and all layouts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.cli.commands.report import drawing
from fivefold.dry_run import dryrun
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model, names
from fivefold.model.spec import Model
from fivefold.planner.compare import Case, compare
from fivefold.planner.predict import planner
from fivefold.planner.ratios import ratios
from fivefold.planner.search import search
from fivefold.rendering import report
from fivefold.requests.playbook import playbook
from tests.selection import one_in

SMALL, LARGE = (resolve(name, local=Path("/nowhere")) for name in ("h200:8", "h200:512"))
FEW = Where.parse("tp=1,8 cp=1 pp<=4 mbs=1 order=default zero=1 ac=full schedule=1f1b")
ONE = "dp=8 mbs=1 zero=3 ac=full order=default"


def shortened(model: Model) -> Model:
    """Return the model with at least one layer of each kind."""
    period = len(model.window_pattern)
    moe = model.moe and model.moe.replace(dense_layers=min(model.moe.dense_layers, 1))
    return model.replace(layers=min(model.layers, max(2, period)), moe=moe)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(4, names()))
def test_every_command_answers_for_every_model(name: str) -> None:
    whole, few = build_model(name), shortened(build_model(name))
    large = Job(sequence=min(whole.positions, 2048), global_batch=512)
    result = search(model=whole, machine=LARGE, job=large, where=FEW, within=0.01, top=2, levels=0)
    assert result.best, "no layout of the large machine fits"
    job = Job(sequence=64, global_batch=8)
    made = playbook(few, SMALL, job, batch="job", tokens=1e9, where=ONE)
    layout = Layout.parse(made.step.layout)
    step = planner(few, SMALL, job).step(layout)
    assert (made.step.memory, made.step.time) == (step.memory, step.time)
    cases = [Case(few, SMALL, layout, job), Case(few, SMALL, layout.replace(ac="none"), job)]
    assert [variant.error for variant in compare(cases).variants] == ["", ""]
    assert report.report_step(step, drawing(planner(few, SMALL, job), layout, step))
    assert ratios(few, machine=SMALL, job=job, layout=layout).axes
    rehearsed = dryrun(model=few, machine=SMALL, layout=layout, job=job)
    assert rehearsed.findings == ()
    assert rehearsed.step is not None
    assert rehearsed.step.work.parameters == step.work.parameters
    assert json.loads(rehearsed.step.model_dump_json())["layout"] == str(layout)
