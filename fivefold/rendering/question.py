"""The line that begins every answer: the job's fields, and which of them are the defaults.

    llama3-8b on h100, 8 ranks · seq 8192, global batch 64, loss=chunked; defaults: bf16, AdamW, software fivefold

The terminal, HTML and the page print the same line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from fivefold.adapter import Adapter, parse_adapter
from fivefold.job import RECIPES, Job
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.optimizers.cost import find_cost
from fivefold.record import Record
from fivefold.stack.catalog import STACKS
from fivefold.stack.spec import FACTS
from fivefold.step import Step

NAMED = ("sequence", "global_batch", "precision", "stack")  # fields that the line writes without their name


class ShownField(NamedTuple):
    """A field of a job as text, and whether it has its default value."""

    field: str
    text: str
    default: bool = False


def describe_question(
    model: Model,
    machine: Machine,
    job: Job,
    *,
    open_fields: Collection[str] = (),
    stated: Collection[str] | None = None,
    batch_reason: str = "",
) -> str:
    """Return model, machine and job in one line, as ``describe_job`` does."""
    ranks = "" if "ranks" in open_fields else f", {count_ranks(machine.ranks)}"
    words = describe_job(job, open_fields=open_fields, stated=stated, batch_reason=batch_reason)
    return f"{model.name} on {machine.name}{ranks} · {words}"


def describe_step(step: Step, *, open_fields: Collection[str] = (), stated: Collection[str] | None = None) -> str:
    """Return the job of a step in one line; of a measured loop without a prediction only its software is known."""
    if not step.job:
        return f"software {step.stack}"
    return describe_job(Job.read(dict(step.job), origin="job"), open_fields=open_fields, stated=stated)


def describe_job(
    *jobs: Job, open_fields: Collection[str] = (), stated: Collection[str] | None = None, batch_reason: str = ""
) -> str:
    """Return what several jobs share in one line: first what was stated or is no default, then the defaults.

    ``open_fields``: fields to leave out, as the answer chooses them; ``stated``: fields that the user gave, if that is
    known. They are not listed as defaults even if they are equal to them; a batch that is not among them is one.
    ``batch_reason``: why the default batch is what it is.
    """
    first, *other_jobs = [list(_list_settings(job, stated, batch_reason)) for job in jobs]
    shared = [
        setting
        for setting in first
        if setting.field not in open_fields and all(setting in other_job for other_job in other_jobs)
    ]
    given = ", ".join(setting.text for setting in shared if not setting.default)
    defaults = ", ".join(setting.text for setting in shared if setting.default)
    return "; ".join(filter(None, (given, defaults and f"defaults: {defaults}")))


def count_ranks(ranks: int) -> str:
    """Return a number of ranks in words."""
    return f"{ranks:,} rank{'s' if ranks != 1 else ''}"


def _list_settings(job: Job, stated: Collection[str] | None, batch_reason: str) -> Iterator[ShownField]:
    for setting in _iterate_settings(job):
        is_batch = setting.field == "global_batch"
        if is_batch and batch_reason:
            setting = setting._replace(text=f"{setting.text} ({batch_reason})")
        is_assumed = setting.default or (is_batch and stated is not None)
        yield setting._replace(default=is_assumed and setting.field not in (stated or ()))


def _iterate_settings(job: Job) -> Iterator[ShownField]:
    """Yield the fields of a job that an answer shows, each with whether it is the default."""
    default_job, stack = Job(), job.stack
    optimizer = find_cost(job.optimizer.kind).title
    precision = RECIPES[default_job.precision.name].with_reduce_dtype(in_fp32=stack.reduce_in_fp32)
    yield ShownField("sequence", f"seq {job.sequence}", job.sequence == default_job.sequence)
    yield ShownField("global_batch", f"global batch {job.global_batch}", job.global_batch == default_job.global_batch)
    yield ShownField("precision", job.precision.name, job.precision == precision)
    for part, value in job.precision.list_changes().items():
        yield ShownField(f"precision.{part}", f"precision.{part}={spell_value(value)}")
    yield ShownField("optimizer.kind", optimizer, job.optimizer.kind == default_job.optimizer.kind)
    yield ShownField("stack", f"software {stack.name}", stack.name == default_job.stack.name)
    for name, text in list_changed_settings(job):
        if name != "optimizer.kind" and not _follows_from_machine(job, name):
            yield ShownField(name, f"{name}={text}")


def _follows_from_machine(job: Job, name: str) -> bool:
    """Return whether a fact of the software is what the planner assumes on a GPU or on a CPU by default."""
    if name not in FACTS:
        return False
    value = getattr(job.stack, name)
    known_stack = STACKS.get(job.stack.name, job.stack)
    on_cpu = {"attention": "blocks", "overlap": ()}  # the CPU's kernel supports one head dim; nothing overlaps compute
    return value == on_cpu.get(name) or value in [
        getattr(known_stack.with_device_kernels(gpu=gpu), name) for gpu in (True, False)
    ]


def list_changed_settings(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the fields of a job and of its software that differ from the default, as ``--set`` takes them."""
    default_job, known_stack = Job(), STACKS.get(job.stack.name, job.stack)
    for name in sorted(FACTS):
        if (value := getattr(job.stack, name)) != getattr(known_stack, name):
            yield name, spell_value(value)
    for name in (field for field in Job.model_fields if field not in NAMED):
        value, default = getattr(job, name), getattr(default_job, name)
        if value == default:
            continue
        if isinstance(value, Adapter):
            yield name, value.name
            value, default = value, Adapter.model_validate(parse_adapter(value.name))
        if isinstance(value, Record):
            for field in type(value).model_fields:
                if getattr(value, field) != getattr(default, field, None):
                    yield f"{name}.{field}", spell_value(getattr(value, field))
        else:
            yield name, spell_value(value)


def spell_value(value: object) -> str:
    """Return a value of a field as ``--set`` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(spell_value, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
