"""Single changes of a layout or job and pairs of them, against predictions of the changed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.predict import Planner
from fivefold.planner.questions.changes import list_changes, list_changes_and_pairs
from fivefold.stack.catalog import build_stack
from tests.planner.questions.cases import JOB, LLAMA, NODE


@pytest.mark.filterwarnings("ignore::fivefold.errors.UsageWarning")
def test_changes_without_a_layout_name_the_one_that_is_changed() -> None:
    changes = ff.ask("changes", "llama3-8b", "h100:8")
    layout, _, why = changes[0].remarks[-1].removeprefix("changes of ").partition(", ")
    assert why == "the fastest layout that fits"
    base = ff.predict("llama3-8b", "h100:8", layout).time.step_seconds
    assert all(base / change.step_seconds == pytest.approx(change.faster) for change in changes)


def test_changes_of_a_layout_move_ranks_between_axes() -> None:
    """Half the ranks of tensor parallelism, which is wide for this model, train faster as replicas."""
    machine = resolve("h100:64", local=Path("/nowhere"))
    common = {"machine": machine, "job": Job(sequence=8192, global_batch=256)}
    best = list_changes(model=build_model("llama3-8b"), layout=Layout.parse("dp4 tp8 pp2 mbs1"), **common)[0]
    assert (best.change, best.layout) == ("dp8 tp4", "dp8 tp4 pp2 zero0 1f1b mbs1")
    experts = list_changes(model=build_model("deepseek-v2-lite"), layout=Layout.parse("dp64 ep8 zero1 mbs1"), **common)
    assert {"ep4", "ep16", "dp32 tp2", "dp32 cp2"} <= {change.change for change in experts}
    alone = list_changes(model=build_model("llama3-8b"), layout=Layout.parse("dp1 tp8 pp8 mbs1"), **common)
    assert not {"zero1", "zero2", "zero3"} & {change.change for change in alone}


@pytest.mark.parametrize(("chip", "is_tried"), [("h100", True), ("a100", False), ("rtx3090", False)])
def test_a_change_to_fp8_is_tried_on_chips_with_matrix_units_for_it(chip: str, is_tried: bool) -> None:
    machine, layout = resolve(f"{chip}:8", local=Path("/nowhere")), Layout.parse("dp8 zero3 mbs1")
    changes = list_changes(model=LLAMA, machine=machine, job=JOB.replace(global_batch=8), layout=layout)
    assert ("fp8" in {change.change for change in changes}) == is_tried


@pytest.mark.parametrize(
    ("model", "machine", "layout", "expected"),
    [
        pytest.param(  # dp4 tp4 alone does not fit
            *("llama3-70b", "h100:64", "dp2 tp8 pp4 zero1 mbs1", ("dp4 tp4", "ac=norm+act")), marks=pytest.mark.long
        ),
        ("llama3-70b", "h100:32", "dp4 tp8 zero1 mbs1", ("dp2 pp2 1f1b", "ac=norm+act")),  # nor does the layout
        ("llama3-8b", "h100:8", "dp8 zero3 mbs1", None),
    ],
)
def test_pairs_of_changes_are_listed_where_neither_change_alone_helps(
    model: str, machine: str, layout: str, expected: tuple[str, str] | None
) -> None:
    job = Job(sequence=8192, global_batch=512 if model == "llama3-70b" else 64)
    chips = resolve(machine, local=Path("/nowhere"))
    base = Planner(model=build_model(model), machine=chips, job=job)
    spec = Layout.parse(layout)
    changes = list_changes_and_pairs(model=base.model, machine=chips, job=job, layout=spec)
    fitting = [change for change in changes if change.fits and not change.together]
    if base.fits(spec):
        limit = base.estimate(spec).step_time.seconds
        fitting = [change for change in fitting if change.step_seconds < limit]
    else:
        limit = min((change.step_seconds for change in fitting if change.change != "fp8"), default=float("inf"))
    helpful = {change.change for change in fitting}
    pairs = [change for change in changes if change.together]
    assert (pairs[0].together if pairs else None) == expected
    for pair in pairs:
        assert pair.fits
        assert pair.step_seconds < limit
        assert helpful.isdisjoint(pair.together)
        assert pair.memory_bytes == Planner(model=base.model, machine=chips, job=job).peak_bytes(
            Layout.parse(pair.layout)
        )


@pytest.mark.parametrize(
    ("stack", "settings", "is_tried"),
    [
        ("torchtitan", {"compile": False, "kernels": "plain"}, True),
        ("torchtitan", {}, False),
        ("fsdp2", {}, True),
        ("megatron-core", {}, False),
        ("fivefold", {}, False),
    ],
)
def test_compiling_is_a_change_of_software_that_runs_pytorch_kernels_one_by_one(
    stack: str, settings: dict[str, Any], is_tried: bool
) -> None:
    job = Job(sequence=8192, global_batch=16, stack=build_stack(stack)).replace(**settings)
    layout = Layout.parse("dp8 zero1 mbs2" if stack == "megatron-core" else "dp8 zero3 mbs2")
    changes = list_changes_and_pairs(model=LLAMA, machine=NODE, job=job, layout=layout)
    compiled = [change for change in changes if change.change == "compile=true"]
    assert bool(compiled) == is_tried
    for change in compiled:  # as a config with torch.compile is read
        read_back = job.replace(compile=True, kernels="fused")
        estimate = Planner(model=LLAMA, machine=NODE, job=read_back).estimate(layout)
        assert (change.step_seconds, change.memory_bytes) == (estimate.step_time.seconds, estimate.peak_bytes)
        assert change.saved_bytes > 0


@pytest.mark.parametrize(
    ("model", "backend", "stack", "is_tried"),
    [
        ("nemotron3-nano-30b-a3b", "nccl", "fivefold", True),
        ("nemotron3-nano-30b-a3b", "nccl", "megatron-core", False),  # its scans are fused
        ("nemotron3-nano-30b-a3b", "gloo", "fivefold", False),  # the kernels are compiled for GPUs
        ("jamba-v0.1", "nccl", "fivefold", False),  # there are none for Mamba
        ("llama3-8b", "nccl", "fivefold", False),
    ],
)
def test_fused_scans_are_a_change_of_models_with_scans(model: str, backend: str, stack: str, is_tried: bool) -> None:
    chips = NODE.replace(backend=backend)
    job = Job(sequence=2048, global_batch=8, stack=build_stack(stack))
    layout = Layout(dp=chips.ranks, zero=1)
    changes = list_changes(model=build_model(model), machine=chips, job=job, layout=layout)
    fused = [change for change in changes if change.change == "fused_scans=true"]
    assert bool(fused) == is_tried
    for change in fused:
        after = Planner(model=build_model(model), machine=chips, job=job.replace(fused_scans=True)).estimate(layout)
        assert (change.step_seconds, change.memory_bytes) == (after.step_time.seconds, after.peak_bytes)
        assert change.faster > 1


@pytest.mark.parametrize(
    ("model", "layout", "left_out"), [("nano", "dp2 pp4 1f1b", "v2"), ("gpt-oss-20b", "dp8 ep8 zero1", "mbs2")]
)
def test_changes_to_a_layout_that_is_not_legal_are_left_out(model: str, layout: str, left_out: str) -> None:
    """nano's two layers give no eight stages, and eight sequences no two for each of eight ranks."""
    job = Job(sequence=512, global_batch=8)
    changes = list_changes(model=build_model(model), machine=NODE, job=job, layout=Layout.parse(layout))
    assert len(changes) > 5
    assert left_out not in {token for change in changes for token in change.layout.split()}


def test_changes_are_relative_to_the_given_layout() -> None:
    layout = Layout.parse("dp8 zero3 mbs1 ac=full")
    result = list_changes(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    by = {change.change: change for change in result}
    before = Planner(model=LLAMA, machine=NODE, job=JOB).estimate(layout)
    without = Planner(model=LLAMA, machine=NODE, job=JOB).estimate(layout.replace(ac="none"))
    assert by["ac=none"].faster == pytest.approx(before.step_time.seconds / without.step_time.seconds)
    assert by["ac=none"].faster > 1.1  # full recomputation is a fourth of the work
    assert by["ac=none"].saved_bytes == before.peak_bytes - without.peak_bytes < 0
    assert by["adamw8bit"].saved_bytes > 0
    assert "flash attention" not in by  # it is on
    assert "mbs2" in by
    half = list_changes(model=LLAMA, machine=NODE, job=JOB, layout=layout.replace(mbs=2))
    assert next(change.layout for change in half if change.change == "mbs1") == str(layout)


def test_a_change_of_the_schedule_leaves_stages_that_were_cut_by_hand() -> None:
    """With other numbers of stages they would not add up."""
    for text in ("dp4 pp2 stages=15-17", "dp4 pp2 zbv stages=7-8-8-9"):
        result = list_changes(model=LLAMA, machine=NODE, job=JOB, layout=Layout.parse(text))
        assert {"interleaved, twice the stages", "zero bubble"} <= {change.change for change in result}
