"""Detects NaN losses and loss spikes, and decides what to do: stop, skip the update, or roll back to a checkpoint.

    spike:  loss > median + k · 1.4826 · MAD   of the last n good losses

1.4826 · MAD estimates the standard deviation of normal losses, but no single loss moves it much.
Data is never read twice: ``skip`` drops the update, ``rollback`` restores the weights, and both continue with the next
samples. The run is therefore bitwise equal to one that left those samples out from the start.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat

from fivefold.errors import RunFailure
from fivefold.record import Record

NORMAL = 1.4826  # 1 / Φ⁻¹(3/4)
FLAT = 1e-3  # floor of MAD, as a share of the median: a flat loss has a MAD near 0, and every loss would be a spike


class Faults(Record):
    """The fault tolerance of a run. ``skip`` drops the update, ``rollback`` restores the last checkpoint."""

    watchdog_seconds: PositiveFloat = 300.0  # if no micro-batch, update or save ends within this time, a rank hangs
    max_restarts: NonNegativeInt = 3  # restarts of local processes in a row, without a new checkpoint between
    on_nan: Literal["stop", "skip", "rollback"] = "stop"  # what to do after a loss that is not finite
    on_spike: Literal["ignore", "skip", "rollback"] = "ignore"  # what to do after a loss spike
    spike_deviations: PositiveFloat = 8.0  # k
    spike_window: int = Field(64, ge=8)  # n
    max_rollbacks: NonNegativeInt = 10  # over the full run, skips included

    @property
    def can_roll_back(self) -> bool:
        """Return whether a bad loss can cause a rollback."""
        return "rollback" in (self.on_nan, self.on_spike)

    @property
    def checks_before_update(self) -> bool:
        """Return whether the loss is checked before the update; the host then waits for the device there, not after."""
        return "skip" in (self.on_nan, self.on_spike)


class BadLoss(NamedTuple):
    """A bad loss: its description and the configured action."""

    action: Literal["stop", "skip", "rollback"]
    what: str


class LossGuard:
    """A guard that checks every loss. Each checkpoint saves its state, so that a resumed run decides the same."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.recent: deque[float] = deque(maxlen=faults.spike_window)
        self.rollbacks = 0

    def judge(self, loss: float, norm: float) -> BadLoss | None:
        """Return the fault of a loss or gradient norm; if there is none, add the loss to the window and return None."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return BadLoss(self.faults.on_nan, f"loss {loss:.4g}, gradient norm {norm:.4g}")
        if self.faults.on_spike == "ignore":
            return None
        median, limit = self._compute_median_and_limit()
        if loss > limit:
            what = f"loss {loss:.4g}, where {median:.4g} is usual and {limit:.4g} the limit"
            return BadLoss(self.faults.on_spike, what)
        self.recent.append(loss)
        return None

    def _compute_median_and_limit(self) -> tuple[float, float]:
        """Return median and limit of the window; the limit is infinite until the window is full."""
        if len(self.recent) < self.faults.spike_window:
            return 0.0, math.inf
        median = statistics.median(self.recent)
        deviation = NORMAL * statistics.median(abs(loss - median) for loss in self.recent)
        return median, median + self.faults.spike_deviations * max(deviation, FLAT * abs(median))

    def count(self, bad_loss: BadLoss, *, step: int) -> None:
        """Count one skip or rollback; raises ``RunFailure`` beyond ``max_rollbacks``."""
        if self.rollbacks >= self.faults.max_rollbacks:
            raise RunFailure(
                f"step {step}: {bad_loss.what}, after {self.rollbacks} rollbacks, and "
                f"max_rollbacks={self.faults.max_rollbacks}; lower the learning rate or look at the data"
            )
        self.rollbacks += 1

    # State in a checkpoint

    def facts(self) -> dict[str, Any]:
        """Return the state for a checkpoint: rollbacks and recent losses; empty values are left out."""
        values = {"rollbacks": self.rollbacks, "losses": list(self.recent)}
        return {key: value for key, value in values.items() if value}

    def restore(self, facts: dict[str, Any], *, going_back: bool) -> None:
        """Restore from a checkpoint; ``going_back`` (a rollback): keep the current count of rollbacks."""
        self.recent = deque(facts.get("losses", []), maxlen=self.faults.spike_window)
        if not going_back:
            self.rollbacks = facts.get("rollbacks", 0)
