"""Messages that name keyword arguments and functions of the Python API instead of options and commands.

    raise --gbs, or use --set offload=optimizer    raise gbs, or use offload=optimizer
    --risk 0.42 accepts 'dp8 zero3 mbs1'            risk=0.42 accepts 'dp8 zero3 mbs1'
    `fivefold models` lists all                     ff.models() lists all

Messages come from code that every interface calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from fivefold.record import UserError
from fivefold.requests.schema import Request

_SETTING = re.compile(r"--set (?=[a-z_.]+=)")
_FLAG = re.compile(r"(?<![\w-])--(exact)(?![\w-])")
_VALUE = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*) (?=\d)")
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")
_COMMAND = re.compile(r"(`?fivefold (?!models`|machines`|stacks`)[a-z]+ [^;`]*)")  # to type as it stands
_CATALOG = re.compile(r"`fivefold (models|machines|stacks)`")


def use_python_words(message: str) -> str:
    """Return a message with options and catalogs of the terminal as keyword arguments and functions."""
    if "--" not in message and "`" not in message:
        return message
    pieces = _COMMAND.split(message)
    return "".join(piece if index % 2 else _replace_options(piece) for index, piece in enumerate(pieces))


def _replace_options(message: str) -> str:
    message = _FLAG.sub(lambda match: f"{match[1]}=True", _SETTING.sub("", message))
    message = _VALUE.sub(lambda match: f"{match[1].replace('-', '_')}=", message)
    message = _OPTION.sub(lambda match: match[1].replace("-", "_"), message)
    return _CATALOG.sub(lambda match: f"ff.{match[1]}()", message)


def list_choices(schemas: tuple[type[Request], ...]) -> dict[str, tuple[str, ...]]:
    """Return the values of each argument that has only certain ones."""
    return {
        name: get_args(field.annotation)
        for schema in schemas
        for name, field in schema.model_fields.items()
        if get_origin(field.annotation) is Literal
    }


def check_choices(arguments: Mapping[str, Any], choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ``UserError`` for an argument that is not one of its values."""
    for name, value in arguments.items():
        if name in choices and value is not None and value not in choices[name]:
            raise UserError(f"{name}={value!r} is not one of {', '.join(map(repr, choices[name]))}")
