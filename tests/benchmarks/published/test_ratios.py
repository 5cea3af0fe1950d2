"""Which runs are a pair: of one source and one release, on one site unless their chips differ, in one thing."""

from __future__ import annotations

import pytest

from benchmarks.published.case import Case, machine
from benchmarks.published.ratios import pair_runs
from benchmarks.published.score import Score
from fivefold.job import Job, get_recipe
from fivefold.layout.spec import Layout
from fivefold.model.catalog import build_model
from fivefold.stack.catalog import build_stack

BASE = Case(
    "mlperf",
    "a",
    build_model("llama3-8b"),
    machine("b200", 8),
    Layout.parse("dp8 zero1"),
    Job(stack=build_stack("nemo")),
    step_seconds=1.0,
    release="v5.0",
    site="Dell",
)
FP8 = BASE._replace(row="b", job=BASE.job.replace(precision=get_recipe("fp8")))
GB200 = BASE._replace(row="b", machine=machine("gb200", 8))


@pytest.mark.parametrize(
    ("other", "kinds"),
    [
        (FP8, ["precision"]),
        (FP8._replace(release="v5.1"), []),
        (FP8._replace(site="NVIDIA"), []),
        (GB200._replace(site="NVIDIA"), ["chip"]),
        (GB200._replace(site="NVIDIA", release="v5.1"), []),
    ],
)
def test_pairs_are_of_one_release_and_of_one_site_unless_chips_differ(other: Case, kinds: list[str]) -> None:
    cases = {(case.source, case.row): case for case in (BASE, other)}
    scores = [
        Score(source=source, row=row, layout="", quantity="time", predicted=1.0, measured=1.0) for source, row in cases
    ]
    assert [pair.kind for pair in pair_runs(scores, cases)] == kinds


def test_releases_and_sites_are_read() -> None:
    from benchmarks.published import reader

    rows = {case.row: case for case in reader("mlperf")() if isinstance(case, Case)}
    assert (rows["mlperf-0092"].release.strip(), rows["mlperf-0092"].site) == ("v5.0", "NVIDIA")
    months = {case.release for case in reader("mosaicgpt")() if isinstance(case, Case)}
    assert months == {"April 2023", "January 2023"}
