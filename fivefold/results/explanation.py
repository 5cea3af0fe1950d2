"""The explanation of a failed run: ``diagnosis/explain`` builds it, ``rendering/explanation.py`` prints it.

It has a verdict in one line, further findings, and depending on the kind the memory held, the ranks that hung, or the
losses.
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.record import Record
from fivefold.results.search_result import Change
from fivefold.step import Step

Kind = Literal["out of memory", "memory snapshot", "flight recorder", "stacks", "losses", "timeout"]


class HeldLine(Record):
    """Memory of one category that one line of code allocated and that is still held."""

    category: str
    bytes: NonNegativeInt
    blocks: PositiveInt
    line: str  # file:line function; "" if the snapshot has no stacks
    operation: str = ""


class HeldMemory(Record):
    """Memory of a GPU at its peak, or when it ran out; None where the file does not state a value."""

    device: str  # such as GPU 0
    parts: dict[str, NonNegativeInt]  # bytes by category, or by owner where only a message is known
    lines: tuple[HeldLine, ...] = ()  # the largest first
    held_bytes: NonNegativeInt  # in tensors
    reserved_bytes: NonNegativeInt | None = None
    capacity_bytes: NonNegativeInt | None = None
    free_bytes: NonNegativeInt | None = None  # free on the device, as reported by its driver
    requested_bytes: NonNegativeInt | None = None  # the allocation that failed

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of tensors plus the allocation that failed."""
        return self.held_bytes + (self.requested_bytes or 0)


class RankAt(Record):
    """The place in the code where a rank is, or the state of a collective on it."""

    rank: str
    state: str
    line: str = ""


class LossEvent(Record):
    """An event in the loss curve, from ``step`` to ``last``."""

    kind: Literal["not a number", "spike", "divergence", "plateau"]
    step: NonNegativeInt
    last: NonNegativeInt
    line: str


class Explanation(Record):
    """One finding of the analysis, with the ``files`` it came from."""

    kind: Kind
    files: tuple[str, ...]
    verdict: str
    findings: tuple[str, ...] = ()
    change: str = ""  # the change to make for the most likely cause; "" if the files do not tell one
    memory: HeldMemory | None = None
    ranks: tuple[RankAt, ...] = ()
    losses: tuple[LossEvent, ...] = ()


class MemoryComparison(Record):
    """A category of memory, as found and as predicted; None where one of them does not distinguish it."""

    part: str
    actual_bytes: NonNegativeInt | None
    predicted_bytes: NonNegativeInt | None


class AgainstPrediction(Record):
    """The prediction compared with what was found, and the smallest change that fits."""

    predicted: Step
    rows: tuple[MemoryComparison, ...]
    findings: tuple[str, ...]
    excess_bytes: int  # found minus predicted; added to the memory of each change before deciding whether it fits
    available_bytes: NonNegativeInt
    change: Change | None = None  # the fastest single change that fits
    layout: str = ""  # the proposed layout, if no single change fits
    slower: NonNegativeFloat | None = None  # ratio of step times, after the change over before
