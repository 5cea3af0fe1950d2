"""``fivefold schema``: the JSON schema of a command's JSON. Does not import torch, except for its own commands."""

from __future__ import annotations

import json

from fivefold.cli.options import show
from fivefold.cli.request_options import accept_request
from fivefold.requests.commands import SchemaOptions


@accept_request(SchemaOptions)
def schema(request: SchemaOptions) -> None:
    """Print the JSON schema (draft 2020-12) of what a command prints with --json.

    Its version changes when a program that reads the JSON would have to change.
    """
    from fivefold.requests.output_schemas import write_schema

    show(json.dumps(write_schema(request.of), indent=2))
