"""Fivefold plans, rehearses, trains and proves the training step of a large language model.

    import fivefold as ff
    ff.predict("llama3-70b", "h100:512", "dp16 tp8 pp4 v2 zero1 mbs1", seq=8192, gbs=2048)

The verbs are those of the command line, with its words and defaults; each is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.version import __version__ as __version__

if TYPE_CHECKING:
    from fivefold.api.load import load
    from fivefold.api.training import train
    from fivefold.api.verbs import across, ask, compare, dryrun, playbook, predict, search, sweep, trace, walk
    from fivefold.api.verbs import playbook as plan
    from fivefold.api.watch import watch
    from fivefold.record import Fault, Mistake
    from fivefold.step import Step

_VERBS = ("across", "ask", "compare", "dryrun", "playbook", "predict", "search", "sweep", "trace", "walk")
__all__ = ["Fault", "Mistake", "Step", "ask", "compare", "dryrun", "load", "predict", "read_config", "search", "sweep"]
__all__ += ["across", "plan", "playbook", "trace", "train", "walk", "watch"]
_HOMES = dict.fromkeys((*_VERBS, "plan"), "fivefold.api.verbs")
_HOMES |= {"train": "fivefold.api.training", "watch": "fivefold.api.watch", "load": "fivefold.api.load"}
_HOMES |= {"read_config": "fivefold.api.configs"}
_HOMES |= {"Step": "fivefold.step", "Fault": "fivefold.record", "Mistake": "fivefold.record"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), {"plan": "playbook"}.get(name, name))


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
