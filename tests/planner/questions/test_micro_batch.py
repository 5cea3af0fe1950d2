"""The largest micro-batch is the last that fits, and answers say what limits it."""

from __future__ import annotations

from typing import Any

import pytest

import fivefold as ff
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.planner.predict import predict
from fivefold.planner.questions.micro_batch import find_largest_micro_batch
from fivefold.units import show_bytes
from tests.planner.questions.cases import JOB, LLAMA, NODE, fits, peak
from tests.selection import mark_share


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    layout = Layout.parse("dp8 zero3 mbs1")
    answer = find_largest_micro_batch(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    size = int(answer.value)
    assert peak(layout.replace(mbs=size)) == answer.memory_bytes
    assert fits(layout.replace(mbs=size))
    assert not fits(layout.replace(mbs=2 * size))


def test_an_answer_says_that_the_global_batch_limits_the_micro_batch() -> None:
    layout, job = Layout.parse("dp8 zero3 mbs1"), Job(sequence=4096)
    limited = find_largest_micro_batch(model=LLAMA, machine=NODE, job=job, layout=layout)
    assert limited.value == 1
    assert "the global batch of 8 is the limit, not memory" in limited.remarks[0]
    answer = find_largest_micro_batch(model=LLAMA, machine=NODE, job=JOB, layout=layout)
    assert answer.value > 1
    assert answer.remarks == ()


@pytest.mark.parametrize("words", ["dp8 zero3", "dp4 tp2 zero2", "dp2 tp2 pp2 zero1 ac=full", "dp4 cp2 zero3"])
def test_without_a_given_batch_only_memory_limits_the_micro_batch(words: str) -> None:
    layout = Layout.parse(words)
    answer = find_largest_micro_batch(
        model=LLAMA, machine=NODE, job=Job(sequence=2048), layout=layout, is_batch_given=False
    )
    size, batch = int(answer.value), 2 * layout.pp * layout.dp
    jobs = [Job(sequence=2048, global_batch=batch * number) for number in (size, size + 1)]
    assert fits(layout.replace(mbs=size), jobs[0])
    assert not fits(layout.replace(mbs=size + 1), jobs[1])
    assert peak(layout.replace(mbs=size), jobs[0]) == answer.memory_bytes


@pytest.mark.filterwarnings("ignore::fivefold.errors.UsageWarning")
@pytest.mark.parametrize("given", mark_share(2, [{}, {"gbs": 128}]))
def test_the_largest_micro_batch_of_a_chosen_layout_names_that_of_full_recomputation(given: dict[str, int]) -> None:
    (answer,) = ff.ask("micro-batch", "llama3-8b", "h100:8", seq=8192, **given)
    chosen = Layout.parse(str(answer.layout))
    assert chosen.ac != "full"
    (full,) = ff.ask("micro-batch", "llama3-8b", "h100:8", str(chosen.replace(ac="full", mbs=1)), seq=8192, **given)
    assert full.value > answer.value
    seconds = [
        float(each.step_seconds or 0) / given.get("gbs", 2 * chosen.pp * chosen.dp * each.value)
        for each in (answer, full)
    ]
    more = seconds[1] / seconds[0] - 1
    words = f"with full recomputation (ac=full) {full.line} fit; each sequence takes {more:.1%} more time"
    assert answer.remarks[-1] == words
    assert not any("full recomputation" in remark for remark in full.remarks)


def test_model_that_never_fits_is_a_one_line_error() -> None:
    with pytest.raises(
        UserError, match=r"needs at least .* per GPU, which has 79.19 GiB; its risk .* is > 99 %, more than --risk 0.05"
    ):
        find_largest_micro_batch(model=LLAMA, machine=NODE, job=JOB, layout=Layout(dp=8))


def test_a_layout_that_fits_only_with_full_recomputation_is_advised_to_recompute() -> None:
    job, layout = Job(sequence=32768, global_batch=8), Layout.parse("dp8 zero3")
    full = layout.replace(ac="full")
    asked: dict[str, Any] = {"model": LLAMA, "machine": NODE, "job": job}
    peak = show_bytes(predict(layout=full, **asked).memory.peak_bytes)
    with pytest.raises(UserError, match=f"raise zero, tp or pp, or use ac=full, which needs {peak}$"):
        find_largest_micro_batch(layout=layout, **asked)
    with pytest.raises(UserError, match=r"raise zero, tp or pp$"):
        find_largest_micro_batch(layout=Layout.parse("dp8"), **asked)


def test_a_micro_batch_that_is_not_legal_is_not_the_smallest() -> None:
    """Of 4 tokens over tp8 it takes two sequences; of these the answer says by how much they do not fit."""
    job, layout = Job(sequence=4, global_batch=64), Layout.parse("dp1 tp8")
    with pytest.raises(UserError, match=r"'dp1 tp8 zero0 mbs2' needs at least .*"):
        find_largest_micro_batch(model=build_model("llama3-405b"), machine=NODE, job=job, layout=layout)


def test_a_global_batch_that_dp_does_not_divide_is_an_error() -> None:
    with pytest.raises(UserError, match="global batch 7 is not divisible by dp"):
        find_largest_micro_batch(model=LLAMA, machine=NODE, job=Job(global_batch=7), layout=Layout(dp=8, zero=3))
