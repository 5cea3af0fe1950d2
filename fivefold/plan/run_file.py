"""The run file of a plan, as TOML that ``train`` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from fivefold.job import RECIPES, Job
from fivefold.layout.whole_run import WholeRun
from fivefold.stack.spec import FACTS

WARMUP = 2000  # steps of Llama 2 (arXiv:2307.09288 §2.2); of short runs a fiftieth


def for_run(job: Job, *, tokens: float) -> Job:
    """The job with the steps of ``tokens``, and a warm-up unless it says one."""
    steps = max(1, ceil(tokens / job.tokens_per_step))
    warmup = job.learning_rate.warmup_steps or min(WARMUP, steps // 50)
    return job.replace(steps=steps, learning_rate=job.learning_rate.replace(warmup_steps=min(warmup, steps)))


def text(job: Job, *, model: str, machine: str, layout: str, folder: str, run: WholeRun, command: str) -> str:
    """The file: what is trained on what and how, saved as often as loses the least, with the line that made it."""
    every = min(job.steps, max(1, round(run.interval_seconds / run.step_seconds)))
    top = {"model": model, "machine": machine, "layout": layout, "folder": folder}
    lines = [
        f"# {command}",
        f"# {run.seconds / 86400:.1f} days on {run.ranks} GPUs, {run.step_seconds:.3g} s a step",
        *(f"{key} = {_value(value)}" for key, value in top.items()), "", "[job]", *_job_lines(job),
        "", "[data]", 'corpus = "stdlib"  # a file or folder of your own',
        'tokenizer = "bytes"  # bpe:SIZE, or a tokenizer.json: of no more tokens than the model has',
        "", "[checkpoints]", f"every_steps = {every}  # {run.interval_seconds:.0f} s: what loses the least",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _job_lines(job: Job) -> Iterator[str]:
    """The fields in which a job differs from the default, tables last."""
    default, stack = Job(), job.stack
    values: dict[str, Any] = {"sequence": job.sequence, "global_batch": job.global_batch, "steps": job.steps}
    values["precision"] = _recipe(job)
    values["stack"] = stack.name
    changed = {
        name: getattr(stack, name) for name in FACTS if getattr(stack, name) != getattr(_usual(stack.name), name)
    }
    own = {
        name: getattr(job, name) for name in Job.model_fields
        if name not in (*values, "stack") and getattr(job, name) != getattr(default, name)
    }  # fmt: skip
    tables = {name: value.model_dump(mode="json") for name, value in own.items() if hasattr(value, "model_dump")}
    values |= changed | {name: value for name, value in own.items() if name not in tables}
    yield from (f"{key} = {_value(value)}" for key, value in values.items())
    for name, table in tables.items():
        usual = getattr(default, name)
        before = usual.model_dump(mode="json") if usual is not None else {}
        yield from ("", f"[job.{name}]")
        yield from (f"{key} = {_value(value)}" for key, value in table.items() if value != before.get(key))


def _recipe(job: Job) -> Any:
    wide = job.stack.reduce_in_fp32
    names = [name for name, each in RECIPES.items() if each.reduced(in_fp32=wide) == job.precision]
    return names[0] if names else job.precision.model_dump(mode="json")


def _usual(name: str) -> Any:
    from fivefold.stack.catalog import named

    return named(name)


def _value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in value.items() if each is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value)
