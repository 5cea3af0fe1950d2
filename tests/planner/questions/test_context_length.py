"""Memory and MFU against the length of sequences, and the longest of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.adapter import Adapter
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model
from fivefold.planner.compare import with_stack
from fivefold.planner.predict import Planner
from fivefold.planner.questions import context_length
from fivefold.planner.questions.context_length import (
    LENGTH_RATIO,
    compute_lengths,
    find_longest_sequence,
    find_offloaded_sequence,
)
from fivefold.planner.questions.sequence import search_longest_sequence
from fivefold.planner.search import search
from fivefold.results.search_result import SearchResult
from tests.planner.questions.cases import JOB, SMALL


@pytest.mark.slow
def test_longest_sequences_are_listed_by_recomputation_and_cp() -> None:
    layout = Layout.parse("dp4 zero3 mbs1")
    machine = resolve("h100:4", local=Path("/nowhere"))

    def find(job: Job) -> SearchResult:
        return search(model=SMALL, machine=machine, job=job, top=1, within=0.02, axes=("cp",), placements=False)

    job = Job(sequence=4096, global_batch=64)
    result = compute_lengths(model=SMALL, machine=machine, job=job, layout=layout, search=find)
    assert [(item.cp, item.ac) for item in result.curves] == [
        (cp, ac) for cp in (1, 2, 4) for ac in ("none", "selective", "full")
    ]
    for curve in result.curves:
        other = Layout.parse(curve.layout)
        assert (other.world, other.cp, other.ac) == (4, curve.cp, curve.ac)
        for point in curve.points:
            planner = Planner(model=SMALL, machine=machine, job=job.replace(sequence=point.tokens))
            step = planner.step(other)
            assert (step.memory.peak_bytes, step.mfu.causal) == (point.peak_bytes, point.mfu)
            assert point.fits == planner.fits(other)
    assert result.longest.value >= max(item.longest for item in result.curves)
    risky = search_longest_sequence(
        model=SMALL, machine=machine, job=job, layout=Layout.parse(result.longest.layout or ""), risk=0.2
    )
    assert risky.value > result.longest.value
    assert result.longest.remarks[0] == (
        "the longest sequence has a risk of running out of memory of at most 5 %; "
        f"with --risk 0.2 its layout has {risky.value:,.0f} tokens"
    )
    assert result.longest.layout is not None
    longest_planner = Planner(model=SMALL, machine=machine, job=job.replace(sequence=int(result.longest.value)))
    assert longest_planner.fits(Layout.parse(result.longest.layout))
    assert result.offloaded is not None
    assert str(result.offloaded.layout).endswith(" offload=optimizer")  # Fivefold's own trainer keeps no more there
    about: dict[str, Any] = {"model": SMALL, "machine": machine, "job": with_stack(job, "deepspeed")}
    longest = search_longest_sequence(**about, layout=Layout.parse("cp4 zero3 mbs1 ac=full cp=ulysses"))
    offloaded = find_offloaded_sequence(longest, **about)
    assert offloaded is not None
    assert offloaded.layout == f"{longest.layout} offload=optimizer+activations"
    assert offloaded.value > longest.value
    assert find_offloaded_sequence(longest.replace(value=offloaded.value * 2), **about) is None
    lengths = {(item.cp, item.ac): item.longest for item in result.curves}
    assert lengths[1, "none"] == result.answer.value
    assert lengths[4, "full"] > lengths[4, "none"] > lengths[1, "none"]
    assert result.changes[0].startswith("the model's context length, 4096 tokens")
    changed = Layout.parse(result.changes[1].partition("the layout: ")[2].partition(" with gbs")[0])
    step = Planner(model=SMALL, machine=machine, job=job.replace(sequence=2**20, global_batch=1)).step(changed)
    assert step.memory.fits


@pytest.mark.long  # of 16 GPUs; the test above compares lengths on four
@pytest.mark.slow
def test_the_longest_sequence_of_any_layout_does_not_fall_with_a_smaller_batch() -> None:
    """Of layouts named by hand none reaches more, and fewer micro-batches take no more memory."""
    model, machine = build_model("qwen3-32b"), resolve("h200:16", local=Path("/nowhere"))
    layouts = [Layout.parse(f"dp1 tp{tp} cp{16 // tp} zero3 mbs1 ac=full") for tp in (1, 2, 4)]
    known, lengths_by_batch = Layout.parse("dp1 tp16 mbs1"), list[float]()
    for batch in (16, 1):
        about = {"model": model, "machine": machine, "job": Job(sequence=4096, global_batch=batch)}
        longest = find_longest_sequence(**about, known=[known])
        by_hand = max(search_longest_sequence(**about, layout=layout).value for layout in layouts)
        assert by_hand / LENGTH_RATIO <= longest.value
        assert "beyond the model's 40960 positions" in longest.line
        assert longest.remarks == ()
        lengths_by_batch.append(longest.value)
    assert lengths_by_batch == sorted(lengths_by_batch)
    assert lengths_by_batch[-1] > 1_350_000


def test_a_sequence_length_left_undecided_by_the_work_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = resolve("h100:4", local=Path("/nowhere"))
    monkeypatch.setattr(context_length, "LENGTH_UNITS", 0)
    longest = find_longest_sequence(
        model=SMALL, machine=machine, job=JOB.replace(global_batch=4), known=[Layout.parse("dp4 zero3 mbs1")]
    )
    assert longest.layout == "dp1 cp4 zero3 mbs1 ac=full"
    assert "was not decided within the work limit" in longest.remarks[0]


@pytest.mark.long  # of 32 GPUs; `test_longest_sequences_are_listed…` has four
@pytest.mark.slow
def test_every_length_up_to_the_longest_fits_also_in_a_pipeline() -> None:
    """A batch with fewer sequences would not fill the interleaved pipeline, or keep fewer micro-batches in memory."""
    model, machine = build_model("llama3-8b"), resolve("h100:32", local=Path("/nowhere"))
    job, layout = Job(global_batch=8), Layout.parse("dp2 tp2 cp2 pp4 v2 zero1 interleaved mbs1")
    result = compute_lengths(
        model=model,
        machine=machine,
        job=job,
        layout=layout,
        search=lambda job: search(model=model, machine=machine, job=job, top=1, axes=("cp",), placements=False),
    )
    points = [(point, curve.longest) for curve in result.curves for point in curve.points]
    assert {curve.cp for curve in result.curves for point in curve.points if point.tokens == 8192} == {2, 4}
    assert [point.fits for point, _ in points] == [point.tokens <= longest for point, longest in points]


@pytest.mark.long  # two long searches
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no layout was found to fit with sequences")
def test_the_longest_sequence_is_found_where_no_layout_fits_at_the_job_length() -> None:
    """A layout that is given and one that is found have the same answer."""

    (found,) = ff.ask("sequence", "qwen2-7b", "l4:1", adapter="lora:64", gbs=16)
    given = search_longest_sequence(
        model=build_model("qwen2-7b"),
        machine=resolve("l4:1", local=Path("/nowhere")),
        job=Job(global_batch=16, adapter=Adapter(rank=64)),
        layout=Layout.parse("dp1 zero0 mbs1 ac=full"),
    )
    assert found.longest.value == given.value > 256
    assert "no layout was found to fit with sequences of 4,096 tokens" in " ".join(found.remarks)
