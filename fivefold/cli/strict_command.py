"""Commands with plain help pages, which refuse an option given twice, as only the last would count."""

from __future__ import annotations

import re
from typing import Any

from typer.completion import install_callback, show_callback
from typer.core import TyperCommand, TyperGroup, TyperOption

from fivefold.record import UserError, make_unknown_name_error


class PlainCommand(TyperCommand):
    """A command whose help shows arguments in capitals, and flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, flags without a type."""
        return _drop_flag_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line; a config may replace the arguments of a command that takes ``--from``."""
        needed = {f"[{parameter.metavar}]" for parameter in self.params}  # unless a config or a setting gives them
        pieces = [
            piece[1:-1] if piece in needed else _spell_argument(piece) for piece in super().collect_usage_pieces(ctx)
        ]
        reads_config = "MODEL" in pieces and any("--from" in parameter.opts for parameter in self.params)
        return [*pieces, "| --from FILE --gpus MACHINE"] if reads_config else pieces


COMPLETION = {"--install-completion": install_callback, "--show-completion": show_callback}
SHELLS = ["bash", "zsh", "fish", "powershell", "pwsh"]  # that typer has scripts for


class PlainGroup(TyperGroup):
    """A group of commands whose help shows flags without a type; completion may name a shell."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options, flags without a type."""
        parameters = _drop_flag_types(super().get_params(ctx))
        for option in parameters:
            if COMPLETION.keys() & {*option.opts}:
                option.metavar = "[SHELL]"
                shells = f"for SHELL ({', '.join(SHELLS)}), or for the current one"
                option.help = (option.help or "").replace("for the current shell", shells)
        return parameters

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; with the name of a shell after an option of completion, which typer's flags ignore."""
        if len(args) > 1 and args[0] in COMPLETION:
            if args[1] not in SHELLS:
                raise make_unknown_name_error(args[1], SHELLS, kind="shell")
            option = next(option for option in self.params if args[0] in option.opts)
            COMPLETION[args[0]](ctx, option, args[1])
        return super().parse_args(ctx, args)


def _drop_flag_types(parameters: list[Any]) -> list[Any]:
    for option in parameters:
        if isinstance(option, TyperOption) and option.is_flag:
            option.metavar = ""
    return parameters


def _spell_argument(piece: str) -> str:
    """Return an argument of the usage line in capitals: ``{run}`` → ``RUN``, ``[word]`` → ``[WORD]``."""
    if match := re.fullmatch(r"\{(.+)\}(?:\.\.\.)?", piece):
        return match[1].upper() if match[1].isidentifier() else match[1]
    if match := re.fullmatch(r"\[\[?([^\[\]]+(?:\[[^\]]*\])?)\]?\](?:\.\.\.)?", piece):
        return f"[{match[1].upper() if match[1].isidentifier() else match[1]}]"
    return piece


class StrictCommand(PlainCommand):
    """A command whose options are given once, unless they take several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; raise ``UserError`` for an option that is repeated and not made for it."""
        words = args[: args.index("--")] if "--" in args else args
        names = {name for option in self.params for name in option.opts}
        for option in self.params:
            if not isinstance(option, TyperOption) or option.multiple or option.is_flag or option.nargs != 1:
                continue
            repeats = [word for word in words if word.partition("=")[0] in option.opts]
            if len(repeats) > 1:
                name = repeats[0].partition("=")[0]
                several = f", or {name}s with all values" if f"{name}s" in names else ""
                raise UserError(f"{name} is given {len(repeats)} times: give it once{several}")
        return super().parse_args(ctx, args)
