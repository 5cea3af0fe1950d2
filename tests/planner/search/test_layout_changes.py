"""What a single change of a layout rules out goes with it, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal
from fivefold.layout.validity.stack import can_express
from fivefold.machine.catalog import resolve, with_ranks
from fivefold.model.catalog import build_model
from fivefold.planner.compare import with_stack
from fivefold.planner.predict import Planner
from fivefold.planner.questions.changes import list_changes
from fivefold.planner.search.layout_changes import (
    change,
    list_offload_settings,
    list_offloadings,
    rank_moves,
    with_virtual_stages,
    with_zero,
)
from fivefold.planner.search.rejections import find_job_fixes
from fivefold.planner.search.simplest import _list_moves
from fivefold.stack.catalog import STACKS, build_stack
from fivefold.step import FITS_RISK
from fivefold.trainer.supported import check_supported

LLAMA = build_model("llama3-8b")


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("dp4 pp2 v2 zero1 mbs1", {"dp": 8, "pp": 1}, "dp8 zero1 mbs1"),
        ("dp4 pp4 mbs1 ac=full@2", {"dp": 8, "pp": 2}, "dp8 pp2 mbs1 ac=full"),
        ("dp4 pp4 mbs1 ac=full@1", {"dp": 8, "pp": 2}, "dp8 pp2 mbs1 ac=full@1"),
        ("dp2 cp2 zero1/2 mbs1 cp=ulysses", {"dp": 2, "cp": 1, "tp": 2}, "dp2 tp2 zero1 mbs1"),
        ("dp8 zero3/4 mbs1", {"dp": 1, "tp": 8}, "tp8 mbs1"),
        ("dp8 zero3/8 mbs1", {"mbs": 2}, "dp8 zero3/8 mbs2"),  # as it was written
        ("dp2 tp4 mbs1 nosp", {"dp": 8, "tp": 1}, "dp8 mbs1"),
    ],
)
def test_change_drops_fields_that_other_degrees_exclude(text: str, fields: dict[str, int], expected: str) -> None:
    assert change(Layout.parse(text), **fields) == Layout.parse(expected)


def test_a_change_that_contradicts_the_layout_gives_none() -> None:
    assert change(Layout.parse("dp4 mbs1"), ep=3) is None
    assert change(Layout.parse("dp4 mbs1"), cp_kind="ulysses") is None


def test_single_changes_give_the_expected_layouts() -> None:
    layout = Layout.parse("dp4 pp2 v2 zero2/2 mbs1")
    assert [str(with_zero(layout, zero)) for zero in (0, 3)] == [
        str(Layout.parse(text)) for text in ("dp4 pp2 v2 zero0 mbs1", "dp4 pp2 v2 zero3/2 mbs1")
    ]
    assert with_virtual_stages(layout, 1) == Layout.parse("dp4 pp2 zero2/2 mbs1")
    assert with_virtual_stages(layout, 4) == Layout.parse("dp4 pp2 v4 zero2/2 mbs1")


def test_ranks_move_between_all_axes_of_the_world() -> None:
    moved = [rank_move for rank_move in rank_moves(Layout.parse("dp2 tp2 mbs1")) if rank_move]
    assert {str(item) for item in moved} == {
        str(Layout.parse(text))
        for text in ("tp4 mbs1", "tp2 cp2 mbs1", "tp2 pp2 mbs1", "dp4 mbs1", "dp2 cp2 mbs1", "dp2 pp2 mbs1")
    }


def test_a_pipeline_that_recomputes_on_some_ranks_has_simpler_layouts_without_it() -> None:
    """``ac=full@1`` goes with the pipeline whose ranks it names; it does not rule out a layout without pipeline."""
    simpler = set(_list_moves(Layout.parse("dp4 pp2 mbs1 ac=full@1")))
    assert Layout.parse("dp8 mbs1 ac=full") in simpler


OFFERED = (
    "dp8 zero1 mbs1",
    "dp1 mbs1 ac=full",
    "dp4 tp2 zero3 mbs1",
    "dp2 pp4 zero0 mbs1",
    "cp8 zero3 mbs1 ac=full",
)


@pytest.mark.parametrize("stack", STACKS)
def test_advice_to_offload_names_software_that_does(stack: str) -> None:
    """Each layout is of its software: the job's, unless that offloads nothing, or is Fivefold, which offloads less."""
    job = Job(stack=build_stack(stack), global_batch=64)
    own = bool(job.stack.runs.offloads)
    others = not own or stack == "fivefold"
    for text in OFFERED:
        layout = Layout.parse(text)
        offers = [
            offer
            for with_activations in (False, True)
            for offer in list_offloadings(layout, job, model=LLAMA, with_activations=with_activations)
        ]
        for words, offered, other in offers:
            runs = other.stack.runs
            assert {*offered.offload} <= {*runs.offloads}
            assert "optimizer" not in offered.offload or offered.zero in runs.optimizer_offload_zero
            assert own if other is job else others
            assert ("--stack" not in words) if other is job else words.endswith(f" --stack {other.stack.name}")
            assert other is job or not {*offered.offload} <= {*job.stack.runs.offloads}
            if other is not job and is_legal(offered, model=LLAMA, job=other):
                assert can_express(offered, model=LLAMA, job=other)
    for words, offloaded in list_offload_settings(job):
        assert {*offloaded.offload} <= {*offloaded.stack.runs.offloads}
        assert own if offloaded.stack == job.stack else others
        assert (offloaded.stack == job.stack) == ("--stack" not in words)


@pytest.mark.parametrize("text", OFFERED)
def test_no_change_of_a_layout_is_one_that_the_trainer_rejects_for_offloading(text: str) -> None:
    layout, node = Layout.parse(text), resolve("h100:8", local=Path("/nowhere"))
    job = Job(global_batch=64, sequence=8192)
    changes = list_changes(model=LLAMA, machine=with_ranks(node, layout.world), job=job, layout=layout)
    offloaded = {Layout.parse(item.layout).offload for item in changes}
    assert offloaded <= {(), ("optimizer",)}
    planner = Planner(model=build_model("llama3-70b"), machine=with_ranks(node, layout.world), job=job, risk=FITS_RISK)
    for fix in find_job_fixes(planner, layout):
        if "offload" in fix.words and "--stack" not in fix.words:
            assert "offload=optimizer" in fix.words.split()


def test_a_layout_that_would_fit_in_host_memory_is_offered_with_the_software_that_runs_it() -> None:
    machine, job = resolve("rtx4090:1", local=Path("/nowhere")), Job(global_batch=16, sequence=2048)
    planner, layout = Planner(model=LLAMA, machine=machine, job=job, risk=FITS_RISK), Layout.parse("dp1 mbs1 ac=full")
    words = next(find_job_fixes(planner, layout)).words
    assert words == "zero3 offload=optimizer+parameters --stack deepspeed"
    offered = layout.replace(zero=3, offload=("optimizer", "parameters"))
    assert Planner(model=LLAMA, machine=machine, job=with_stack(job, "deepspeed"), risk=FITS_RISK).fits(offered)
    with pytest.raises(UserError, match="the trainer keeps only the optimizer in host memory"):
        check_supported(offered, job, model=LLAMA)
