"""A command that refuses an option that is given twice, of which only the last would count."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperOption

from fivefold.record import UserError


class StrictCommand(TyperCommand):
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
