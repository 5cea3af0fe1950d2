"""The facts of kernels by which they are priced: the function that runs, and the alignment of a matmul's rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fivefold.dry_run.record.tape import Tape
from fivefold.dry_run.time.prices import CURVES
from fivefold.job import Job
from fivefold.model.catalog import build_model
from tests.planner.counts.operations.test_compressed_attention import MODEL as COMPRESSED_KEYS


@pytest.mark.slow
def test_every_curve_is_of_a_function_that_a_step_runs(make_tapes: Callable[..., list[Tape]]) -> None:
    tiny, job = build_model("tiny").replace(layers=2), Job(sequence=32, global_batch=4)
    plain = tiny.replace(norm="layernorm", mlp="plain", activation="gelu")
    ran = set()
    for model in (tiny, tiny.replace(activation="gelu"), plain, COMPRESSED_KEYS):
        for kernels in ("fused", "eager"):
            (tape,) = make_tapes("mbs4", model=model, job=job.replace(kernels=kernels))
            ran |= {tape.sites[kernel.site].line.rpartition(" ")[2] for kernel in tape.kernels}
    assert set(CURVES) - ran == set()


def test_a_matmul_has_the_alignment_of_its_rows(make_tapes: Callable[..., list[Tape]]) -> None:
    """A vocabulary that no power of two divides is the row length of the logits, in all three products of the head."""
    model = build_model("tiny").replace(layers=2, vocab=509)
    (tape,) = make_tapes("mbs1", model=model, job=Job(sequence=31, global_batch=1))  # tokens are never a row length
    matmuls = [kernel for kernel in tape.kernels if kernel.kind == "matmul"]
    assert {kernel.aligned for kernel in matmuls if 509 in kernel.shape} == {1}
    assert sum(509 in kernel.shape for kernel in matmuls) == 3
    assert {kernel.aligned for kernel in matmuls if 509 not in kernel.shape} == {8}
