"""Writes the man page of the command line, ``docs/reference/fivefold.1``, which the wheel installs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def write_man_page(commands: Iterable[tuple[str, Any]]) -> str:
    """Return the man page of these commands in roff, with every argument and option."""
    lines = [
        '.TH FIVEFOLD 1 "" "Fivefold" "User Commands"',
        ".SH NAME",
        r"fivefold \- plan, dry\-run, train and verify the training step of a large language model",
        ".SH SYNOPSIS",
        r".B fivefold",
        r"\fICOMMAND\fR [\fIARGUMENTS\fR] [\fIOPTIONS\fR]",
        ".SH DESCRIPTION",
        escape("Every command prints its answer to stdout and everything else to stderr. The commands are:"),
    ]
    for name, command in commands:
        lines += describe_command(name, command)
    lines += [
        ".SH EXIT STATUS",
        escape("0: success. 1: an error of the system. 2: an error of the user. Each is one line."),
        ".SH FILES",
        ".TP",
        r".I ~/.config/fivefold/config.toml",
        escape("The user's settings, which fivefold config writes (in $XDG_CONFIG_HOME, if that is set)."),
        ".SH EXAMPLES",
        ".nf",
        escape("fivefold predict llama3-8b h100:8 'dp8 zero3 mbs1' --seq 8192 --gbs 64"),
        escape("fivefold search llama3-70b h100:512 --seq 8192 --gbs 2048 --stack torchtitan"),
        ".fi",
    ]
    return "\n".join(lines) + "\n"


def describe_command(name: str, command: Any) -> Iterator[str]:
    """Yield the lines of one command."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    words = [
        param.metavar or (param.name.upper() if param.required else f"[{param.name.upper()}]") for param in arguments
    ]
    yield f".SS fivefold {escape(' '.join([name, *words]))}"
    yield escape(" ".join((command.help or "").replace("``", "").split()))
    for argument, word in zip(arguments, words, strict=True):
        yield ".TP"
        yield rf"\fI{escape(word)}\fR"
        yield escape(" ".join((argument.help or "").split()))
    for option in sorted(command.params, key=lambda option: option.opts[0]):
        if option not in arguments and option.name != "help":
            yield ".TP"
            yield rf"\fB{escape(', '.join([*option.opts, *option.secondary_opts]))}\fR"
            yield escape(" ".join((option.help or "").split()))


def escape(text: str) -> str:
    """Return text as roff reads it: ASCII, no control line, and hyphens that can be searched and copied."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = "".join(letter if letter.isascii() else rf"\[u{ord(letter):04X}]" for letter in text)
    return rf"\&{text}" if text.startswith((".", "'")) else text
