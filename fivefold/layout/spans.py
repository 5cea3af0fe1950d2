"""A step's timeline as data: what each pipeline rank runs when (spans), and its live bytes meanwhile (levels).

    rank 0   F0.0  F0.1         BW0.0  BW0.1  reduce  update
    rank 1         F1.0  BW1.0  F1.1   BW1.1  reduce  update

Made by the planner or from a trace of a real run; drawn by ``show``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SpanKind = Literal["F", "B", "W", "BW", "FB", "reduce", "update"]


class Span(NamedTuple):
    """What a pipeline rank runs from ``start`` to ``end``, in seconds from the start of the step.

    The last ``messages`` seconds are exposed communication over ``axes``; in truth it is spread over the operations of
    the span. The last two fields are the backward of an ``FB``, else -1.
    """

    kind: SpanKind
    name: str  # an action as the schedule writes it: F0.3 is stage 0, micro-batch 3
    start: float
    end: float
    messages: float = 0.0
    axes: tuple[str, ...] = ()
    stage: int = -1
    micro_batch: int = -1
    backward_stage: int = -1
    backward_micro_batch: int = -1


class Level(NamedTuple):
    """Live bytes of a rank at ``seconds``; interpolate linearly between two levels."""

    seconds: float
    states_bytes: int  # weights and optimizer
    gradients_bytes: int
    activations_bytes: int  # saved for the backward, of all live micro-batches
    gathers_bytes: int  # gathered weights that are released again, with their message buffers
    logits_bytes: int
    temporary_bytes: int
    cause: str = ""

    @property
    def live_bytes(self) -> int:
        """Sum of all kinds."""
        return sum(self[1:7])
