from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve as machine
from fivefold.model.catalog import resolve as model
from fivefold.planner.predict import Planner
from fivefold.planner.time.spans import build_spans, count_simulated
from fivefold.results.spans import Span

PIPELINES = ("gpipe", "1f1b", "v2 interleaved", "zb1p", "zb2p", "v2 zbv", "dualpipe", "v2 dualpipev")


def planner(name: str = "llama3-8b", *, ranks: int = 32, gbs: int = 64, **fields: object) -> Planner:
    job = Job.read({"sequence": 4096, "global_batch": gbs, **fields}, origin="test")
    return Planner(model=model(name), machine=machine(f"h100:{ranks}", local=Path("none")), job=job)


LAYOUTS = [
    ("dp32", {}),
    ("dp16 tp2 zero1 mbs2", {}),
    ("dp4 tp4 cp2 zero2", {}),
    ("dp32 zero3 ac=full", {"overlap": ()}),
    *((f"dp4 tp2 pp4 {schedule}", {}) for schedule in PIPELINES),
    ("dp4 tp2 pp4 v2 zero1 interleaved ac=full", {"gbs": 52}),  # 13 micro-batches: not a multiple of a round
    ("dp4 tp2 pp4 zero1", {"overlap": ()}),  # sends block, reductions wait
    ("dp4 tp2 pp4 v2 zero3 dualpipev", {"overlap": ("tp",)}),
    ("dp1 tp4 pp8", {"gbs": 256}),  # the timeline continues it in a straight line from its 32nd micro-batch on
    ("dp2 tp2 pp8 v2 zbv", {"gbs": 256}),
    ("dp2 tp2 pp8 v2 dualpipev", {"gbs": 256}),
]


@pytest.mark.parametrize(("text", "fields"), LAYOUTS, ids=lambda value: str(value))
def test_the_last_end_is_the_step_time(text: str, fields: dict[str, object]) -> None:
    plan, layout = planner(**fields), Layout.parse(text)
    rows = build_spans(plan, layout)
    assert max(row[-1].end for row in rows) == pytest.approx(plan.estimate(layout).step_time.seconds, rel=1e-6)
    assert len(rows) == layout.pp


@pytest.mark.parametrize("schedule", ["1f1b", "v2 interleaved", "v2 zbv", "v2 dualpipev"])
def test_a_rank_does_one_thing_at_a_time_and_everything_once(schedule: str) -> None:
    plan, layout = planner(), Layout.parse(f"dp4 tp2 pp4 {schedule}")
    done = []
    for row in build_spans(plan, layout):
        assert all(first.end <= second.start + 1e-12 for first, second in pairwise(row))
        assert all(span.end - span.start >= span.messages >= 0 for span in row)
        done += [part for span in row for part in forwards(span)]
    assert sorted(done) == [(stage, i) for stage in range(4 * layout.v) for i in range(16)]


def forwards(span: Span) -> list[tuple[int, int]]:
    return [(span.stage, span.micro_batch)] if span.kind in ("F", "FB") else []


def test_messages_of_the_spans_add_up_to_the_exposed_communication() -> None:
    """Of one rank without a pipeline: the spans' messages add up to the clock's."""
    for text in ("dp8 tp4", "dp4 cp8 zero3", "dp32 zero3"):
        plan, layout = planner(overlap=()), Layout.parse(text)
        (row,) = build_spans(plan, layout)
        step_time = plan.estimate(layout).step_time
        assert sum(span.messages for span in row) == pytest.approx(sum(step_time.exposed.values()), rel=1e-9)
        assert {axis for span in row for axis in span.axes} == set(step_time.exposed)


def test_the_spans_after_the_last_backward_have_names() -> None:
    for zero, name in ((0, "reduce gradients"), (1, "reduce gradients, gather weights"), (3, "reduce gradients")):
        (row,) = build_spans(planner(), Layout.parse(f"dp32 zero{zero}"))
        assert [span.name for span in row[-2:]] == [name, "update"]


@pytest.mark.parametrize("schedule", PIPELINES)
def test_a_long_step_is_drawn_as_a_shorter_one(schedule: str) -> None:
    """Rounds that are left out take the same time each: the line through two shorter schedules meets the full one."""
    plan, layout = planner(gbs=256), Layout.parse(f"dp4 tp2 pp4 {schedule}")
    counts = [count_simulated(layout, micro_batches=64, limit=limit) for limit in (16, 20, None)]
    assert counts == [16, 20, 64]
    first, second, whole = (max(row[-1].end for row in build_spans(plan, layout, limit=n)) for n in (16, 20, None))
    assert whole == pytest.approx(first + (second - first) * 12, rel=1e-6)


def test_a_shortened_step_keeps_the_remainder_and_two_rounds_of_micro_batches() -> None:
    layout = Layout.parse("pp8")
    assert count_simulated(layout, micro_batches=35, limit=None) == 35
    assert count_simulated(layout, micro_batches=35, limit=35) == 35
    assert count_simulated(layout, micro_batches=35, limit=30) == 27
    assert count_simulated(layout, micro_batches=35, limit=1) == 19
    assert count_simulated(layout, micro_batches=12, limit=1) == 12
