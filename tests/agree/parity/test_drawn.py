"""A few random models under random layouts against one process; ``pictures.py`` has as many as are asked for."""

from __future__ import annotations

import itertools

import pytest

from tests.agree.drawn import Drawn, draw_cases
from tests.agree.parity.drawn import FP64_TOLERANCE, run, run_in_fp64
from tests.selection import mark_share


@pytest.mark.parametrize(
    "case", mark_share(2, itertools.islice(draw_cases(1, worlds=(2, 4)), 2)), ids=lambda case: str(case.layout)
)
def test_random_layouts_train_as_one_process(case: Drawn) -> None:
    verdict = run(case)
    assert verdict.is_equal, (verdict, str(case))
    assert verdict.said == (), str(case)


@pytest.mark.long  # of fp64: how exact a comparison can be
def test_rounding_in_fp64_is_only_that_of_the_compared_gradients() -> None:
    (case,) = itertools.islice(draw_cases(1, worlds=(2,)), 1)
    verdict = run_in_fp64(case)
    assert max(verdict.loss_error, verdict.norm_error) < 1e-13, (verdict, str(case))
    assert verdict.gradient_error <= FP64_TOLERANCE, (verdict, str(case))
