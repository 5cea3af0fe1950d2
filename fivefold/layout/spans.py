"""A step laid out in time, as data: what each pipeline rank does when (spans), what lives on it meanwhile (levels).

    rank 0   F0.0  F0.1         BW0.0  BW0.1  reduce  update
    rank 1         F1.0  BW1.0  F1.1   BW1.1  reduce  update

Made by the planner or by a trace of a real run; drawn by ``show``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SpanKind = Literal["F", "B", "W", "BW", "FB", "reduce", "update"]


class Span(NamedTuple):
    """What a pipeline rank does from ``start`` to ``end``, in seconds from the start of the step.

    The last ``messages`` seconds are communication over ``axes`` that nothing hides; in truth it lies scattered
    between the operations of the span. Under ``FB`` the last two fields are the backward's, else -1.
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
    """Bytes that live on a rank at ``seconds``; between two levels they grow or shrink evenly."""

    seconds: float
    states_bytes: int  # weights and optimizer
    gradients_bytes: int
    activations_bytes: int  # kept for a backward, of all micro-batches in flight
    gathers_bytes: int  # weights that come and go, with the buffers in which they travel
    logits_bytes: int
    temporary_bytes: int
    cause: str = ""

    @property
    def live_bytes(self) -> int:
        """All of them."""
        return sum(self[1:7])
