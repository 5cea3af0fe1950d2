"""Our run file: a model of the catalog by its name, another in a file beside; of the job what is not the default."""

from __future__ import annotations

from typing import Any

from fivefold.interop.format import Asked, Document, ParsedConfig, Plan, Written
from fivefold.interop.keys import Values
from fivefold.job import RECIPES, Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import spell_machine
from fivefold.machine.launch import torchrun_command
from fivefold.machine.toml import emit
from fivefold.model import catalog
from fivefold.record import Mistake, Record
from fivefold.results.reading import Reading, Said

FOLDER = "runs"


def is_run_file(document: Document) -> bool:
    """Return whether a TOML file is a run file: a model by name, and a layout."""
    values = document.values
    return document.kind == "toml" and isinstance(values.get("model"), str) and isinstance(values.get("layout"), str)


def parse(document: Document, asked: Asked) -> ParsedConfig:
    """Return the run file as it is: its keys are fields of our own records, which check them."""
    return ParsedConfig(document, Values({}, {}, origin=document.origin, software="fivefold"), model=asked.model)


def to_job(config: ParsedConfig, asked: Asked) -> Reading:
    """Return model, layout and job: all of a run file is understood."""
    document, values = config.document, config.document.values
    if values["layout"] == "auto":
        raise Mistake(f"{document.origin}: its layout is auto, which `train` finds; write the layout that is wanted")
    beside = document.folder / str(values["model"])
    model = config.model or catalog.resolve(str(beside if beside.is_file() else values["model"]))
    layout = Layout.parse(str(values["layout"]))
    if asked.ranks and asked.ranks != layout.world:
        raise Mistake(f"{document.origin}: layout {str(layout)!r} has {layout.world} ranks, not {asked.ranks}")
    job = Job.read(dict(values.get("job", {})), origin=document.origin)
    said = tuple(Said(key=key, value=str(values[key]), means=key) for key in ("model", "layout"))
    return Reading(
        software="fivefold", version="", origin=document.origin, model=model, layout=layout, job=job,
        ranks=layout.world, understood=said,
    )  # fmt: skip


def changed(record: Record, usual: Record) -> dict[str, Any]:
    """Fields that differ from ``usual``, as TOML takes them."""
    found: dict[str, Any] = {}
    for name in type(record).model_fields:
        value, was = getattr(record, name), getattr(usual, name)
        if value == was or value is None:
            continue
        both = isinstance(value, Record) and isinstance(was, Record)
        found[name] = changed(value, was) if both else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value


def text(plan: Plan, *, model: str) -> str:
    """The run file."""
    job = changed(plan.job, Job())
    recipe = plan.job.precision
    if "precision" in job:
        job["precision"] = recipe.name if recipe == RECIPES.get(recipe.name) else _plain(recipe)
    values = {
        "model": model, "machine": machine(plan), "layout": str(plan.layout),
        "folder": f"{FOLDER}/{plan.model.name}",
        "job": {"sequence": plan.job.sequence, "global_batch": plan.job.global_batch} | job,
    }  # fmt: skip
    hosts, each = plan.hosts
    command = "fivefold train run.toml" if hosts == 1 else torchrun_command("run.toml", hosts=hosts, each=each)
    return f"# {command}: {plan.layout.world} ranks; [data] names your corpus\n" + emit(values)


def machine(plan: Plan) -> str:
    """The machine with as many ranks as the layout has; ``Mistake`` if none was named."""
    if not plan.machine:
        raise Mistake("on what machine? say --gpus h100:64")
    named = spell_machine(plan.machine)
    name, _, count = named.partition(":")
    return named if name.endswith(".toml") or " " in count else f"{name}:{plan.layout.world}"


def files(plan: Plan) -> dict[str, str]:
    """The run file, and the model's if it is not of the catalog."""
    known = plan.model.name in catalog.CATALOG and catalog.named(plan.model.name) == plan.model
    if known:
        return {"run.toml": text(plan, model=plan.model.name)}
    fields = plan.model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return {"run.toml": text(plan, model="model.toml"), "model.toml": emit(fields)}


def emit_run_file(plan: Plan) -> Written:
    """Return a run file."""
    return Written(files(plan))
