"""Which runs are a pair: of one source and one release, on one site unless their chips differ, in one thing."""

from __future__ import annotations

import pytest

from benchmarks.published import reader
from benchmarks.published.case import Case, machine
from benchmarks.published.ratios import Pair, pair_runs, summarize_sources
from benchmarks.published.score import Score
from benchmarks.published.table import ratios_by_source_markdown
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
    rows = {case.row: case for case in reader("mlperf")() if isinstance(case, Case)}
    assert (rows["mlperf-0092"].release.strip(), rows["mlperf-0092"].site) == ("v5.0", "NVIDIA")
    months = {case.release for case in reader("mosaicgpt")() if isinstance(case, Case)}
    assert months == {"April 2023", "January 2023"}


def test_a_kind_s_error_is_shared_by_its_sources() -> None:
    """By hand: mean errors of 0.1 and 0.3 ln are a quarter and three quarters of their kind's."""
    pairs = [
        Pair(
            source=source,
            kind="layout",
            first=f"{source}-1",
            second=f"{source}-{n}",
            predicted=0.0,
            measured=0.0,
            left_out=error,
            held_out=False,
        )
        for source, n, error in (("a", 2, 0.05), ("a", 3, -0.15), ("b", 2, 0.3))
    ]
    largest, other = summarize_sources(pairs)
    assert (largest.source, largest.share) == ("b", pytest.approx(0.75))
    assert (other.source, other.bias, other.mean) == ("a", pytest.approx(-0.05), pytest.approx(0.1))
    assert (other.worst, other.worst_error) == (("a-1", "a-3"), -0.15)
    assert ratios_by_source_markdown([other]).endswith("| layout | a | 2 | -0.050 | 0.100 | 25% |\n")
