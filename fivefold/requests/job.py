"""A job in the words of the command line: a file, then options over it, then ``FIELD=VALUE`` for any other field."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.record import Mistake
from fivefold.requests.commands import JobRequest

if TYPE_CHECKING:
    from fivefold.job import Job

FIELDS = {"seq": "sequence", "gbs": "global_batch"}  # of a job, by the words that say them


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


def get_job_words(request: JobRequest) -> dict[str, Any]:
    """Return what a request says of its job, as ``load_job`` takes it."""
    words = {name: getattr(request, name) for name in JobRequest.model_fields if name != "set"}
    return words | {"settings": list(request.set), "job": getattr(request, "job", None)}


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
