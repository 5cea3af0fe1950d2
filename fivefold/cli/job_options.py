"""The options that say a job, written once: ``takes_job`` gives them to a command, which is called with the job.

--job FILE, then --stack --seq --gbs --precision --attention over it, then --set FIELD=VALUE for any other field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from fivefold.cli import completion
from fivefold.cli.options import Precision
from fivefold.requests.job import load_job

if TYPE_CHECKING:
    pass

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
