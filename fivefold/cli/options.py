"""What every command shares: the nouns as arguments and options, how they are loaded, and how is printed.

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.record import Mistake

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fivefold.job import Job
    from fivefold.machine.spec import Machine

ModelName = Annotated[str, typer.Argument(help="Catalog name, or path to a config.json, .toml or .json.")]
MachineName = Annotated[
    str, typer.Argument(help="NAME[:GPUS] such as h100:8 or 'l40s:16 nic=100Gbit/node', a .toml file, or local.")
]
LayoutText = Annotated[str, typer.Argument(help="Such as 'dp16 tp8 pp4 v2 zero1 mbs1 ac=selective'.")]
JobFile = Annotated[Path | None, typer.Option("--job", help="A .toml file of job fields.")]
Sequence = Annotated[int | None, typer.Option("--seq", help="Tokens per sequence.")]
GlobalBatch = Annotated[int | None, typer.Option("--gbs", help="Sequences per optimizer step.")]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, bf16, bf16-grad16, fp16, fp8, mxfp8, …")]
Attention = Annotated[
    Literal["flash", "flash2", "flash1", "unfused"] | None, typer.Option("--attention", help="Attention kernel.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other job field, such as loss=chunked, overlap=dp,pp or optimizer.kind=muon."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print data as JSON.")]


OPTIONS = {"sequence": "--seq", "global_batch": "--gbs", "precision": "--precision", "attention": "--attention"}


def load_job(path: Path | None, settings: list[str] | None = None, **options: Any) -> Job:
    """The job of a file, of options over it, and of ``--set`` over both; none of these two may say what another said.

    ``options``: job fields by name, None where the option was not given.
    """
    from fivefold.job import Job
    from fivefold.record import read_file

    values = read_file(path) if path else {}
    said = {key: OPTIONS[key] for key, value in options.items() if value is not None}
    values |= {key: value for key, value in options.items() if value is not None}
    for setting in settings or []:
        key = _put(values, setting)
        if key in said:
            raise Mistake(f"{said[key]} and --set {setting!r} both say {key}; keep one")
        said[key] = f"--set {setting!r}"
    return Job.read(values, origin=str(path) if path else "job")


def _put(values: dict[str, Any], setting: str) -> str:
    """Write ``FIELD=VALUE`` or ``TABLE.FIELD=VALUE`` into a job's ``values``; the field that was set."""
    key, equals, text = setting.partition("=")
    parents = key.split(".")
    last = parents.pop()
    if not equals or not all([*parents, last]):
        raise Mistake(f"--set {setting!r} is not FIELD=VALUE; write loss=chunked or optimizer.kind=muon")
    for parent in parents:
        within = values.setdefault(parent, {})
        if parent == "precision":  # a recipe may be named, or be the default, with some of its fields changed
            within = values[parent] = _recipe(within)
        if not isinstance(within, dict):
            raise Mistake(f"--set {setting!r}: {parent} is one value and has no field {last!r}")
        values = within
    values[last] = _value(key, text, setting=setting)
    return key


def _recipe(given: object) -> object:
    """A precision as a table: ``"bf16"`` → ``{"name": "bf16"}``; the default's if none is given."""
    from fivefold.job import Job

    if given == {}:
        given = Job.model_fields["precision"].default.name
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


def whole_numbers(text: str, *, option: str, of: str, such: str) -> tuple[int, ...]:
    """``0,3`` as numbers; a ``Mistake`` says which ``option`` is no list ``of`` them, and ``such`` as it may be."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 8 for word in words):
        raise Mistake(f"{option} {text!r} is not a list of {of}; write {such}")
    return tuple(int(word) for word in words)


def load_machine(text: str) -> Machine:
    """The machine that ``text`` names."""
    from fivefold.machine.catalog import resolve

    return resolve(text, local=local_file())


def local_file() -> Path:
    """The file that ``local`` means."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fivefold" / "local.toml"


def say(line: str) -> None:
    """To stderr."""
    print(line, file=sys.stderr)


def show(what: str | RenderableType) -> None:
    """Data, to stdout."""
    if isinstance(what, str):
        print(what)
        return
    from rich.console import Console

    Console().print(what)
