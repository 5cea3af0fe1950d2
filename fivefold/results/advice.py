"""Advice on a measured step: the largest loss that can be avoided, its evidence, the change, and its largest gain.

The largest loss is data loading, 31.0 ms or 20% of a step. The device is idle while the host waits for …
"""

from __future__ import annotations

from pydantic import NonNegativeFloat

from fivefold.record import Record
from fivefold.units import show_seconds


class NextLoss(Record):
    """The second largest loss of a step."""

    name: str
    share: NonNegativeFloat  # of the step


class StepAdvice(Record):
    """The advice as data; ``str`` gives it in a few sentences.

    ``loss`` is "" if no loss is large enough to be avoided: then ``evidence`` says so, and ``change`` what is left.
    """

    loss: str
    loss_seconds: NonNegativeFloat  # of a step
    share: NonNegativeFloat  # of a step
    evidence: str
    change: str
    option: str = ""  # of the predicted software, in its own words
    stack: str = ""  # that software
    step_seconds: NonNegativeFloat  # measured
    expected_seconds: NonNegativeFloat  # of a step without the loss
    predicted_seconds: NonNegativeFloat | None = None  # of the predicted step
    following: NextLoss | None = None

    def __str__(self) -> str:
        sentences = [self.evidence, self.change]
        if self.loss:
            size = f"{show_seconds(self.loss_seconds)} or {self.share:.0%} of a step"
            sentences.insert(0, f"The largest loss is {self.loss}, {size}.")
            sentences.append(f"In {self.stack}: {self.option}." if self.option else "")
            sentences.append(
                f"Without it a step would take {self.share:.0%} less time, {self._show_gain()} per second."
            )
        if self.following is not None:
            sentences.append(f"Next is {self.following.name}, {self.following.share:.0%}.")
        if self.predicted_seconds is not None:
            without = f", and {show_seconds(self.expected_seconds)} without it" if self.loss else ""
            predicted = show_seconds(self.predicted_seconds)
            measured = show_seconds(self.step_seconds)
            sentences.append(f"Predicted: {predicted} per step; measured: {measured}{without}.")
        return " ".join(filter(None, sentences))

    def _show_gain(self) -> str:
        """Return how many more tokens a step without the loss would train."""
        speed = 1 / max(1 - self.share, 1e-3)
        if speed < 2:
            return f"{speed - 1:.0%} more tokens"
        return f"{speed:.2g} times as many tokens" if speed < 100 else "many times more tokens"
