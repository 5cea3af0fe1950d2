"""Documents the parameters of a function of the Python API by the help texts of its request."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fivefold.requests.commands import JobOptions
from fivefold.requests.schema import Request, describe_fields

P = ParamSpec("P")
T = TypeVar("T")


def documented(*schemas: type[Request]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Add to a function's docstring the help text of each of its parameters, and of those of a job if it takes one."""

    def document(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        takes_job = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        names = {*parameters, *(JobOptions.model_fields if takes_job else ())} - {"set"}
        stated: tuple[type[Request], ...] = (JobOptions, *schemas)
        helps = {name: text for schema in stated for name, text in describe_fields(schema) if name in names}
        order = [*(name for name in parameters if name in helps), *(name for name in helps if name not in parameters)]
        lines = [f"    {name}: {helps[name]}" for name in order]
        lines += ["    Any other field of a job: such as loss='chunked' or optimizer={'kind': 'muon'}."] * takes_job
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Arguments:", *lines])
        return function

    return document
