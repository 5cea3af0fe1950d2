"""What every command shares: the nouns as arguments and options, how they are loaded, and how is printed.

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.record import Mistake

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fivefold.job import Job
    from fivefold.machine.spec import Machine

ModelName = Annotated[str, typer.Argument(help="Catalog name, or path to a config.json, .toml or .json.")]
MachineName = Annotated[str, typer.Argument(help="NAME[:GPUS] such as h100:8, a .toml file, or local.")]
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


def load_job(path: Path | None, settings: list[str] | None = None, **options: Any) -> Job:
    """The job of a file, of ``--set`` and of options, the later ones counting."""
    from fivefold.job import Job
    from fivefold.record import read_file

    values = read_file(path) if path else {}
    for setting in settings or []:
        _put(values, setting)
    values |= {key: value for key, value in options.items() if value is not None}
    return Job.read(values, origin=str(path) if path else "job")


def _put(values: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise Mistake(f"--set {setting!r} is not FIELD=VALUE; write loss=chunked or optimizer.kind=muon")
    *parents, last = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    lists = last in ("overlap", "offload", "betas")
    values[last] = [word for word in text.split(",") if word] if lists else text


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
