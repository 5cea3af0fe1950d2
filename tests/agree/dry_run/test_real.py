"""Ten layouts for which each event of the dry run is one of the run; ``real.py`` has them all."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.adapter import Adapter, Base
from fivefold.base_format import QUANTIZED_BASES
from fivefold.dry_run.rank_tapes import run_rank
from fivefold.dry_run.record.tape import ALLOC, START, Tape
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from tests.agree.dry_run.process import train_rank
from tests.agree.dry_run.real import MORE, QUICK, Case, list_differences, run
from tests.processes import run_forked
from tests.selection import mark_share

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", mark_share(15, QUICK), ids=str)
def test_a_dry_run_equals_the_real_run(case: Case) -> None:
    verdict = run(case)
    assert verdict.unequal == ()
    assert verdict.events > 1000


@pytest.mark.parametrize("base", mark_share(4, QUANTIZED_BASES[:4]))
def test_a_dry_run_with_base_weights_in_few_bits_equals_the_real_run(base: Base) -> None:
    assert list_differences_over_base(base, Case("dense", "dp2 zero3 mbs1 ac=full")) == []


@pytest.mark.long  # the test before it has a base in few bits
@pytest.mark.parametrize("base", mark_share(2, ["fp8", "mxfp4"]))
def test_a_dry_run_with_experts_in_few_bits_has_the_peak_and_messages_of_the_real_run(base: Base) -> None:
    """Next to frozen experts, in 16 bits too, one tensor of the first block is freed at another place among frees."""
    lines = list_differences_over_base(base, Case("moe", "dp2 ep2 zero3 mbs1 ac=full"))
    assert all(line.endswith(" run") and ": (1, " in line for line in lines), lines


def list_differences_over_base(base: Base, case: Case) -> list[str]:
    model = case.model.replace(layers=2)  # of experts the second alone has some
    job = case.job.replace(adapter=Adapter(rank=3, base=base, double_quantization=base != "fp4"))
    ours = run_rank(model=model, layout=case.layout, job=job, rank=1, streams=False)
    ran: Any = run_forked(2, train_rank, model, case.layout, job)[1]
    return [*list_differences(ours, ran)]


def test_a_difference_between_dry_run_and_real_run_is_reported() -> None:
    """Of one event on one rank, and of what it does to the totals."""
    case = Case("dense", "dp2 zero2 mbs1")
    model = case.model.replace(layers=2)
    ours = run_rank(model=model, layout=case.layout, job=case.job, rank=1, streams=False)
    ran: Any = run_forked(2, train_rank, model, case.layout, case.job)[1]
    assert [*list_differences(ours, ran)] == []
    tape: Tape = ours.steady
    largest = max((at for at, event in enumerate(tape) if event[0] == ALLOC), key=lambda at: tape.events[4 * at + 2])
    tape.events[4 * largest + 2] += 4
    first, second = list_differences(ours, ran)
    assert first.startswith(f"rank 1, steady step, event {largest}")
    assert second.startswith("rank 1 peak:")
    tape.events[4 * largest + 2] -= 4
    start = next(at for at, event in enumerate(tape) if event[0] == START)
    message = tape.messages[tape.events[4 * start + 2]]
    tape.messages[tape.events[4 * start + 2]] = message._replace(payload=message.payload + 8)
    assert [line.split(":")[0] for line in list_differences(ours, ran)][1:] == ["rank 1 dp all_gather"]


def test_the_cases_have_every_schedule_zero_stage_and_precision() -> None:
    """As many layouts as promised, of every kind of model, schedule, ZeRO stage and precision."""
    cases = [*QUICK, *MORE]
    layouts = [case.layout for case in cases]
    assert len(set(cases)) == len(cases) >= 30
    assert {layout.schedule for layout in layouts if layout.pp > 1} == set(SCHEDULES)
    assert {layout.zero for layout in layouts if layout.dp > 1} == {0, 1, 2, 3}
    assert {case.precision for case in cases} == {"fp32", "bf16", "bf16-grad16"}
    assert {layout.world for layout in layouts} >= {1, 2, 4, 8}
    assert sum(case.every for case in cases if case.layout.world >= 4) >= 8
    assert all(any(getattr(layout, axis) > 1 for layout in layouts) for axis in ("tp", "cp", "pp", "ep", "etp"))
