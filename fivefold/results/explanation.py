"""The explanation of a failed run, made by ``diagnosis/explain`` and printed by ``rendering/explanation.py``.

A verdict in one line, further findings, and by kind the memory that was held, the ranks that hung, or the losses.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.record import Record
from fivefold.results.search_result import Change
from fivefold.step import Step

Kind = Literal["out of memory", "memory snapshot", "flight recorder", "stacks", "losses", "timeout"]


class HeldLine(Record):
    """Memory that one line of code has allocated and that is still held, of one category."""

    category: str
    bytes: NonNegativeInt
    blocks: PositiveInt
    line: str  # file:line function; "" if the snapshot has no stacks
    operation: str = ""


class HeldMemory(Record):
    """Memory of a GPU at its peak, or when it ran out; None is what the file does not say."""

    device: str  # such as GPU 0
    parts: dict[str, NonNegativeInt]  # bytes by category, or by owner where only a message is known
    lines: tuple[HeldLine, ...] = ()  # the largest first
    held_bytes: NonNegativeInt  # in tensors
    reserved_bytes: NonNegativeInt | None = None
    capacity_bytes: NonNegativeInt | None = None
    free_bytes: NonNegativeInt | None = None  # of the device, as its driver says
    wanted_bytes: NonNegativeInt | None = None  # what was asked for and not found

    @property
    def needed_bytes(self) -> int:
        """Bytes of tensors, with what was asked for."""
        return self.held_bytes + (self.wanted_bytes or 0)


class RankAt(Record):
    """Where a rank is, or what became of a collective on it."""

    rank: str
    state: str
    line: str = ""


class LossEvent(Record):
    """Something that happened to the loss, from ``step`` to ``last``."""

    kind: Literal["not a number", "spike", "divergence", "plateau"]
    step: NonNegativeInt
    last: NonNegativeInt
    line: str


class Explanation(Record):
    """One thing that was found in ``files``."""

    kind: Kind
    files: tuple[str, ...]
    verdict: str
    findings: tuple[str, ...] = ()
    memory: HeldMemory | None = None
    ranks: tuple[RankAt, ...] = ()
    losses: tuple[LossEvent, ...] = ()


class Beside(Record):
    """A category of memory, as found and as predicted; None where one of them does not tell it apart."""

    part: str
    found_bytes: NonNegativeInt | None
    predicted_bytes: NonNegativeInt | None


class AgainstPrediction(Record):
    """The prediction beside what was found, and the least change that fits."""

    predicted: Step
    rows: tuple[Beside, ...]
    findings: tuple[str, ...]
    excess_bytes: int  # more than predicted; added to the memory of each change before it is said to fit
    room_bytes: NonNegativeInt
    change: Change | None = None  # the fastest single change that fits
    layout: str = ""  # where no single change fits: the layout that is proposed
    slower: NonNegativeFloat | None = None  # step time after the change over that before
