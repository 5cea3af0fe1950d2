"""Tells what each block of a memory snapshot was: parameters, gradients, optimizer, activations, gathers, temporary.

    made in a forward, freed in a later phase → activations · in a backward, outlives it → gradients
    in an update, outlives it → optimizer · by a module that is made or moved, never freed → parameters · else temporary

The phases come from the stacks (``frames.phase``). A snapshot that names categories itself is believed: this engine's
own, and those of torch.cuda._memory_viz.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.diagnosis.explain.frames import Frame, phase

NOT_KNOWN = "not known"
GIVEN = {  # names of other writers
    "parameter": "parameters", "gradient": "gradients", "optimizer_state": "optimizer", "activation": "activations",
    "input": "inputs", "autograd_detail": "temporary", "unknown": "", "pipeline": "temporary", "widened": "temporary",
}  # fmt: skip
PASSES = ("forward", "backward", "update")


class Life(NamedTuple):
    """A block: the event that made it (-1: before the trace) and the one that freed it (None: not in the trace)."""

    birth: int
    death: int | None
    address: int
    bytes: int
    stack: tuple[Frame, ...]
    category: str  # as the snapshot says, often ""


class _Phases:
    """The phase of each allocation of the trace, and where the run of equal phases around it ends."""

    def __init__(self, lives: Sequence[Life]) -> None:
        known: dict[tuple[Frame, ...], str] = {}
        self.of = [known.setdefault(life.stack, phase(life.stack)) for life in lives]
        order = sorted((n for n, life in enumerate(lives) if life.birth >= 0), key=lambda n: lives[n].birth)
        self.next: dict[int, int | None] = {}  # by birth: the first allocation of another pass
        self.last: dict[int, int] = {}  # by birth: the last allocation of the same run
        upcoming: dict[str, int] = {}
        last: dict[str, int] = {}
        for number in reversed(order):
            here, at = self.of[number], lives[number].birth
            others = [place for name, place in upcoming.items() if name != here]
            self.next[at] = min(others, default=None)
            if here in PASSES:
                if self.next[at] is not None and last.get(here, at) > (self.next[at] or 0):
                    last.pop(here, None)
                upcoming[here] = at
            self.last[at] = last.setdefault(here, at)


def categories(lives: Sequence[Life]) -> list[str]:
    """The category of each block."""
    given = [GIVEN.get(life.category, life.category) for life in lives]
    if any(given):
        return [name or (NOT_KNOWN if life.birth < 0 else "temporary") for name, life in zip(given, lives, strict=True)]
    if not any(life.stack for life in lives):
        return [NOT_KNOWN] * len(lives)
    phases = _Phases(lives)
    made = zip(lives, phases.of, strict=True)
    weights = frozenset(life.bytes for life, made_in in made if made_in == "made" and life.death is None)
    return [_category(life, phases.of[number], phases, weights) for number, life in enumerate(lives)]


def _category(life: Life, made_in: str, phases: _Phases, weights: frozenset[int]) -> str:
    """``weights``: sizes of the parameters."""
    if made_in == "gather":
        return "gathers"
    if life.birth < 0:
        if not life.stack:
            return NOT_KNOWN
        lasting = {"update": "optimizer", "backward": "gradients", "made": "parameters", "forward": "activations"}
        return lasting.get(made_in, NOT_KNOWN)
    end, next_pass = life.death, phases.next[life.birth]
    outlives = next_pass is not None and (end is None or end > next_pass)
    if made_in == "forward":
        return "activations" if outlives or end is None else "temporary"
    if made_in == "backward":
        if end is None and not outlives:  # the trace ends within this backward
            return "gradients" if life.bytes in weights else "temporary"
        return "gradients" if outlives or (end or 0) > phases.last[life.birth] else "temporary"
    if made_in == "update":
        return "optimizer" if end is None or outlives else "temporary"
    if made_in == "made":
        return "parameters" if end is None or outlives else "temporary"
    return NOT_KNOWN if end is None else "inputs" if outlives else "temporary"
