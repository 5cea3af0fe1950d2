"""The speed of a GPU: Llama-shaped models of 1, 3 and 8 billion parameters, predicted and measured.

    python -m tests.gpu.test_speed --rows runs/speed.jsonl       a markdown table; finished cases are not run again

Each case runs in a process of its own: real build, real steps on random tokens; tokens/s, MFU, peak of memory.
Without a GPU the harness itself is checked on a small model.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.machine import catalog as machines
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict
from fivefold.step import Step
from fivefold.trainer import build as building
from fivefold.trainer.engine import Engine
from fivefold.trainer.process import Process
from fivefold.trainer.supported import check_supported
from fivefold.units import GIB
from tests.gpu.harness import LATER, is_gpu_missing, parse_options, rows_of, run_apart
from tests.gpu.test_dryrun import repeat_weight

WARM, TIMED = 4, 8  # steps; compiled blocks take the first two
MFU, FP8_GAIN, MEMORY = 0.55, 1.3, 0.03  # what we ask of an H200: causal, against bf16, mean error of the peak
PUBLISHED_TOKENS = (
    10_471  # per second: KempnerForge, 8.03 B on one H200, sequences of 4096, batch 4 x 2, all recomputed
)


class Case(NamedTuple):
    """One job on one GPU."""

    name: str
    layout: str
    sequence: int
    global_batch: int
    precision: str = "bf16"
    compiled: bool = True

    def __str__(self) -> str:
        words = (self.name, self.layout, f"{self.sequence} x {self.global_batch}", self.precision)
        return " · ".join((*words, "compiled") if self.compiled else words)

    @property
    def job(self) -> Job:
        return Job(
            sequence=self.sequence,
            global_batch=self.global_batch,
            precision=get_recipe(self.precision),
            compile=self.compiled,
            steps=WARM + TIMED,
        )


SIZES = (
    ("llama3.2-1b", 4096, 4, "none"),
    ("llama3.2-1b", 8192, 2, "none"),
    ("llama3.2-3b", 4096, 2, "none"),
    ("llama3.2-3b", 8192, 1, "none"),
)
CASES = (
    *(
        Case(name, f"mbs{mbs} ac={ac}", sequence, 4 * mbs, precision)
        for name, sequence, mbs, ac in SIZES
        for precision in ("bf16", "fp8", "fp8-rowwise")
    ),
    Case("llama3.2-1b", "mbs4 ac=none", 4096, 16, compiled=False),
    Case("llama3-8b", "mbs4 ac=full", 4096, 8, "bf16-pure"),
)


TINY = (Case("nano", "mbs2 ac=none", 64, 4, "fp32", compiled=False),)  # --small


class Row(NamedTuple):
    """One case, as predicted and as measured."""

    case: str
    tokens_per_second: float
    mfu_causal: float
    mfu_non_causal: float
    seconds: float
    predicted_seconds: float
    peak_bytes: int
    predicted_peak_bytes: int
    calibrated_seconds: float | None = None  # as predicted for the machine that was measured here


def measure(case: Case, *, device: torch.device) -> tuple[float, int]:
    """In this process, which must be a fresh one: seconds per step, and the peak of allocated bytes (0 on CPU)."""
    building.draw_initial_weight = repeat_weight
    model, layout, job = build_model(case.name), Layout.parse(case.layout), case.job
    built = building.build(model=model, layout=layout, job=job, device=device)
    engine = Engine(built, model=model, layout=layout, job=job)
    shape = (layout.micro_batches(job), layout.mbs, job.sequence + 1)
    tokens = torch.randint(model.vocab, shape, generator=torch.Generator().manual_seed(0))
    begin = 0.0
    for step in range(WARM + TIMED):
        if step == WARM:
            _wait(device)
            begin = time.perf_counter()
        engine.step(tokens)
        engine.zero_grad()
    _wait(device)
    seconds = (time.perf_counter() - begin) / TIMED
    return seconds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def predict_step(case: Case, *, chip: str) -> Step:
    """The step that the planner promises on one such chip, by name or as a machine file."""
    machine = machines.resolve(f"{chip}:1", local=Path("local.toml"))
    return predict(model=build_model(case.name), machine=machine, layout=Layout.parse(case.layout), job=case.job)


def compare(case: Case, *, chip: str, machine: str = "", small: bool = False) -> Row:
    """Predict here, for the ``chip`` and for a calibrated ``machine`` if there is one; run in a process of its own."""
    step = predict_step(case, chip=chip)
    seconds, peak = run_apart("tests.gpu.test_speed", (TINY if small else CASES).index(case), small=small)
    faster = step.time.step_seconds / seconds
    return Row(
        str(case),
        case.job.tokens_per_step / seconds,
        step.mfu.causal * faster,
        step.mfu.non_causal * faster,
        seconds,
        step.time.step_seconds,
        peak,
        step.memory.peak_bytes,
        predict_step(case, chip=machine).time.step_seconds if machine else None,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    head = (
        "| job | tokens/s | MFU causal | MFU full | step, s | predicted | error | calibrated | error "
        "| peak, GiB | predicted | error |"
    )
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row.case} | {row.tokens_per_second:,.0f} | {row.mfu_causal:.1%} | {row.mfu_non_causal:.1%} "
        f"| {row.seconds:.3f} | {_cells(row.predicted_seconds, row.seconds, '.3f')} "
        f"| {_cells(row.calibrated_seconds, row.seconds, '.3f')} "
        f"| {row.peak_bytes / GIB:.2f} | {_cells(row.predicted_peak_bytes / GIB, row.peak_bytes / GIB, '.2f')} |"
        for row in rows
    ]
    return "\n".join(lines)


def _cells(promised: float | None, found: float, form: str) -> str:
    """A prediction and its error, as two cells."""
    if promised is None:
        return "– | –"
    return f"{promised:{form}} | {f'{promised / found - 1:+.1%}' if found else '–'}"


# Tests


def test_the_speed_cases_are_valid_and_fit_the_gpu() -> None:
    for case in CASES:
        layout, job = Layout.parse(case.layout), case.job
        refuse(layout, model=build_model(case.name), job=job)
        check_supported(layout, job, model=build_model(case.name))
        assert predict_step(case, chip="h200").memory.fits, case
        assert layout.world == 1


def test_the_speed_check_times_steps(forked: Callable[..., list[Any]]) -> None:
    case = Case("nano", "mbs2 ac=none", 64, 4, "fp32", compiled=False)
    ((seconds, peak),) = forked(1, partial(measure, case, device=torch.device("cpu")))
    assert 0 < seconds < 60
    assert peak == 0  # PyTorch does not count what the CPU allocates


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_h200_reaches_the_predicted_time() -> None:
    rows = {case: compare(case, chip="h200") for case in CASES}
    table = markdown(list(rows.values()))
    compiled = {case: row for case, row in rows.items() if case.compiled}
    assert max(row.mfu_causal for case, row in compiled.items() if case.precision == "bf16") >= MFU, table
    gains = [
        row.tokens_per_second / compiled[case._replace(precision="bf16")].tokens_per_second
        for case, row in compiled.items()
        if case.precision.startswith("fp8")
    ]
    assert max(gains) >= FP8_GAIN, table
    assert rows[CASES[-1]].tokens_per_second > PUBLISHED_TOKENS, table
    errors = [abs(row.predicted_peak_bytes / row.peak_bytes - 1) for row in rows.values()]
    assert sum(errors) / len(errors) <= MEMORY, table


def main() -> int:
    """Print the table of all cases, or of those whose names hold all of the words."""
    options = parse_options("speed and memory of a GPU against what was predicted", chip="h200", machine="")
    if is_gpu_missing(small=options.small):
        return 2
    cases = TINY if options.small else CASES
    if options.measure is not None:
        print(json.dumps(measure(cases[options.measure], device=Process().start())))
        Process.end()
        return 0
    rows = rows_of(
        cases,
        options,
        row=Row,
        compare=partial(compare, chip=options.chip, machine=options.machine, small=options.small),
        tell=lambda row: f"{row.tokens_per_second:,.0f} tokens/s",
    )
    print(markdown(rows))
    return LATER if options.left else 0


if __name__ == "__main__":
    sys.exit(main())
