"""Model, layout and job -> the config of another software.

The written config is read back. If that gives another model, layout or job, an error names the field that differs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from fivefold.errors import UserError
from fivefold.interop.equivalence import fit_free_fields, resolve_adapter, resolve_rate
from fivefold.interop.format import ConfigFormat, ConfigPlan, Overrides, WrittenConfig
from fivefold.interop.launch.run_file import set_objective
from fivefold.interop.read import read
from fivefold.interop.registry import find_format
from fivefold.layout.names import Offloaded
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.layout.validity import refuse
from fivefold.model.huggingface.write import find_difference
from fivefold.model.spec import Model
from fivefold.record import find_first_difference, list_differences
from fivefold.results.reading import DataReading, Reading
from fivefold.stack.catalog import build_stack as stack_named

# Fields of a job that cost nothing, or that the software sets itself; differences in them are only remarks.
DATA_DEFAULTS = {"format": "text", "loss_on": "replies", "packing": "best-fit", "excess": "truncate"}  # of [data]
ASSUMED_JOB_FIELDS = ("emulate", "imbalance")
IGNORED_JOB_FIELDS = ("stack", "learning_rate", "seed", "steps", "documents", *ASSUMED_JOB_FIELDS)


def write(plan: ConfigPlan, *, to: str) -> WrittenConfig:
    """Write the plan as a config of ``to``; raise ``UserError`` for what ``to`` cannot run or cannot express."""
    form = find_format(to)
    assert form.emit is not None
    stack = form.choose_stack(plan) if form.choose_stack else form.stack
    if stack and plan.job.stack.name != stack:
        plan = plan._replace(job=plan.job.replace(stack=stack_named(stack)))
    if form.stack == "fivefold":
        plan = plan._replace(job=set_objective(plan))
    plan = plan._replace(layout=drop_default_stages(plan.layout, plan.model))
    if plan.layout.offload:  # in configs a setting of the job
        offloaded = {*plan.layout.offload, *plan.job.offload}
        job = plan.job.replace(offload=tuple(word for word in get_args(Offloaded) if word in offloaded))
        plan = plan._replace(layout=plan.layout.replace(offload=()), job=job)
    refuse(plan.layout, model=plan.model, job=plan.job)
    if stack and plan.layout.ac != plan.layout.recomputation:
        raise UserError(
            f"--to {form.name}: ac={plan.layout.ac}: {form.name} recomputes the same on every pipeline rank; "
            f"use ac={plan.layout.recomputation}"
        )
    files = form.emit(plan)
    if form.parse is None:
        return files
    read_back = _read_back(files, plan)
    return files._replace(remarks=(*files.remarks, *check(plan, read_back, form)))


def drop_default_stages(layout: Layout, model: Model) -> Layout:
    """Return the layout without ``stages`` if they equal the default division of layers."""
    if sum(layout.stages) != model.layers:
        return layout
    default_layout = layout.replace(stages=())
    return default_layout if tuple(map(len, list_stage_layers(model, default_layout))) == layout.stages else layout


def _read_back(written: WrittenConfig, plan: ConfigPlan) -> Reading:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in written.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        overrides = Overrides(ranks=plan.layout.world, ranks_per_node=plan.ranks_per_node)
        return read([str(Path(folder) / next(iter(written.files)))], overrides)


def check(plan: ConfigPlan, read_back: Reading, form: ConfigFormat) -> tuple[str, ...]:
    """Return remarks on differences at no cost; raise ``UserError`` for a difference that changes the cost.

    ``read_back``: the config as read back.
    """
    option = f"--to {form.name}"
    if read_back.model is None or read_back.layout is None or read_back.job is None:
        raise UserError(f"{option}: the config has no key for {'; '.join(read_back.missing)}; choose another format")
    if why := find_difference(read_back.model, fit_free_fields(plan.model, read_back.model)):
        raise UserError(
            f"{option}: the config cannot express model {plan.model.name!r}: read back, it has {why}; "
            "use another format"
        )
    if read_back.layout != plan.layout:
        raise UserError(
            f"{option}: the config cannot express layout {str(plan.layout)!r}; use the nearest, "
            f"{str(read_back.layout)!r}"
        )
    objectives = {plan.job.objective, read_back.job.objective}
    skipped = IGNORED_JOB_FIELDS if "dpo" in objectives else (*IGNORED_JOB_FIELDS, "objective")  # sft costs no more
    jobs = [
        job.replace(adapter=resolve_adapter(job.adapter, plan.model), optimizer=job.optimizer.reset_unused())
        for job in (read_back.job, plan.job)
    ]
    if why := find_first_difference(jobs[0], jobs[1], skip=skipped):
        raise UserError(f"{option}: the config cannot express the job: read back, it has {why}; use another format")
    remarks = list(describe_model(plan.model, read_back.model))
    if plan.model.rope_scaling != read_back.model.rope_scaling:
        written, wanted = (
            f"{scaling.kind} scaling" if (scaling := model.rope_scaling) else "no scaling"
            for model in (read_back.model, plan.model)
        )
        wanted = f"{wanted} with other numbers" if wanted == written else wanted
        remarks.append(f"the config's rotary embedding has {written}, that of {plan.model.name} {wanted} (same cost)")
    if plan.model.moe and read_back.model.moe and plan.model.moe.balance != read_back.model.moe.balance:
        remarks.append(f"experts are balanced by {read_back.model.moe.balance!r}, not by {plan.model.moe.balance!r}")
    rates = [resolve_rate(job.learning_rate, steps=job.steps) for job in (read_back.job, plan.job)]
    if differences := list(list_differences(rates[0], rates[1])):
        remarks.append(f"the learning rate is written with {', '.join(differences)}")
    if differences := list(list_differences(jobs[0], jobs[1], skip=("stack", "learning_rate", *ASSUMED_JOB_FIELDS))):
        remarks.append(f"the job is written with {', '.join(differences)} (same cost)")
    remarks += [
        f"{name}={getattr(plan.job, name)} is an assumption of predictions, for which the config has no key"
        for name in ASSUMED_JOB_FIELDS
        if getattr(plan.job, name) != getattr(read_back.job, name)
    ]
    remarks += describe_data(plan.data, read_back.data)
    if plan.data is None and form.sample_data:
        remarks.append(f"no data set is given, so it trains on {form.sample_data}: put yours there")
    recomputes = plan.layout.ac != "none"
    skipped_facts = ("runs",) if recomputes else ("runs", "early_stop")  # which ends a recomputation
    if differences := list(list_differences(read_back.job.stack, plan.job.stack, skip=skipped_facts)):
        way = next((" (--set early_stop=false predicts it)" for line in differences if "early_stop=False" in line), "")
        remarks.append(f"{form.name} {form.version} runs with {', '.join(differences)}{way}")
    return tuple(remarks)


def describe_model(model: Model, read_model: Model) -> Iterator[str]:
    """Yield a remark for each setting of training that is part of the model and that the config does not express."""
    if model.vision is not None and read_model.vision is None:
        yield "the vision tower is not written: the config has only the text model"
    if model.dropout_rates != read_model.dropout_rates:
        yield f"dropout is written as {read_model.dropout_rates}, not {model.dropout_rates}"
    if model.moe and read_model.moe and model.moe.capacity != read_model.moe.capacity:
        yield f"the capacity factor of experts is written as {read_model.moe.capacity}, not {model.moe.capacity}"


def describe_data(wanted: DataReading | None, written_data: DataReading | None) -> list[str]:
    """Return a remark for each field of the plan's data that the config expresses differently or not at all."""
    if wanted is None:
        return []
    fields = written_data.fields if written_data else {}
    return [
        f"data: {name} = {value!r} is " + (f"written as {fields[name]!r}" if name in fields else "not expressed")
        for name, value in wanted.fields.items()
        if fields.get(name, DATA_DEFAULTS.get(name)) != value
    ]
