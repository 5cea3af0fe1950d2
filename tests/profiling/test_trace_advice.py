"""Advice names the largest loss with its evidence; what the prediction has too is the layout's."""

from __future__ import annotations

import fivefold
from fivefold.profiling.trace_advice import advise as advise_on_report
from fivefold.results.advice import StepAdvice
from fivefold.results.trace_report import Arrivals, Breakdown, KernelLine, TraceReport
from fivefold.step import Step
from tests.rendering.test_trace_report import FIRST, REPORT


def advise(report: TraceReport, ranks: list[Breakdown], predicted: Step | None = None) -> str:
    """The sentences of the advice on one step of ``ranks``."""
    return str(advise_on_report(report.replace(breakdown=tuple(ranks)), predicted) or "")


def test_advice_names_the_late_rank() -> None:
    late = REPORT.replace(arrivals=(Arrivals(rank=3, last=9, matched=10, others_waited_seconds=0.2),))
    ranks = [FIRST.replace(exposed_seconds=0.03, waiting_seconds=0.025)]
    text = advise(late, ranks)
    assert text.startswith(
        "The largest loss is waiting for ranks that arrive late, 25.0 ms or 25% of a step. Rank 3 is"
    )
    assert "last at 9 of its 10 messages; the others wait 200.0 ms for it in all. Give all ranks equal work" in text
    assert text.endswith(
        "Without it a step would take 25% less time, 33% more tokens per second. Next is host-bound idle time, 10%."
    )


def test_communication_beyond_the_prediction_is_avoidable() -> None:
    step = fivefold.predict("nano", "h100:4", "dp4 zero3", gbs=16)
    expected = sum(step.time.exposed_seconds.values()) + step.time.bubble_seconds
    assert 0 < expected < 0.01
    ranks = [FIRST.replace(exposed_seconds=expected + 0.02, waiting_seconds=0.0)]
    text = advise(REPORT, ranks, step)
    assert "The largest loss is exposed communication, 20.0 ms or 20% of a step." in text
    assert "The longest is all_reduce over dp: 50.0 ms a step, at 86% of the bandwidth of its link." in text
    ranks = [FIRST.replace(window_seconds=3 * expected, exposed_seconds=expected, idle_host_seconds=0.0)]
    still = [rank.replace(memcpy_alone_seconds=0.0, idle_waiting_seconds=0.0) for rank in ranks]
    text = advise(REPORT, still, step)
    assert "so it belongs to the layout. Search another one" in text


def test_the_option_is_that_of_the_software_and_the_gain_is_held_against_the_prediction() -> None:
    step = fivefold.predict("nano", "h100:4", "dp4 zero3", gbs=16, stack="deepspeed")
    ranks = [FIRST.replace(exposed_seconds=0.03, waiting_seconds=0.0)]
    text = advise(REPORT.replace(messages=(), ranks=tuple(range(16))), ranks, step)
    assert "In deepspeed: overlap_comm: true" in text
    assert "per step; measured: 100.0 ms, and 7" in text
    assert "late ranks" not in text
    assert "Part of it may be waiting for late ranks, whose traces are missing." in advise(REPORT, ranks)


def test_advice_names_a_change_for_each_cause_of_lost_time() -> None:
    none = {name: 0.0 for name in Breakdown.model_fields if name.endswith("_seconds")}
    bare = FIRST.replace(**none | {"window_seconds": 0.1, "compute_seconds": 0.09})
    assert advise(REPORT, [bare]).startswith("No loss takes 5% of a step or more: compute fills 90%.")
    for field, words in {
        "idle_host_seconds": "CUDA graphs",
        "idle_loading_seconds": "num_workers",
        "idle_allocation_seconds": "expandable_segments",
        "idle_blocked_seconds": ".item()",
        "memcpy_alone_seconds": "pinned memory",
        "idle_waiting_seconds": "synchronization between streams",
    }.items():
        assert words in advise(REPORT, [bare.replace(**{field: 0.02})]), field
    assert advise(REPORT, []) == ""
    assert "10 times as many tokens per second" in advise(REPORT, [bare.replace(idle_loading_seconds=0.09)])


def test_copies_are_classified_by_direction() -> None:
    ranks = [FIRST.replace(memcpy_alone_seconds=0.08)]
    for name, words in {
        "Memcpy DtoD (Device -> Device)": "torch.cat",
        "Memcpy HtoD (Pageable -> Device)": "Copy from pinned memory",
        "Memcpy HtoD (Pinned -> Device)": "ahead on a stream of its own",
        "Memcpy DtoH (Device -> Pageable)": "less often",
    }.items():
        copies = KernelLine(category="memcpy", calls=774, seconds=0.08, longest_seconds=0.01, largest=name)
        text = advise(REPORT.replace(categories=(copies,)), ranks)
        assert f"Most of 774 copies a step are {name}." in text
        assert words in text


def test_the_advice_is_a_record() -> None:
    step = fivefold.predict("nano", "h100:4", "dp4 zero3", gbs=16, stack="deepspeed")
    ranks = (FIRST.replace(exposed_seconds=0.03, waiting_seconds=0.0),)
    advice = advise_on_report(REPORT.replace(breakdown=ranks), step)
    assert advice is not None
    assert (advice.loss, advice.stack) == ("exposed communication", "deepspeed")
    assert advice.option.startswith("overlap_comm: true")
    assert advice.loss_seconds == advice.share * advice.step_seconds
    assert advice.step_seconds == FIRST.window_seconds
    assert advice.expected_seconds == advice.step_seconds - advice.loss_seconds
    assert advice.predicted_seconds == step.time.step_seconds
    assert advice.evidence
    assert advice.change
    assert advice.following is not None
    assert advice.following.share < advice.share
    assert StepAdvice.model_validate_json(advice.model_dump_json()) == advice
