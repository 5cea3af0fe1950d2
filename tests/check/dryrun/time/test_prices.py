"""The curves of calibrated kernels are chosen by the function that runs: each name is one that a step runs."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.check.dryrun.record.tape import Tape
from fivefold.check.dryrun.time.prices import CURVES


def test_every_curve_is_of_a_function_that_a_step_runs(rehearsed: Callable[..., list[Tape]]) -> None:
    (tape,) = rehearsed("mbs4")
    ran = {tape.sites[kernel.site].line.rpartition(" ")[2] for kernel in tape.kernels}
    assert set(CURVES) - ran == set()
