"""Fivefold plans, dry-runs, trains and verifies the training step of a large language model.

    import fivefold as ff
    ff.predict("llama3-70b", "h100:512", "dp16 tp8 pp4 v2 zero1 mbs1", seq=8192, gbs=2048)

The functions are the commands of the command line, with the same options and defaults. Each is imported when it is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.version import __version__ as __version__

if TYPE_CHECKING:
    from fivefold.api.functions import *  # noqa: F403
    from fivefold.api.load import load as load
    from fivefold.api.load import read_config as read_config
    from fivefold.api.training import train as train
    from fivefold.api.watch import watch as watch
    from fivefold.errors import RunFailure as RunFailure
    from fivefold.errors import UserError as UserError
    from fivefold.step import Step as Step

_VERBS = "fivefold.api.functions"  # all of its public names are names of this package
_HOMES = {"train": "fivefold.api.training", "watch": "fivefold.api.watch", "load": "fivefold.api.load"}
_HOMES |= {"read_config": "fivefold.api.load"}
_HOMES |= {"Step": "fivefold.step", "RunFailure": "fivefold.errors", "UserError": "fivefold.errors"}


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from importlib.util import find_spec

    if name == "__all__":
        return [*_HOMES, *import_module(_VERBS).__all__]
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_") and find_spec(f"fivefold.{name}") is None and name in import_module(_VERBS).__all__:
        return getattr(import_module(_VERBS), name)
    raise AttributeError(f"module 'fivefold' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *__getattr__("__all__")])
