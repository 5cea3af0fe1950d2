"""Advice on a measured step: what its counts explain, and a trace for the rest."""

from __future__ import annotations

import pytest

import fivefold
from fivefold.profiling.step_advice import advise_on_step
from fivefold.step import Step

PREDICTED = fivefold.predict("llama3-8b", "h100:8", "dp8 zero3 mbs1", gbs=8, seq=8192)
SECONDS = PREDICTED.time.step_seconds


def measure(*, longer: float = 0.0, flops: float = 1.0, optimizer: float = 0.0) -> Step:
    """The predicted step as if measured: its time longer by a share of itself, its optimizer's time too."""
    time = PREDICTED.time.replace(
        step_seconds=SECONDS * (1 + longer), optimizer_seconds=PREDICTED.time.optimizer_seconds + optimizer * SECONDS
    )
    work = PREDICTED.work.replace(hardware_flops=round(PREDICTED.work.hardware_flops * flops))
    return PREDICTED.replace(kind="measured", time=time, work=work)


def test_the_advice_for_a_step_as_fast_as_predicted_is_to_change_the_layout() -> None:
    advice = advise_on_step(measure(longer=0.02), PREDICTED)
    assert advice is not None
    assert advice.loss == ""
    assert "What is left to gain is in the layout" in str(advice)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (measure(longer=0.3, flops=1.3), ("30% more FLOPs ran than predicted", "Recompute less")),
        (measure(longer=0.3, optimizer=0.3), ("The optimizer takes longer", "fused=True", "23% of a step")),
        (measure(longer=0.3), ("do not explain most", "23% of a step", "fivefold trace --against")),
    ],
)
def test_the_advice_names_the_largest_cause_of_lost_time(step: Step, words: tuple[str, ...]) -> None:
    advice = advise_on_step(step, PREDICTED)
    assert advice is not None
    assert advice.expected_seconds == pytest.approx(advice.step_seconds - advice.loss_seconds)
    assert advice.predicted_seconds == SECONDS
    text = str(advice)
    assert [word for word in words if word not in text] == [], text
    assert "Without it a step would take" in text


def test_without_a_prediction_the_advice_is_the_optimizer_or_a_trace() -> None:
    assert "The largest loss is the optimizer" in str(advise_on_step(measure(optimizer=0.5)))
    assert "`fivefold trace`" in str(advise_on_step(measure()))
    assert advise_on_step(PREDICTED.replace(time=PREDICTED.time.replace(step_seconds=0.0))) is None
