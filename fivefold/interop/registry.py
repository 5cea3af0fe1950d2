"""The formats that ``read`` recognizes and that ``write`` writes: the ``FORMATS`` of all folders that define them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from fivefold import interop
from fivefold.errors import UserError
from fivefold.interop.format import ConfigFormat
from fivefold.job import Job
from fivefold.spelling import make_unknown_name_error


def _list_formats() -> Iterator[ConfigFormat]:
    """Yield the formats of all folders, in the order of their names."""
    for module in iter_modules(interop.__path__):
        if module.ispkg:
            yield from getattr(import_module(f"{interop.__name__}.{module.name}"), "FORMATS", ())


FORMATS: tuple[ConfigFormat, ...] = tuple(sorted(_list_formats(), key=lambda form: form.order))


def list_written() -> list[str]:
    """Return the names of the formats that ``--to`` takes."""
    return [form.name for form in FORMATS if form.emit]


def find_format(name: str) -> ConfigFormat:
    """Return the format of a name that ``--to`` takes."""
    for form in FORMATS:
        if form.name == name and form.emit:
            return form
    raise make_unknown_name_error(name, list_written(), kind="format")


def list_job_formats(job: Job) -> list[ConfigFormat]:
    """Return the formats that are written, those of the job's stack first."""
    fine_tunes = job.adapter is not None or job.objective == "dpo"
    writable_formats = [form for form in FORMATS if form.emit]
    return sorted(
        writable_formats,
        key=lambda form: (
            not (fine_tunes and job.stack.name in form.fine_tuning_stacks),
            form.stack != job.stack.name,
            job.stack.name not in form.fine_tuning_stacks,
        ),
    )


def list_stack_formats(job: Job) -> list[str]:
    """Return the names of the formats of the configs of a job's stack, the usual one first."""
    stack = job.stack.name
    names = [form.name for form in list_job_formats(job) if form.is_of(stack)]
    if not names:
        known = ", ".join(dict.fromkeys(form.stack for form in FORMATS if form.stack))
        raise UserError(f"no config is written for stack {stack}; configs can be written for {known}")
    return names


def find_stack_format(job: Job) -> str:
    """Return the name of the usual format of the configs of a job's stack."""
    return list_stack_formats(job)[0]
