"""The commands as one application of typer, and its run: every expected failure is one line."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, NoReturn

import typer
from typer import _completion_shared as completion_scripts
from typer.completion import install_callback, show_callback
from typer.core import TyperCommand, TyperGroup, TyperOption

from fivefold.cli.errors import find_launcher, print_warning, run_with_exit_code
from fivefold.errors import UserError
from fivefold.requests.commands import COMMANDS
from fivefold.spelling import make_unknown_name_error
from fivefold.trainer.faults.signals import install_signal_handlers
from fivefold.version import __version__

COMPLETION = {"--install-completion": install_callback, "--show-completion": show_callback}
ZSH_SCRIPT = """
#compdef %(prog_name)s

%(complete_func)s() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" %(autocomplete_var)s=complete_zsh %(prog_name)s)
}

compdef %(complete_func)s %(prog_name)s
[ "$funcstack[1]" = "_%(prog_name)s" ] && %(complete_func)s  # loaded by the first Tab, which it answers
"""
SHELLS = ["bash", "zsh", "fish", "powershell", "pwsh"]  # that typer has scripts for
SETTINGS = {"read": {"ignore_unknown_options": True}}  # its arguments are launch commands of other software


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Build the command line with the commands of ``names``, importing only their modules."""
    completion_scripts._completion_scripts["zsh"] = ZSH_SCRIPT  # that of typer completes from the second Tab on
    commands = typer.Typer(name="fivefold", cls=PlainGroup, pretty_exceptions_enable=False)
    commands.callback()(read_global_options)
    for name in names:
        module = f"{name}_" if iskeyword(name) else name
        command = getattr(import_module(f"fivefold.cli.commands.{module}"), module)
        panel = COMMANDS[name].panel
        example = f"Example: fivefold {COMMANDS[name].example}"
        shape = PlainCommand if name in SETTINGS else StrictCommand
        commands.command(name, cls=shape, context_settings=SETTINGS.get(name), rich_help_panel=panel, epilog=example)(
            command
        )
    return commands


def print_version(asked: bool) -> None:
    """Print the version of the package and exit."""
    if asked:
        print(f"fivefold {__version__}")
        raise typer.Exit


def read_global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print the version and end.")
    ] = False,
) -> None:
    """Plan, dry-run, train and verify the training step of a large language model."""


def main() -> NoReturn:
    """Run the command line; every expected failure is one line on stderr."""
    install_signal_handlers(launcher=find_launcher())
    warnings.showwarning = print_warning
    words = sys.argv[1:] or ["--help"]
    names = words[:1] if words[0] in COMMANDS else COMMANDS
    sys.exit(run_with_exit_code(lambda: build_app(names)(words, standalone_mode=False)))


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
        """Parse the arguments; raise ``UserError`` if an option that takes one value is given several times."""
        words = args[: args.index("--")] if "--" in args else args
        names = {name for option in self.params for name in option.opts}
        for option in self.params:
            if not isinstance(option, TyperOption) or option.multiple or option.is_flag or option.nargs != 1:
                continue
            repeats = [word for word in words if word.partition("=")[0] in option.opts]
            if len(repeats) > 1:
                name = repeats[0].partition("=")[0]
                several = f", or {name}s with all values, separated by commas" if f"{name}s" in names else ""
                raise UserError(f"{name} is given {len(repeats)} times: give it once{several}")
        return super().parse_args(ctx, args)
