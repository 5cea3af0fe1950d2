"""Packages that are not in the base install, and the extra that installs each; a missing one is a one-line error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from fivefold.errors import UserError

EXTRAS = {
    **dict.fromkeys(("torch", "tokenizers", "safetensors", "tensorboard", "pyarrow"), "train"),
    **dict.fromkeys(("altair", "vl_convert"), "show"), "wandb": "wandb", "pandas": "pandas",
    **dict.fromkeys(("mcp", "anyio"), "mcp"),
    **dict.fromkeys(("fastapi", "uvicorn", "jinja2", "latex2mathml"), "web"),
}  # fmt: skip
P = ParamSpec("P")
T = TypeVar("T")


def describe_missing(error: ModuleNotFoundError) -> str | None:
    """Return the install command for a missing module; None if no extra of ours includes it."""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    return extra and f"this needs {error.name}, of the extra {extra}: pip install 'fivefold[{extra}]'"


def requires_extra(verb: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that a missing package of an extra raises ``UserError``."""

    @wraps(verb)
    def call(*args: P.args, **words: P.kwargs) -> T:
        try:
            return verb(*args, **words)
        except ModuleNotFoundError as error:
            if (line := describe_missing(error)) is None:
                raise
            raise UserError(line) from None

    return call
