"""The options that say a job, of its schema: ``takes_job`` gives them to a command, which is called with the job.

--job FILE, then --stack --seq --gbs --precision --attention over it, then --set FIELD=VALUE for any other field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_type_hints

from fivefold.cli.parameters import build_request, parameters_of
from fivefold.requests.commands import JobOptions
from fivefold.requests.job import load_job, words_of

OPTIONS: dict[str, Any] = {each.name: each.annotation for each in parameters_of(JobOptions)}


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
        request = build_request(JobOptions, {name: values.pop(name) for name in OPTIONS})
        command(job=load_job(**words_of(request)), **values)

    face: Any = with_job  # what typer reads of a function
    del face.__wrapped__
    face.__signature__ = inspect.Signature(list(parameters.values()))
    face.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return with_job
