"""The curves of calibrated kernels are chosen by the function that runs: each name is one that a step runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fivefold.dry_run.record.tape import Tape
from fivefold.dry_run.time.prices import CURVES
from fivefold.job import Job
from fivefold.model.catalog import build_model


@pytest.mark.slow
def test_every_curve_is_of_a_function_that_a_step_runs(make_tapes: Callable[..., list[Tape]]) -> None:
    tiny, job = build_model("tiny").replace(layers=2), Job(sequence=32, global_batch=4)
    plain = tiny.replace(norm="layernorm", mlp="plain", activation="gelu")
    ran = set()
    for model in (tiny, tiny.replace(activation="gelu"), plain):
        for kernels in ("fused", "eager"):
            (tape,) = make_tapes("mbs4", model=model, job=job.replace(kernels=kernels))
            ran |= {tape.sites[kernel.site].line.rpartition(" ")[2] for kernel in tape.kernels}
    assert set(CURVES) - ran == set()
