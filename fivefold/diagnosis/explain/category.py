"""Classify each block of a memory snapshot: parameters, gradients, optimizer, activations, gathers, temporary.

    made in a forward, freed in a later phase → activations · in a backward, outlives it → gradients
    in an update, outlives it → optimizer · by a module that is made or moved, never freed → parameters · else temporary

The phases come from the stacks (``frames.phase``). If a snapshot names categories itself, these are used: snapshots of
this engine, and those of torch.cuda._memory_viz.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fivefold.diagnosis.explain.frames import Frame, find_phase

NOT_KNOWN = "not known"
GIVEN = {  # names that snapshots of other writers use
    "parameter": "parameters",
    "gradient": "gradients",
    "optimizer_state": "optimizer",
    "activation": "activations",
    "input": "inputs",
    "autograd_detail": "temporary",
    "unknown": "",
    "pipeline": "temporary",
    "widened": "temporary",
}
PASSES = ("forward", "backward", "update")


class Life(NamedTuple):
    """A block: the events that allocated it (-1: before the trace) and freed it (None: not in the trace)."""

    birth: int
    death: int | None
    address: int
    bytes: int
    stack: tuple[Frame, ...]
    category: str  # as the snapshot states it, often ""


class _Phases:
    """The phase of each allocation of the trace, and the end of the run of equal phases around it."""

    def __init__(self, lives: Sequence[Life]) -> None:
        phase_by_stack: dict[tuple[Frame, ...], str] = {}
        self.of = [phase_by_stack.setdefault(life.stack, find_phase(life.stack)) for life in lives]
        order = sorted(
            (index for index, life in enumerate(lives) if life.birth >= 0), key=lambda index: lives[index].birth
        )
        self.next: dict[int, int | None] = {}  # by birth: the first allocation of another pass
        self.last: dict[int, int] = {}  # by birth: the last allocation of the same run
        next_of_phase: dict[str, int] = {}
        last_of_phase: dict[str, int] = {}
        for number in reversed(order):
            phase_here, birth = self.of[number], lives[number].birth
            other_events = [event for name, event in next_of_phase.items() if name != phase_here]
            self.next[birth] = min(other_events, default=None)
            if phase_here in PASSES:
                if self.next[birth] is not None and last_of_phase.get(phase_here, birth) > (self.next[birth] or 0):
                    last_of_phase.pop(phase_here, None)
                next_of_phase[phase_here] = birth
            self.last[birth] = last_of_phase.setdefault(phase_here, birth)


def classify_blocks(lives: Sequence[Life]) -> list[str]:
    """Return the category of each block."""
    given_categories = [GIVEN.get(life.category, life.category) for life in lives]
    if any(given_categories):
        return [
            name or (NOT_KNOWN if life.birth < 0 else "temporary")
            for name, life in zip(given_categories, lives, strict=True)
        ]
    if not any(life.stack for life in lives):
        return [NOT_KNOWN] * len(lives)
    phases = _Phases(lives)
    lives_and_phases = zip(lives, phases.of, strict=True)
    weights = frozenset(
        life.bytes for life, phase_name in lives_and_phases if phase_name == "made" and life.death is None
    )
    return [_classify_block(life, phases.of[number], phases, weights) for number, life in enumerate(lives)]


def _classify_block(life: Life, made_in: str, phases: _Phases, weights: frozenset[int]) -> str:
    """Return the category of one block. ``weights``: sizes of the parameters."""
    if made_in == "gather":
        return "gathers"
    if life.birth < 0:
        if not life.stack:
            return NOT_KNOWN
        category_by_phase = {
            "update": "optimizer",
            "backward": "gradients",
            "made": "parameters",
            "forward": "activations",
        }
        return category_by_phase.get(made_in, NOT_KNOWN)
    death, next_pass = life.death, phases.next[life.birth]
    outlives = next_pass is not None and (death is None or death > next_pass)
    if made_in == "forward":
        return "activations" if outlives or death is None else "temporary"
    if made_in == "backward":
        if death is None and not outlives:  # the trace ends within this backward
            return "gradients" if life.bytes in weights else "temporary"
        return "gradients" if outlives or (death or 0) > phases.last[life.birth] else "temporary"
    if made_in == "update":
        return "optimizer" if death is None or outlives else "temporary"
    if made_in == "made":
        return "parameters" if death is None or outlives else "temporary"
    return NOT_KNOWN if death is None else "inputs" if outlives else "temporary"
