"""Every model of the catalog through every command that answers questions of it, on a small and on a large machine.

Models that together have most features are searched on the large machine, where few layouts are tried, and
planned, compared, reported and dry-run on the small one, with few layers and few of many experts; ``make endure`` takes
the others. Those that together have most features are proposed a layout, too. ``python -m tests.endure.catalog`` has
full models and all layouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fivefold.cli.commands.report import draw_step
from fivefold.dry_run import dryrun
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.where import Where
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.model.published import CATALOG
from fivefold.model.spec import Model
from fivefold.planner.compare import ComparedCase, compare
from fivefold.planner.predict import get_planner
from fivefold.planner.ratios import compute_ratios
from fivefold.planner.search import search
from fivefold.record import Record
from fivefold.rendering import report
from fivefold.requests.playbook import build_playbook

SMALL, LARGE = (resolve(name, local=Path("/nowhere")) for name in ("h200:8 memory=512GiB", "h200:512"))
FEW = Where.parse("tp=1,8 cp=1 pp=2,4 ep=1,8,64 mbs=1 order=default zero=1 ac=full schedule=1f1b")
ONE = "dp=8 mbs=1 zero=2 ac=none order=default"
JOB = Job(sequence=64, global_batch=8)


PROPOSED = 10  # models that are proposed a layout
DRY_RUN = 5  # models that are dry-run: random jobs are dry-run and counted in tests/agree
FEWEST_NEW = 9  # features that a model adds to those before it: 10 models have 82 % of all, 42 would have all
MANY_EXPERTS = 128


def list_features(record: Record, prefix: str = "") -> Iterator[str]:
    """List what a model has: its fields with their values, of numbers whether they are zero."""
    for name in type(record).model_fields:
        value = getattr(record, name)
        if isinstance(value, Record):
            yield from list_features(value, f"{prefix}{name}.")
        elif name not in ("name", "source", "repository"):
            yield f"{prefix}{name}={value if value is None or isinstance(value, bool | str) else bool(value)}"


@cache
def cover_features() -> tuple[str, ...]:
    """Return models that together have nearly every feature of the catalog, those with most new ones first."""
    features = {name: set(list_features(build_model(name))) for name in CATALOG}
    missing, chosen = set[str]().union(*features.values()), list[str]()
    while True:
        richest = max(features, key=lambda name: len(features[name] & missing))
        if len(features[richest] & missing) < FEWEST_NEW:
            return tuple(chosen)
        chosen.append(richest)
        missing -= features[richest]


def list_models(ordinary: tuple[str, ...]) -> list[Any]:
    """List the models of the catalog for ``parametrize``: `make endure` takes those that are not ``ordinary``."""
    return [name if name in ordinary else pytest.param(name, marks=pytest.mark.long) for name in CATALOG]


MODELS = list_models(cover_features())


def shorten_model(model: Model) -> Model:
    """Return the model with at least one layer of each kind, and a quarter of its experts if it has many.

    Of a model whose last layers share keys, as many layers follow, which share those of the others.
    """
    slides = [model.has_window(layer) for layer in range(model.layers)]
    mixers = [model.mixer_name(layer) for layer in range(model.layers)]
    first_layers = [*map(slides.index, set(slides)), *map(mixers.index, {*mixers} - {"none"})]
    needed = 1 + max(first_layers)
    moe = model.moe and model.moe.replace(
        dense_layers=min(model.moe.dense_layers, 1),
        experts=model.moe.experts // (4 if model.moe.experts >= MANY_EXPERTS else 1),
    )
    shared = needed if model.shared_kv_layers else 0
    layers = min(model.layers, max(2, needed + shared))
    sparsity = model.gate_sparsity[:layers]
    return model.replace(layers=layers, moe=moe, shared_kv_layers=shared, gate_sparsity=sparsity)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_layout_of_a_large_machine_fits_every_model(name: str) -> None:
    model = build_model(name)
    large = Job(sequence=min(model.positions, 2048), global_batch=512)
    where = Where.parse(str(FEW).replace("pp=2,4", "pp=1")) if model.shared_kv_layers else FEW
    within = 0.01 if name in cover_features()[:PROPOSED] else None
    assert search(model=model, machine=LARGE, job=large, where=where, within=within, top=2, levels=0).best


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_planning_command_answers_for_every_model(name: str) -> None:
    few = shorten_model(build_model(name))
    made = build_playbook(few, SMALL, JOB, batch="job", tokens=1e9, where=ONE)
    layout = Layout.parse(made.step.layout)
    step = get_planner(few, SMALL, JOB).step(layout)
    assert (made.step.memory, made.step.time) == (step.memory, step.time)
    cases = [ComparedCase(few, SMALL, layout, JOB), ComparedCase(few, SMALL, layout.replace(ac="full"), JOB)]
    assert [variant.error for variant in compare(cases).variants] == ["", ""]
    assert report.report_step(step, draw_step(get_planner(few, SMALL, JOB), layout, step))
    assert compute_ratios(few, machine=SMALL, job=JOB, layout=layout).axes


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models(cover_features()[:DRY_RUN]))
def test_a_model_is_dry_run(name: str) -> None:
    few, layout = shorten_model(build_model(name)), Layout.parse("dp8 zero2 mbs1")
    result = dryrun(model=few, machine=SMALL, layout=layout, job=JOB)
    assert result.findings == ()
    assert result.step is not None
    assert result.step.work.parameters == get_planner(few, SMALL, JOB).step(layout).work.parameters
    assert json.loads(result.step.model_dump_json())["layout"] == str(layout)
