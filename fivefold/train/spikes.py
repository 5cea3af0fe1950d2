"""Losses that are not numbers, losses that leap, and the batches that are passed over because of them.

    leap:  loss > median + k · 1.4826 · MAD   of the last n good losses

1.4826 · MAD is the standard deviation, if the losses are normal; unlike it, no single loss moves it.
Step s reads the s-th batch that is not passed over: the data order is a function of that set alone, so a run that
went back is to the bit one that had passed over the same batches from the start.
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
    """What a run does about what goes wrong. ``skip`` passes over the bad batch, ``rollback`` all since the save."""

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
        return self.on_nan != "stop" or self.on_spike != "ignore"


class Passed:
    """The batches that are passed over, as ranges from the first to the last."""

    def __init__(self, ranges: list[list[int]] | None = None) -> None:
        self.ranges = sorted(ranges or [])

    def batch(self, step: int) -> int:
        """What ``step`` (from 0) reads."""
        for first, last in self.ranges:  # ascending and disjoint
            if step >= first:
                step += last - first + 1
        return step

    def add(self, batches: list[int]) -> None:
        """Pass over ``batches`` too."""
        known = {batch for first, last in self.ranges for batch in range(first, last + 1)}
        self.ranges = []
        for batch in sorted(known.union(batches)):
            if self.ranges and self.ranges[-1][1] == batch - 1:
                self.ranges[-1][1] = batch
            else:
                self.ranges.append([batch, batch])


class Trouble(NamedTuple):
    """What is wrong with a loss, and what the run file says to do about it."""

    action: Literal["stop", "skip", "rollback"]
    what: str


class Guard:
    """Judges every loss; what it remembers is in each checkpoint, so that a resumed run judges alike."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.passed = Passed()
        self.recent: deque[float] = deque(maxlen=faults.spike_window)
        self.rollbacks = 0

    def judge(self, loss: float, norm: float) -> Trouble | None:
        """What is wrong; if nothing is, the loss is one of those that later ones are measured by."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return Trouble(self.faults.on_nan, f"loss {loss:.4g}, gradient norm {norm:.4g}")
        if self.faults.on_spike == "ignore":
            return None
        usual, largest = self._usual()
        if loss > largest:
            what = f"loss {loss:.4g}, where {usual:.4g} is usual and {largest:.4g} the limit"
            return Trouble(self.faults.on_spike, what)
        self.recent.append(loss)
        return None

    def _usual(self) -> tuple[float, float]:
        """Median and limit; without enough losses there is none."""
        if len(self.recent) < self.faults.spike_window:
            return 0.0, math.inf
        usual = statistics.median(self.recent)
        spread = NORMAL * statistics.median(abs(loss - usual) for loss in self.recent)
        return usual, usual + self.faults.spike_deviations * max(spread, FLAT * abs(usual))

    def pass_over(self, trouble: Trouble, *, step: int, good: int) -> str:
        """Take out the data of ``step`` (from 1), or of all after step ``good``; what was done, in words.

        A ``Fault`` if that was done too often.
        """
        (action, what), faults = trouble, self.faults
        if self.rollbacks >= faults.max_rollbacks:
            raise Fault(
                f"step {step}: {what}, after {self.rollbacks} rollbacks, and max_rollbacks={faults.max_rollbacks}; "
                "lower the learning rate or look at the data"
            )
        first = step - 1 if action == "skip" else good
        batches = [self.passed.batch(number) for number in range(first, step)]
        self.passed.add(batches)
        self.rollbacks += 1
        span = f"batch {batches[0]}" if len(batches) == 1 else f"batches {batches[0]} to {batches[-1]}"
        return f"{what}: back to step {good}, and {span} passed over ({action} {self.rollbacks})"

    # What a checkpoint holds

    def facts(self) -> dict[str, Any]:
        """All that is remembered; nothing where nothing is."""
        known = {"passed": self.passed.ranges, "rollbacks": self.rollbacks, "losses": list(self.recent)}
        return {key: value for key, value in known.items() if value}

    def restore(self, facts: dict[str, Any], *, going_back: bool) -> None:
        """Go on from a checkpoint; ``going_back``: with what was learnt since."""
        self.recent = deque(facts.get("losses", []), maxlen=self.faults.spike_window)
        if not going_back:
            self.passed = Passed(facts.get("passed"))
            self.rollbacks = facts.get("rollbacks", 0)
