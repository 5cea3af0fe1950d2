"""The help pages: their examples are commands that parse, and flags have no type."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer.main

from fivefold.cli.command_line import build_app
from fivefold.requests.commands import COMMANDS


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(build_app()).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_in_the_help_of_a_command_parses(name: str, commands: dict[str, Any]) -> None:
    word, *arguments = shlex.split(COMMANDS[name].example)
    assert word == name
    context = commands[name].make_context(name, arguments)
    assert f"Example: fivefold {COMMANDS[name].example}" in " ".join(commands[name].epilog.split())
    assert not context.args


def test_help_shows_flags_without_a_type_and_required_arguments_without_brackets(commands: dict[str, Any]) -> None:
    context = commands["predict"].make_context("predict", [], resilient_parsing=True)
    flags = [option for option in commands["predict"].get_params(context) if getattr(option, "is_flag", False)]
    assert {"--json", "--help"} <= {name for option in flags for name in option.opts}
    assert all(option.display_type_rich(context) == "" for option in flags)
    usage = " ".join(commands["predict"].collect_usage_pieces(context))
    assert usage == "[OPTIONS] MODEL MACHINE LAYOUT | --from FILE --gpus MACHINE"
    assert " ".join(commands["train"].collect_usage_pieces(context)) == "[OPTIONS] RUN"
