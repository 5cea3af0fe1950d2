"""Builds a job from the command line: a file, then options over it, then ``FIELD=VALUE`` for any other field."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.adapter import parse_adapter
from fivefold.errors import UserError
from fivefold.requests.commands import JobRequest

if TYPE_CHECKING:
    from fivefold.job import Job, Recipe

FIELDS = {"seq": "sequence", "gbs": "global_batch"}  # fields of a job by their short option
OPTIMIZER = "optimizer.kind"  # the field of --optimizer, which keeps the other settings of a file's optimizer
OPTION_FIELDS = FIELDS | {"optimizer": OPTIMIZER}


def load_job(
    job: Path | None = None, settings: list[str] | None = None, base: dict[str, Any] | None = None, **options: Any
) -> Job:
    """Build the job from a file, options that override it, and ``--set``, which overrides both.

    Raises ``UserError`` as ``collect_fields`` does, or if the job is not valid.
    """
    from fivefold.job import Job

    values = collect_fields(job, settings, base, **options)
    given = [(OPTION_FIELDS.get(name, name), f"--{name}") for name, value in options.items() if value is not None]
    given += [(key, f"--set {key}") for key in (setting.partition("=")[0] for setting in settings or [])]
    return Job.read(values, origin=str(job) if job else "job", options=dict(given))


def collect_fields(
    job: Path | None = None, settings: list[str] | None = None, base: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Return the fields that a file, options and ``--set`` give, before they are validated.

    Raises ``UserError`` if an option and ``--set``, or two of ``--set``, give the same field. ``options``: by name as
    on the command line, None where the option was not given; ``base``: fields that all of these override.
    """
    from fivefold.text_files import read_file

    file_values = read_file(job) if job else {}
    if isinstance(file_values.get("job"), dict):
        raise UserError(f"{job} has the table [job]; --job takes its fields without the table")
    values = (base or {}) | file_values
    given_options = {
        OPTION_FIELDS.get(name, name): (f"--{name}", value) for name, value in options.items() if value is not None
    }
    values |= {field: value for field, (_, value) in given_options.items() if field != OPTIMIZER}
    if OPTIMIZER in given_options:
        _put(values, f"{OPTIMIZER}={given_options[OPTIMIZER][1]}")
    source_by_field = {field: option for field, (option, _) in given_options.items()}
    for setting in settings or []:
        key = _put(values, setting)
        if key in source_by_field:
            raise UserError(f"{source_by_field[key]} and --set {setting!r} both set {key}; keep one")
        source_by_field[key] = f"--set {setting!r}"
    return values


def list_stated(
    job: Path | None = None, settings: list[str] | None = None, base: dict[str, Any] | None = None, **options: Any
) -> frozenset[str]:
    """Return the fields that a file, options and ``--set`` give, with those of tables as ``optimizer.kind``."""
    values = collect_fields(job, settings, base, **options)
    parts = (f"{key}.{part}" for key, value in values.items() if isinstance(value, dict) for part in value)
    return frozenset((*values, *parts))


def list_job_options(job: Job) -> list[tuple[str, str]]:
    """Return the options that turn the default job into ``job``."""
    from fivefold.job import RECIPES
    from fivefold.job import Job as Default
    from fivefold.rendering.question import list_changed_settings

    default_job, stack = Default(), job.stack
    options: list[tuple[str, str]] = [("--seq", str(job.sequence)), ("--gbs", str(job.global_batch))]
    if stack.name != default_job.stack.name:
        options.append(("--stack", stack.name))
    if job.precision != default_job.precision or not stack.reduce_in_fp32:
        named = {name: recipe.with_reduce_dtype(in_fp32=stack.reduce_in_fp32) for name, recipe in RECIPES.items()}
        name = min(named, key=lambda name: (named[name] != job.precision, len(list_other_parts(job, named[name]))))
        parts = list_other_parts(job, named[name])
        options += [("--precision", name), *(("--set", f"precision.{part}={text}") for part, text in parts.items())]
    if job.objective == "sft" and job.documents == default_job.documents:  # the default of sft is another
        options.append(("--set", f"documents={job.documents}"))
    for name, text in list_changed_settings(job):
        own_option = {"attention": "--attention", "optimizer.kind": "--optimizer"}.get(name)
        options.append((own_option, text) if own_option else ("--set", f"{name}={text}"))
    return options


def list_other_parts(job: Job, named: Recipe) -> dict[str, str]:
    """Return the parts of a job's precision that differ from those of a recipe, as ``--set`` takes them."""
    from fivefold.rendering.question import spell_value

    values = {part: getattr(job.precision, part) for part in type(named).model_fields if part != "name"}
    return {part: spell_value(value) for part, value in values.items() if value != getattr(named, part)}


def get_job_words(request: JobRequest) -> dict[str, Any]:
    """Return the job fields of a request, as ``load_job`` takes them."""
    words = {name: getattr(request, name) for name in JobRequest.model_fields if name != "set"}
    return words | {"settings": list(request.set), "job": getattr(request, "job", None)}


def _put(values: dict[str, Any], setting: str) -> str:
    """Write ``FIELD=VALUE`` or ``TABLE.FIELD=VALUE`` into a job's ``values``; return the field that was set."""
    key, equals, text = setting.partition("=")
    parents = key.split(".")
    last = parents.pop()
    if not equals or not all([*parents, last]):
        raise UserError(f"--set {setting!r} is not FIELD=VALUE; write loss=chunked or optimizer.kind=muon")
    for parent in parents:
        table = values.setdefault(parent, {})
        if parent == "adapter" and isinstance(table, str):
            table = values[parent] = parse_adapter(table)
        if parent == "optimizer" and isinstance(table, str):
            table = values[parent] = {"kind": table}
        if parent in ("precision", "stack"):  # a named record or the default, with some of its fields changed
            table = values[parent] = _convert_to_table(table, parent)
        if not isinstance(table, dict):
            raise UserError(f"--set {setting!r}: {parent} is one value and has no field {last!r}")
        values = table
    values[last] = _parse_value(key, text, setting=setting)
    return key


def _convert_to_table(given: object, field: str) -> object:
    """Return a named record as a table: ``"bf16"`` → ``{"name": "bf16"}``; the default's name if none is given."""
    from fivefold.job import Job

    if given == {}:
        given = Job.model_fields[field].default.name
    return {"name": given} if isinstance(given, str) else given


def _parse_value(key: str, text: str, *, setting: str) -> Any:
    """Return the value of a job field from text.

    A list is split at commas, or written as in TOML: ``[{of="head", rate=0.1}]``.
    """
    from fivefold.job import Job
    from fivefold.record import holds_list

    if text[:1] in ("[", "{"):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"--set {setting!r}: not a TOML value: {error}") from None
    if not holds_list(Job, key.split(".")):
        return text
    return [word.strip() for word in text.split(",") if word.strip()]
