"""Calibrate a machine on steps that were measured on it: five numbers, each a fact of the machine.

matmuls per joule and peak share, memory bandwidth, the host's launch, attention, the near link: each times a factor.
Coordinate descent in the logarithm on the mean absolute log error; a factor stays within 1/2 and 2. Measure half of
the runs, calibrate, and score the other half: that is how good a planner is after one afternoon on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from fivefold.check.published.case import Case
from fivefold.machine.spec import Chip, Machine
from fivefold.plan.predict import Planner

STEPS = (1.3, 1.1, 1.03)  # of a factor, coarse to fine
LIMIT = 2.0


class Factors(NamedTuple):
    """What a machine's stock figures are multiplied with."""

    matmul: float = 1.0
    bandwidth: float = 1.0
    launch: float = 1.0
    attention: float = 1.0
    link: float = 1.0

    def apply(self, machine: Machine) -> Machine:
        """``machine`` with its figures changed."""
        chip, (near, *far) = machine.chip, machine.links
        return machine.replace(
            chip=_chip(chip, self), links=(near.replace(sustained=min(1.0, near.sustained * self.link)), *far)
        )


def _chip(chip: Chip, factors: Factors) -> Chip:
    return chip.replace(
        matmul_share={dtype: share * factors.matmul for dtype, share in chip.matmul_share.items()},
        flops_per_joule={dtype: joule * factors.matmul for dtype, joule in chip.flops_per_joule.items()},
        bandwidth_share=chip.bandwidth_share * factors.bandwidth,
        launch_seconds=chip.launch_seconds * factors.launch,
        attention_share=chip.attention_share * factors.attention,
        attention_backward_share=chip.attention_backward_share * factors.attention,
    )


def tune(cases: Sequence[Case]) -> Factors:
    """The factors under which the measured step times of ``cases`` are predicted best."""
    factors = Factors()
    best = error(cases, factors)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for field in Factors._fields:
                for sign in (step, 1 / step):
                    value = getattr(factors, field) * sign
                    if not 1 / LIMIT <= value <= LIMIT:
                        continue
                    tried = factors._replace(**{field: value})
                    found = error(cases, tried)
                    if found < best:
                        factors, best, improved = tried, found, True
    return factors


def error(cases: Sequence[Case], factors: Factors) -> float:
    """Mean absolute logarithm of predicted over measured step time."""
    return fmean(abs(math.log(seconds(case, factors) / (case.step_seconds or 1.0))) for case in cases)


def seconds(case: Case, factors: Factors) -> float:
    """The predicted step of ``case`` on the changed machine."""
    planner = Planner(model=case.model, machine=factors.apply(case.machine), job=case.job)
    return planner.estimate(case.layout).clock.seconds
