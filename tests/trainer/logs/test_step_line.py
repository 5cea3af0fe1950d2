"""The line of a training step against figures worked by hand."""

from __future__ import annotations

import pytest

from fivefold.job import Job
from fivefold.trainer.engine import StepResult
from fivefold.trainer.logs.step_line import step_line
from fivefold.update import Ramp

JOB = Job(sequence=128, global_batch=16, steps=9, ramp=Ramp(first=4, step=4, every=2))


@pytest.mark.parametrize(("batch", "mfu"), [(4, 0.125), (8, 0.25), (16, 0.5)])
def test_the_log_has_the_mfu_of_the_smaller_batch_during_a_ramp(batch: int, mfu: float) -> None:
    """The full batch takes 1 s at peak FLOP/s; in a step of 2 s a quarter of it is an eighth of the peak."""
    done = StepResult(loss=2.0, norm=1.0, stop=False)
    line = step_line(3, done, job=JOB, samples=40, batch=batch, rate=1e-3, seconds=2.0, ideal_seconds=1.0)
    assert line["mfu_causal"] == pytest.approx(mfu)
    assert (line["batch"], line["tokens"]) == (batch, 40 * 128)
