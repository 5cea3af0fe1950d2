"""The options that say a job, written once: ``takes_job`` gives them to a command, which is called with the job.

--job FILE, then --stack --seq --gbs --precision --attention over it, then --set FIELD=VALUE for any other field.
"""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from fivefold.cli import completion
from fivefold.cli.options import Precision
from fivefold.record import Mistake

if TYPE_CHECKING:
    from fivefold.job import Job

FIELDS = {
    "stack": "stack",
    "seq": "sequence",
    "gbs": "global_batch",
    "precision": "precision",
    "attention": "attention",
}
OPTIONS: dict[str, Any] = {
    "job": Annotated[Path | None, typer.Option("--job", help="A .toml file of job fields.")],
    "stack": Annotated[
        str | None,
        typer.Option(
            "--stack",
            help="The software that runs it: fivefold, megatron-core, torchtitan, …",
            autocompletion=completion.stacks,
        ),
    ],
    "seq": Annotated[int | None, typer.Option("--seq", help="Tokens per sequence.")],
    "gbs": Annotated[int | None, typer.Option("--gbs", help="Sequences per optimizer step.")],
    "precision": Precision,
    "attention": Annotated[
        Literal["flash", "flash2", "flash1", "unfused"] | None, typer.Option("--attention", help="Attention kernel.")
    ],
    "settings": Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other job field, such as loss=chunked, overlap=dp,pp or optimizer.kind=muon."),
    ],
}


def takes_job(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the job's options in the place of its parameter ``job``, which gets the ``Job`` they say."""
    named = {name: text for name, text in command.__annotations__.items() if name not in ("job", "return")}
    hints = get_type_hints(SimpleNamespace(__annotations__=named), command.__globals__, include_extras=True)
    parameters: dict[str, inspect.Parameter] = {}
    for name, own in inspect.signature(command).parameters.items():
        if name != "job":
            parameters[name] = own.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        for option, kind in OPTIONS.items():
            parameters[option] = inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
            )

    @functools.wraps(command)
    def with_job(**values: Any) -> None:
        options = {name: values.pop(name) for name in OPTIONS}
        command(job=load_job(**options), **values)

    face: Any = with_job  # what typer reads of a function
    del face.__wrapped__
    face.__signature__ = inspect.Signature(list(parameters.values()))
    face.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return with_job


def load_job(
    job: Path | None = None, settings: list[str] | None = None, base: dict[str, Any] | None = None, **options: Any
) -> Job:
    """The job of a file, of options over it, and of ``--set`` over both; none of these two may say what another said.

    ``options``: by name as on the command line, None where the option was not given; ``base``: fields under all.
    """
    from fivefold.job import Job
    from fivefold.record import read_file

    values = (base or {}) | (read_file(job) if job else {})
    given = {FIELDS.get(name, name): (f"--{name}", value) for name, value in options.items() if value is not None}
    values |= {field: value for field, (_, value) in given.items()}
    said = {field: option for field, (option, _) in given.items()}
    for setting in settings or []:
        key = _put(values, setting)
        if key in said:
            raise Mistake(f"{said[key]} and --set {setting!r} both say {key}; keep one")
        said[key] = f"--set {setting!r}"
    return Job.read(values, origin=str(job) if job else "job")


def _put(values: dict[str, Any], setting: str) -> str:
    """Write ``FIELD=VALUE`` or ``TABLE.FIELD=VALUE`` into a job's ``values``; return the field that was set."""
    key, equals, text = setting.partition("=")
    parents = key.split(".")
    last = parents.pop()
    if not equals or not all([*parents, last]):
        raise Mistake(f"--set {setting!r} is not FIELD=VALUE; write loss=chunked or optimizer.kind=muon")
    for parent in parents:
        within = values.setdefault(parent, {})
        if parent in ("precision", "stack"):  # named, or the default, with some of its fields changed
            within = values[parent] = _table(within, parent)
        if not isinstance(within, dict):
            raise Mistake(f"--set {setting!r}: {parent} is one value and has no field {last!r}")
        values = within
    values[last] = _value(key, text, setting=setting)
    return key


def _table(given: object, field: str) -> object:
    """A named record as a table: ``"bf16"`` → ``{"name": "bf16"}``; the default's name if none is given."""
    from fivefold.job import Job

    if given == {}:
        given = Job.model_fields[field].default.name
    return {"name": given} if isinstance(given, str) else given


def _value(key: str, text: str, *, setting: str) -> Any:
    """The text of a job field; of a list its words, or all of it as in TOML: ``[{of="head", rate=0.1}]``."""
    from fivefold.job import Job
    from fivefold.record import holds_list

    if text[:1] in ("[", "{"):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise Mistake(f"--set {setting!r}: not a TOML value: {error}") from None
    if not holds_list(Job, key.split(".")):
        return text
    return [word.strip() for word in text.split(",") if word.strip()]
