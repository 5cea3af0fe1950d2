"""Fivefold's run file: a model by its name in the catalog or in its own file, and the job's non-default values."""

from __future__ import annotations

from typing import Any

from fivefold.errors import UserError
from fivefold.interop.files import find_file
from fivefold.interop.format import ConfigPlan, Document, Overrides, ParsedConfig, WrittenConfig, resolve_world
from fivefold.interop.keys import Values, flatten, shorten_value
from fivefold.job import FORMAT_OBJECTIVES, RECIPES, Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import replace_ranks, spell_machine
from fivefold.machine.launch import format_torchrun_command
from fivefold.machine.toml import emit
from fivefold.model import catalog
from fivefold.results.reading import DataReading, ParsedKey, Reading

FOLDER = "runs"


def is_run_file(document: Document) -> bool:
    """Return whether a TOML file is a run file: a model by name, and a layout."""
    values = document.values
    return document.kind == "toml" and isinstance(values.get("model"), str) and isinstance(values.get("layout"), str)


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the run file unchanged: its keys are fields of our own records, which validate them."""
    return ParsedConfig(document, Values({}, {}, origin=document.origin, software="fivefold"), model=overrides.model)


def to_job(config: ParsedConfig, overrides: Overrides) -> Reading:
    """Return model, layout and job; all keys of a run file are understood."""
    document, values = config.document, config.document.values
    if values["layout"] == "auto":
        raise UserError(f"{document.origin}: its layout is auto, which only `train` resolves; write a layout")
    name = str(values["model"])
    model = config.model or catalog.resolve(str(find_file(document, name) or name), find=document.find)
    layout = Layout.parse(str(values["layout"]))
    resolve_world(document, overrides, stated=layout.world, where="its layout")
    job = Job.read(dict(values.get("job", {})), origin=document.origin)
    given = {key: values[key] for key in ("model", "layout")} | flatten(
        {"job": values.get("job", {})}, origin=document.origin
    )
    understood = tuple(ParsedKey(key=key, value=shorten_value(value), means=key) for key, value in given.items())
    return Reading(
        software="fivefold",
        version="",
        origin=document.origin,
        model=model,
        layout=layout,
        job=job,
        ranks=layout.world,
        data=_read_data(values.get("data")),
        understood=understood,
    )


def _read_data(table: Any) -> DataReading | None:
    """Return the table ``[data]``, which ``train`` validates."""
    if not isinstance(table, dict):
        return None
    return DataReading(fields={name: value for name, value in table.items() if isinstance(value, str | int | float)})


def format_run_file(plan: ConfigPlan, *, model: str) -> str:
    """Return the text of the run file."""
    plan = plan._replace(job=set_objective(plan))
    objective = plan.job.objective
    job, recipe = plan.job.dump_changes(), plan.job.precision
    if plan.job.documents != Job(objective=objective).documents:
        job["documents"] = plan.job.documents
    if "precision" in job:
        job["precision"] = recipe.name if recipe == RECIPES.get(recipe.name) else recipe.model_dump(mode="json")
    values = {
        "model": model,
        "machine": format_machine(plan),
        "layout": str(plan.layout),
        "folder": f"{FOLDER}/{plan.model.name}",
        "job": {"sequence": plan.job.sequence, "global_batch": plan.job.global_batch} | job,
        **({"data": dict(plan.data.fields)} if plan.data else {}),
    }
    hosts, gpus_per_node = plan.hosts
    command = (
        "fivefold train run.toml"
        if hosts == 1
        else format_torchrun_command("run.toml", hosts=hosts, ranks_per_host=gpus_per_node)
    )
    return f"# {command}: {plan.layout.world} ranks; [data] names your corpus\n" + emit(values)


def set_objective(plan: ConfigPlan) -> Job:
    """Return the job with the objective of the plan's data: samples one by one need no documents."""
    fields = plan.data.fields if plan.data else {}
    objective = FORMAT_OBJECTIVES[str(fields.get("format", "text"))]
    if objective == "pretrain":
        return plan.job
    separates = objective == "sft" and fields.get("packing") == "none"
    return plan.job.replace(objective=objective, documents="separate" if separates else plan.job.documents)


def format_machine(plan: ConfigPlan) -> str:
    """Return the machine with as many ranks as the layout has; raise ``UserError`` if none was named."""
    if not plan.machine:
        raise UserError("a run file needs a machine: add --gpus h100:64")
    spelled = spell_machine(plan.machine)
    is_file = spelled.partition(":")[0].endswith(".toml")
    return spelled if is_file else replace_ranks(spelled, plan.layout.world)


def build_files(plan: ConfigPlan) -> dict[str, str]:
    """Return the run file, and the model's file if the catalog does not have the model."""
    if name := catalog.find_name(plan.model):
        return {"run.toml": format_run_file(plan, model=name)}
    return {"run.toml": format_run_file(plan, model="model.toml"), "model.toml": emit(plan.model.dump_changes())}


def emit_run_file(plan: ConfigPlan) -> WrittenConfig:
    """Return the run file and the model's file."""
    return WrittenConfig(build_files(plan), plan.data.remarks if plan.data else ())
