from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as machine
from fivefold.model.catalog import resolve as model
from fivefold.planner.counts.memory.peak import count_rank_memory
from fivefold.planner.predict import Planner
from fivefold.planner.time.memory_over_time import list_levels
from fivefold.planner.time.spans import build_spans

LAYOUTS = (
    "dp32", "dp32 zero1 ac=full", "dp32 zero3", "dp8 tp2 cp2 zero2",
    *(f"dp4 tp2 pp4 {name}" for name in ("gpipe", "1f1b", "v2 interleaved", "zb1p", "zb2p", "v2 zbv", "dualpipe",
                                         "v2 dualpipev", "zero3", "v2 zero2 interleaved",
                                         "zb1p stages=0-16-16-0")),
)  # fmt: skip


def planner(gbs: int = 64) -> Planner:
    job = Job.read({"sequence": 4096, "global_batch": gbs}, origin="test")
    return Planner(model=model("llama3-8b"), machine=machine("h100:32", local=Path("none")), job=job)


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_highest_level_is_the_peak(text: str) -> None:
    """Simulated action by action, a rank is never fuller than ``count_rank_memory`` says, and once as full."""
    plan, layout = planner(), Layout.parse(text)
    for rank, result in enumerate(plan.estimate(layout).ranks):
        lives = list_levels(plan, layout, rank=rank)
        assert max(level.live_bytes for level in lives) == result.peak_bytes
        assert min(min(level[1:7]) for level in lives) >= 0
        # within a split backward, what it puts off grows before what it has used is gone
        room = 1.01 if "zb" in text else 1
        assert max(level.activations_bytes for level in lives) <= room * result.activations_bytes


@pytest.mark.parametrize("text", LAYOUTS)
def test_memory_levels_follow_the_spans_of_the_step(text: str) -> None:
    plan, layout = planner(), Layout.parse(text)
    lives = list_levels(plan, layout, rank=0)
    assert all(first.seconds <= second.seconds + 1e-9 for first, second in pairwise(lives))
    assert lives[-1].seconds == pytest.approx(build_spans(plan, layout)[0][-1].end)
    assert lives[-1].activations_bytes == 0
    assert lives[-1].cause == "optimizer"


@pytest.mark.parametrize("text", ["dp32", "dp32 zero1", "dp32 zero2", "dp32 zero3", "dp32 zero3 ac=full"])
def test_a_backward_frees_block_by_block(text: str) -> None:
    """A block that is named lies at its own place: N blocks before it keep their activations, and no others."""
    lives = list_levels(planner(gbs=32), Layout.parse(text), rank=0)
    for passes in ("forward", "backward"):
        results = [
            (int(entry.cause.split()[1]), entry)
            for entry in lives
            if entry.cause.startswith("block") and passes in entry.cause
        ]
        (low, least), (high, most) = sorted((results[0], results[-1]))
        assert (low, high) == (0, 31)
        kept = (most.activations_bytes - least.activations_bytes) / 31
        for place, item in results:
            assert item.activations_bytes == pytest.approx(least.activations_bytes + place * kept, rel=1e-6)
            along = (item.seconds - least.seconds) / (most.seconds - least.seconds)
            assert along == pytest.approx(place / 31, abs=1e-6)


@pytest.mark.parametrize("text", ["dp8 pp4 zb1p", "dp8 pp4 zero1 1f1b", "dp8 pp4 v2 zbv zero3"])
def test_a_rank_that_waits_has_its_states(text: str) -> None:
    """From the beginning of the step on, which for the last rank comes before its first action."""
    plan, layout = planner(), Layout.parse(text)
    for rank, states in enumerate(count_rank_memory(plan.counts, layout)):
        begin, first = list_levels(plan, layout, rank=rank)[:2]
        assert begin.seconds == 0
        assert begin.states_bytes == first.states_bytes >= states.parameters_bytes + states.optimizer_bytes
        assert begin.activations_bytes == begin.temporary_bytes == 0
        assert rank == 0 or first.seconds > 0


def test_a_pipeline_fills_one_micro_batch_after_the_other() -> None:
    """1F1B: rank 0 holds four micro-batches before its first backward, rank 3 one."""
    plan, layout = planner(), Layout.parse("dp4 tp2 pp4")
    highest = [max(x.activations_bytes for x in list_levels(plan, layout, rank=rank)) for rank in (1, 2)]
    assert 2 * highest[0] == 3 * highest[1]  # of equal stages: three and two


def test_a_shortened_step_has_the_same_peak() -> None:
    plan, layout = planner(256), Layout.parse("dp4 tp2 pp4 v2 zbv")
    whole, short = (list_levels(plan, layout, rank=0, limit=limit) for limit in (None, 8))
    assert len(short) < len(whole) / 4
    assert max(x.live_bytes for x in short) == max(x.live_bytes for x in whole)
