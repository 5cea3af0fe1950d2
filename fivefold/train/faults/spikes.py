"""Losses that are not numbers, losses that leap, and what is done about the data they came from.

    leap:  loss > median + k · 1.4826 · MAD   of the last n good losses

1.4826 · MAD is the standard deviation, if the losses are normal; unlike it, no single loss moves it.
Data that was read is never read again: ``skip`` leaves out the update, ``rollback`` takes the weights back, and both
go on with the samples that come next. So such a run is to the bit one that had left those samples out from its start.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat

from fivefold.record import Fault, Record

NORMAL = 1.4826  # 1 / Φ⁻¹(3/4)
FLAT = 1e-3  # of the median: losses that hardly move have a MAD near 0, and every one of them would be a leap


class Faults(Record):
    """What a run does about what goes wrong. ``skip`` makes no update, ``rollback`` goes back to a checkpoint."""

    watchdog_seconds: PositiveFloat = 300.0  # without a step, an evaluation or a save that ends: a rank hangs
    max_restarts: NonNegativeInt = 3  # of local processes, in a row without a new checkpoint
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    on_spike: Literal["ignore", "skip", "rollback"] = "ignore"
    spike_deviations: PositiveFloat = 8.0  # k
    spike_window: int = Field(64, ge=8)  # n
    max_rollbacks: NonNegativeInt = 10  # skips among them, over the whole run

    @property
    def goes_back(self) -> bool:
        """Whether a bad loss leads to a checkpoint."""
        return "rollback" in (self.on_nan, self.on_spike)

    @property
    def judges_first(self) -> bool:
        """Whether a loss is judged before the update; the host then waits for it there and not after."""
        return "skip" in (self.on_nan, self.on_spike)


class BadLoss(NamedTuple):
    """What is wrong with a loss, and what the run file says to do about it."""

    action: Literal["stop", "skip", "rollback"]
    what: str


class LossGuard:
    """Judges every loss; what it remembers is in each checkpoint, so that a resumed run judges alike."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.recent: deque[float] = deque(maxlen=faults.spike_window)
        self.rollbacks = 0

    def judge(self, loss: float, norm: float) -> BadLoss | None:
        """What is wrong; if nothing is, the loss is one of those that later ones are measured by."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return BadLoss(self.faults.on_nan, f"loss {loss:.4g}, gradient norm {norm:.4g}")
        if self.faults.on_spike == "ignore":
            return None
        usual, largest = self._usual()
        if loss > largest:
            what = f"loss {loss:.4g}, where {usual:.4g} is usual and {largest:.4g} the limit"
            return BadLoss(self.faults.on_spike, what)
        self.recent.append(loss)
        return None

    def _usual(self) -> tuple[float, float]:
        """Median and limit; without enough losses there is none."""
        if len(self.recent) < self.faults.spike_window:
            return 0.0, math.inf
        usual = statistics.median(self.recent)
        spread = NORMAL * statistics.median(abs(loss - usual) for loss in self.recent)
        return usual, usual + self.faults.spike_deviations * max(spread, FLAT * abs(usual))

    def count(self, bad_loss: BadLoss, *, step: int) -> None:
        """One more step is passed over; a ``Fault`` if that was done too often."""
        if self.rollbacks >= self.faults.max_rollbacks:
            raise Fault(
                f"step {step}: {bad_loss.what}, after {self.rollbacks} rollbacks, and "
                f"max_rollbacks={self.faults.max_rollbacks}; lower the learning rate or look at the data"
            )
        self.rollbacks += 1

    # What a checkpoint holds

    def facts(self) -> dict[str, Any]:
        """All that is remembered; nothing where nothing is."""
        known = {"rollbacks": self.rollbacks, "losses": list(self.recent)}
        return {key: value for key, value in known.items() if value}

    def restore(self, facts: dict[str, Any], *, going_back: bool) -> None:
        """Go on from a checkpoint; ``going_back``: still knowing how often."""
        self.recent = deque(facts.get("losses", []), maxlen=self.faults.spike_window)
        if not going_back:
            self.rollbacks = facts.get("rollbacks", 0)
