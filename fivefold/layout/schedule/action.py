"""The actions of a pipeline rank: F forward, B gradient of the input (dx), W gradient of the weights (dW).

``BW`` is a full backward; ``FB`` a forward overlapped with the full backward of another micro-batch.
As text, ``F0.3`` is stage 0, micro-batch 3, and an overlap is ``F0.3+BW1.2``.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast

from fivefold.errors import UserError

Kind = Literal["F", "B", "W", "BW", "FB"]
PASSES = {"F": "forward", "BW": "backward", "B": "input gradients", "W": "weight gradients", "FB": "both passes"}


Part = tuple[str, int, int]  # ("F", "B" or "W", stage, micro-batch), which runs exactly once per step


class Action(NamedTuple):
    """One cell of a schedule table; the last two fields are for the backward of an ``FB``, else -1."""

    kind: Kind
    stage: int
    micro_batch: int
    backward_stage: int = -1
    backward_micro_batch: int = -1

    def __str__(self) -> str:
        if self.kind == "FB":
            return f"F{self.stage}.{self.micro_batch}+BW{self.backward_stage}.{self.backward_micro_batch}"
        return f"{self.kind}{self.stage}.{self.micro_batch}"


def format_part(part: Part) -> str:
    """Format a part as text, such as ``F0.3``."""
    kind, stage, micro_batch = part
    return f"{kind}{stage}.{micro_batch}"


def list_parts(action: Action) -> tuple[Part, ...]:
    """Return the parts of an action, in the order in which they run."""
    kind, stage, micro_batch, backward_stage, backward_micro_batch = action
    if kind == "BW":
        return ("B", stage, micro_batch), ("W", stage, micro_batch)
    if kind == "FB":
        backward = (backward_stage, backward_micro_batch)
        return ("F", stage, micro_batch), ("B", *backward), ("W", *backward)
    return ((kind, stage, micro_batch),)


def list_dependencies(action: Action, *, stages: int) -> tuple[Part, ...]:
    """Return the parts that must have run before an action starts.

    F needs F of the previous stage, B its own F and B of the next stage, W its own B.
    """
    kind, stage, micro_batch, backward_stage, backward_micro_batch = action
    if kind == "F":
        return (("F", stage - 1, micro_batch),) if stage else ()
    if kind == "W":
        return (("B", stage, micro_batch),)
    if kind == "FB":
        backward = Action("BW", backward_stage, backward_micro_batch)
        return list_dependencies(Action("F", stage, micro_batch), stages=stages) + list_dependencies(
            backward, stages=stages
        )
    later = (("B", stage + 1, micro_batch),) if stage + 1 < stages else ()
    return ("F", stage, micro_batch), *later


_TEXT = re.compile(r"(F|B|W|BW)(\d{1,6})\.(\d{1,6})|F(\d{1,6})\.(\d{1,6})\+BW(\d{1,6})\.(\d{1,6})", re.ASCII)


def parse(text: str) -> Action:
    """Parse an action as ``str`` prints it; a ``UserError`` shows the valid forms."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UserError(
            f"{text!r} is not an action; write F0.3 (stage 0, micro-batch 3), B0.3, W0.3, BW0.3 or F0.3+BW1.2"
        )
    kind, *numbers = match.groups()
    if kind is None:
        return Action("FB", *map(int, numbers[2:]))
    return Action(cast(Kind, kind), int(numbers[0]), int(numbers[1]))
