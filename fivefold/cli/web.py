"""The command web: the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import say
from fivefold.record import Mistake
from fivefold.requests.machines import local_file


def web(
    folder: Annotated[Path, typer.Argument(help="The folder whose runs and files the page may read.")] = Path(),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in the browser.")] = True,
) -> None:
    """The page: plan, search, compare, rehearse, and look at runs, in the browser; served on 127.0.0.1 alone."""
    try:
        from fivefold.web.serve import serve
    except ModuleNotFoundError as error:
        raise Mistake(f"the page needs the extra web ({error.name}): pip install 'fivefold[web]'") from None
    serve(folder, port=port, browser=browser, local=local_file(), say=say)
