"""No accuracy claim without its run: table and sentences are made anew, and no source may get worse than its bound.

``make test`` scores the sources that take a third of the time and compares what does not depend on the others. A wanted
change is frozen with ``FIVEFOLD_FREEZE=1 pytest --long tests/benchmarks/published/test_accuracy.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest

from benchmarks.published import SOURCES, Report, exclusions, headline, run, table_markdown
from benchmarks.published.intervals import coverage, learn, write
from benchmarks.published.ratios import learn_ratios, summarize_pairs, summarize_sources, write_ratios
from benchmarks.published.score import RESOLUTION, Score
from benchmarks.published.table import ratios_by_source_markdown, ratios_markdown
from fivefold.planner.time.errors import TABLE
from fivefold.planner.time.ratio_errors import TABLE as RATIO_TABLE
from tests.docs.figures import list_figures

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE, README = ROOT / "docs/explanation/how-a-step-costs/published.md", ROOT / "README.md"
LARGE = (
    "vtrain",
    "megatron_bridge_perf",
    "aleph_alpha",
    "mlperf",
    "mosaicgpt",
    "dgxc_benchmarking",
)  # 2,000 of 2,800 runs
FREEZE = os.environ.get("FIVEFOLD_FREEZE") == "1"

# Mean absolute error that each may have, in percent: a little over what it has today.
BOUNDS = {
    ("korthikanti2022", "time"): 9.5,
    ("korthikanti2022", "states"): 0.5,
    ("korthikanti2022", "activations"): 1.0,
    ("vtrain", "time"): 10.5,  # of those that ran
    ("vtrain", "composed"): 11.0,  # its profile of one micro-batch has no sums of gradients
    ("simumax_b200", "time"): 4.0,  # 3.5 while an expert took 8 us to launch on any host: decision 060
    ("simumax_b200", "peak"): 0.5,
    ("simumax_b200", "reserved"): 1.5,
    ("zero_bubble", "time"): 3.5,
    ("zero_bubble", "time, held out"): 6.0,
    ("zero_bubble", "peak"): 3.5,
    ("llm_foundry", "time"): 5.5,
    ("nemo_perf", "time"): 4.5,
    ("dgxc_benchmarking", "time"): 5.0,
    ("dgxc_benchmarking", "time, held out"): 3.1,
    ("megatron2021", "time"): 12.0,  # 10.2 while sums of gradients cost half of their bytes (decision 058)
    ("megatron_bridge_perf", "time"): 8.0,
    ("megatron_bridge_perf", "time, held out"): 9.0,  # Nemotron 3 Nano and Super, up to -16 %
    ("megatron_bridge_memory", "time"): 8.5,
    ("megatron_bridge_memory", "peak"): 5.5,
    ("megatron_bridge_memory", "peak, held out"): 4.0,
    ("ultrascale_playbook", "time"): 13.5,  # one row of 15 at -60 %
    ("ultrascale_playbook", "peak"): 8.5,
    ("kempnerforge", "time"): 10.5,
    ("kempnerforge", "peak"): 1.5,
    ("torchtitan", "time"): 8.0,
    ("torchtitan", "time, held out"): 19.5,  # three of four with tp over eight GPUs in eager mode, all at -26 %
    ("torchtitan", "peak"): 1.0,
    ("torchtitan", "peak, held out"): 9.5,
    ("finetune_memory", "adapters"): 14.5,  # of four: LoRA within 7 %, QLoRA of an older bitsandbytes at -24 %
    ("finetune_memory", "peak"): 3.5,
    ("bloom_prequel", "peak"): 10.0,
    ("bloom_prequel", "time"): 8.0,
    ("misc_throughput", "time"): 6.5,
    ("prime_rl", "peak"): 6.0,
    ("prime_rl", "peak, held out"): 8.5,
    ("prime_rl", "time"): 17.0,
    ("prime_rl", "time, held out"): 6.0,
    ("paddlenlp", "time"): 5.5,
    ("paddlenlp", "time, held out"): 5.0,
    ("paddlenlp", "peak"): 9.0,  # 6.5 while its norms were taken for PyTorch's, which keep more: decision 071
    ("paddlenlp", "peak, held out"): 10.5,  # Qwen 7B at -25 %
    ("flagperf", "time"): 8.0,  # 5.0 while the reductions of tp's dx were exposed: decision 047; and likewise
    ("flagperf", "time, held out"): 7.5,
    ("xtuner", "time"): 17.0,
    # 13.5 while the H800 had no power limit: Qwen3 235B is 20 % too slow in 32 stages now, but not 20 % too fast in 8
    ("xtuner", "time, held out"): 17.0,
    ("megatron_moe_zoo", "time"): 8.0,  # 6.2 before norms of queries and keys took the time of two kernels
    ("megatron_moe_zoo", "time, held out"): 5.5,
    ("nemo_automodel", "time, held out"): 8.5,
    ("nanotron_bench", "time"): 13.0,
    ("nanotron_bench", "time, held out"): 33.0,  # seven of ten over several nodes, up to -75 %
    ("megascale", "time, held out"): 7.5,
    ("llama3_table4", "time, held out"): 5.5,
    ("deepseek_v3", "time, held out"): 6.5,  # 6.0 likewise
    ("mosaicgpt", "time, held out"): 10.0,
    ("aleph_alpha", "time, held out"): 6.5,
    ("mlperf", "time, held out"): 7.6,
    ("gipfelsturm", "time, held out"): 4.0,  # 21.2 before the module's power capped GH200
    ("qwen3_layouts", "time, held out"): 9.0,  # tp8 at -27 %, experts over two nodes at -63 %
    ("qwen3_layouts", "peak, held out"): 6.0,
    ("vectorlm", "time, held out"): 6.0,
    ("lumen", "time, held out"): 20.0,
    ("cluster_tests", "time, held out"): 9.5,  # bf16 on B200 +29 and +43 %
    ("modalities", "time, held out"): 10.0,  # Leonardo's network from 128 GPUs on, up to -57 %
    ("megatron_kwai", "time, held out"): 3.5,
    ("megatron_kwai", "peak, held out"): 0.5,
    ("vocabulary_parallelism", "time, held out"): 4.0,
    ("vocabulary_parallelism", "peak, held out"): 6.5,
    ("gpu_recipes", "time, held out"): 3.5,
    ("nanotron_bench", "peak"): 1.0,
    ("nanotron_bench", "peak, held out"): 1.0,
    ("nanotron_bench", "reserved"): 4.5,
    ("nanotron_bench", "reserved, held out"): 4.5,
    ("nccl_logs", "message"): 14.0,
    ("nccl_logs", "message, held out"): 17.5,
    ("nccl_efa", "message, held out"): 14.5,
}


@pytest.fixture(scope="module")
def small_report() -> Report:
    return run(source for source in SOURCES if source not in LARGE)


@pytest.fixture(scope="module")
def report() -> Report:
    return run()


def assert_within_bounds(report: Report) -> None:
    """No source of ``report`` has a larger error than it may have."""
    means = {(row.source, row.quantity): 100 * row.mean for row in report.summaries}
    assert {key: mean for key, mean in means.items() if mean > BOUNDS.get(key, 100.0)} == {}
    sources = {source for source, _ in means}
    assert {key for key in BOUNDS if key[0] in sources} <= means.keys()


def test_the_error_of_each_small_source_is_within_its_bound(small_report: Report) -> None:
    assert_within_bounds(small_report)


def list_rows(table: str) -> set[tuple[str, ...]]:
    """Return the rows of the table of sources without coverage, which depends on all other sources."""
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    return {(*cells[:9], *cells[11:]) for cells in rows}


def test_rows_of_small_sources_are_those_of_this_commit(small_report: Report, tmp_path: Path) -> None:
    """In the table of the page and in the errors that predict quotes; else run ``make figures``."""
    assert list_rows(table_markdown(small_report)) <= list_rows(PAGE.read_text(encoding="utf-8"))
    write(learn(small_report.scores), tmp_path / "errors.csv")
    made, stored = (path.read_text(encoding="utf-8").splitlines() for path in (tmp_path / "errors.csv", TABLE))
    assert made == [line for line in stored if line.split(",")[1] not in LARGE]


@pytest.mark.long
def test_the_error_of_each_source_is_within_its_bound(report: Report) -> None:
    assert_within_bounds(report)
    assert {source for source, _ in BOUNDS} <= {row.source for row in report.summaries}


def summarize_left_out(scores: Iterable[Score]) -> tuple[dict[str, float], dict[str, float]]:
    """Return mean absolute error and bias of step times by source, by constants set without the source."""
    errors: dict[str, list[float]] = {}
    for score in scores:
        if score.quantity == "time":
            errors.setdefault(score.source, []).append(score.predicted_without_source / score.measured - 1)
    means = {source: fmean(map(abs, values)) for source, values in errors.items()}
    return means, {source: fmean(values) for source, values in errors.items()}


def list_unsteady_runs(report: Report) -> set[tuple[str, str]]:
    """Return the runs of nanotron's sweep over several nodes, whose network did not stay the same: source and row."""
    times = (score for score in report.scores if score.quantity == "time")
    return {(score.source, score.row) for score in times if (score.source, score.nodes) == ("nanotron_bench", "many")}


@pytest.mark.long
def test_the_error_of_left_out_sources_is_within_its_bound(report: Report) -> None:
    """By constants set without the source, all of its runs together; the mean over sources."""
    means, biases = summarize_left_out(report.scores)
    assert fmean(means.values()) <= 0.086
    assert abs(fmean(biases.values())) <= 0.029
    assert means["simumax_b200"] <= 0.06  # whose fit was one of two before it had a prior: 6 or 16 %


@pytest.mark.long
def test_the_error_of_left_out_sources_without_the_unsteady_network_is_within_its_bound(report: Report) -> None:
    """Without nanotron's sweep over several nodes, so that no other source can get worse unseen."""
    unsteady = list_unsteady_runs(report)
    means, biases = summarize_left_out(score for score in report.scores if (score.source, score.row) not in unsteady)
    assert len(unsteady) == 9
    assert fmean(means.values()) <= 0.088  # 0.092 without the four sources that were read last
    assert abs(fmean(biases.values())) <= 0.035  # 0.03 while Blackwell in bf16 was too slow: decision 057
    assert max(means.values()) <= 0.25  # lumen, on MI325X; 0.18 without it


@pytest.mark.long
def test_repeats_of_a_run_differ_by_the_stated_resolution(report: Report) -> None:
    repeats: dict[tuple[object, ...], list[Score]] = {}
    for score in report.scores:
        if score.quantity == "time":  # equal runs have equal predictions
            configuration = (
                score.source,
                score.rivals,
                score.model,
                score.chip,
                score.layout,
                score.precision,
                score.predicted,
            )
            repeats.setdefault(configuration, []).append(score)
    spreads: dict[str, list[float]] = {}
    for (source, *_), runs in repeats.items():
        if len(runs) > 1:
            times = [item.measured for item in runs]
            spreads.setdefault(str(source), []).append(max(times) / min(times) - 1)
    assert len(spreads) >= 9
    assert median(map(median, spreads.values())) == pytest.approx(RESOLUTION, rel=0.1)


def assert_or_freeze(page: Path, made: str, *, begin: str, end: str) -> None:
    """``page`` has the figures of ``made`` from ``begin`` until ``end``; or gets all of it, where they are frozen."""
    text = page.read_text(encoding="utf-8")
    first = text.index(begin)
    last = text.index(end, first)
    if FREEZE:
        page.write_text(text[:first] + made + text[last:], encoding="utf-8")
    else:
        assert list_figures(text[first:last]) == list_figures(made)


@pytest.mark.long
def test_the_accuracy_page_has_the_table_of_this_commit(report: Report) -> None:
    assert_or_freeze(PAGE, table_markdown(report).rstrip("\n"), begin="| source | of |", end="\n\n")


@pytest.mark.long
def test_the_readme_has_the_sentences_of_this_commit(report: Report) -> None:
    start = "<!-- figures -->\n"
    assert_or_freeze(README, start + headline(report), begin=start, end="<!-- end of figures -->")


@pytest.mark.long
def test_the_headline_has_the_quantiles_of_the_errors(report: Report) -> None:
    """Against numpy's quantiles of the errors."""
    errors = [abs(score.predicted / score.measured - 1) for score in report.scores if score.quantity == "time"]
    half, most = np.quantile(errors, (0.5, 0.9), method="inverted_cdf")
    sources = len({score.source for score in report.scores if score.quantity == "time"})
    assert f"{len(errors):,} step times of {sources} sources" in headline(report)
    assert f"half within {half:.1%}, nine tenths within {most:.0%}" in headline(report)


@pytest.mark.long
def test_the_errors_that_predict_quotes_are_those_of_this_commit(report: Report, tmp_path: Path) -> None:
    write(learn(report.scores), tmp_path / "errors.csv")
    if FREEZE:
        write(learn(report.scores))
    else:
        assert TABLE.read_text(encoding="utf-8") == (tmp_path / "errors.csv").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_page_has_the_errors_of_ratios_of_this_commit(report: Report) -> None:
    assert_or_freeze(PAGE, ratios_markdown(report.ratios).rstrip("\n"), begin="| difference | pairs |", end="\n\n")


@pytest.mark.long
def test_the_page_has_the_sources_of_the_errors_of_ratios(report: Report) -> None:
    kinds = ("layout", "precision", "ranks", "chip")
    rows = [row for row in summarize_sources(report.pairs) if row.kind in kinds]
    for kind in kinds:
        assert sum(row.share for row in rows if row.kind == kind) == pytest.approx(1)
    table = ratios_by_source_markdown(row for row in rows if row.share >= 0.1)
    assert_or_freeze(PAGE, table.rstrip("\n"), begin="| difference | source |", end="\n\n")


@pytest.mark.long
def test_the_uncertainty_that_compare_prints_is_that_of_this_commit(report: Report, tmp_path: Path) -> None:
    write_ratios(learn_ratios(report.pairs), tmp_path / "ratio_errors.csv")
    if FREEZE:
        write_ratios(learn_ratios(report.pairs))
    else:
        assert RATIO_TABLE.read_text(encoding="utf-8") == (tmp_path / "ratio_errors.csv").read_text(encoding="utf-8")


@pytest.mark.long
def test_errors_of_predicted_ratios_are_smaller_than_errors_of_times(report: Report) -> None:
    """What two runs share cancels; the order of clearly different runs is the measured one."""
    kinds = {row.kind: row for row in report.ratios}
    most = {
        "layout": 0.101,
        "recomputation": 0.036,
        "precision": 0.04,
        "ranks": 0.066,
        "chip": 0.09,
    }  # chip 0.082 without Leonardo
    for kind, mean in most.items():
        assert kinds[kind].mean <= mean
    for kind, sign in (("layout", 0.87), ("micro-batch", 0.89), ("precision", 0.98), ("chip", 0.98)):
        assert kinds[kind].right_sign is not None
        assert kinds[kind].right_sign >= sign
    covered = [(row.half, row.most) for row in report.ratios if row.sources > 2]
    assert 0.45 <= fmean(half for half, _ in covered if half is not None) <= 0.75
    assert fmean(most for _, most in covered if most is not None) >= 0.78  # 0.8 without MLPerf's LoRA


@pytest.mark.long
def test_errors_of_ratios_without_the_unsteady_network_are_those_on_the_page(report: Report) -> None:
    """Without the pairs of nanotron's sweep over several nodes, so that no other source can get worse unseen."""
    unsteady = list_unsteady_runs(report)
    pairs = [
        pair for pair in report.pairs if unsteady.isdisjoint(((pair.source, pair.first), (pair.source, pair.second)))
    ]
    kinds = {row.kind: row.mean for row in summarize_pairs(pairs)}
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{len(report.pairs) - len(pairs)} pairs have a run of nanotron's sweep over several nodes" in text
    assert f"the mean error of layout is {kinds['layout']:.3f}, that of micro-batch {kinds['micro-batch']:.3f}" in text
    assert f"one pair only, {kinds['ranks']:.3f}." in text
    assert kinds["layout"] <= 0.082
    assert kinds["ranks"] <= 0.037


@pytest.mark.long
def test_the_page_states_the_share_of_complete_rows_that_is_scored(report: Report) -> None:
    result = exclusions.shares(report.scores, ((item.source, item.row, item.rule) for item in report.excluded))
    table = "".join(exclusions.markdown(result)).rstrip("\n")
    assert_or_freeze(PAGE, table, begin="| source | scored |", end="\n\n")
    scored, words = (sum(item[at] for item in result) for at in (1, -1))
    assert scored / (scored + words) >= 0.93  # 22 rows are of Nemotron 3 Super and later, whose recipes were not read
    told = {item.rule for item in report.excluded}
    assert {*exclusions.OTHER, *exclusions.WORDS} <= told  # none that no row breaks
    rows = {(score.source, score.row.partition(" ")[0]) for score in (*report.scores, *report.excluded)}
    assert sum(sum(item[1:]) for item in result) == sum(not source.startswith("nccl") for source, _ in rows)


@pytest.mark.long
def test_the_fastest_predicted_layout_of_a_source_is_nearly_the_fastest_measured(report: Report) -> None:
    """Per source: layouts that were tried side by side come in the measured order, and our pick costs little more."""
    regrets = {(row.source, row.quantity): row.regret for row in report.summaries if row.regret is not None}
    assert regrets["vtrain", "time"] < 0.03
    assert regrets["vtrain", "composed"] < 0.06
    assert regrets["simumax_b200", "time"] < 0.02
    assert regrets["bloom_prequel", "time"] < 0.05


@pytest.mark.long
@pytest.mark.parametrize("quantity", ["time", "allocated", "reserved"])
def test_left_out_sources_fall_inside_intervals_fitted_to_the_others(report: Report, quantity: str) -> None:
    """Mean over sources, and over runs."""
    results = [item for item in coverage(report.scores) if item.quantity == quantity]
    assert len(results) >= 5
    # of times 0.66, as four runs of nanotron widen all intervals; of allocated bytes 0.73, as PaddleNLP's nine do
    assert 0.45 <= fmean(result.half for result in results) <= 0.75
    assert fmean(result.most for result in results) >= 0.9
    runs = sum(result.runs for result in results)
    assert sum(result.most * result.runs for result in results) / runs >= 0.88


@pytest.mark.long
def test_intervals_of_all_counters_of_memory_cover_their_share(report: Report) -> None:
    """Also with the driver's bytes, of which the one source's intervals come from what allocators reserved."""
    results = [item for item in coverage(report.scores) if item.quantity != "time"]
    assert {item.quantity for item in results} == {"allocated", "reserved", "driver"}
    assert 0.45 <= fmean(result.half for result in results) <= 0.65
    assert fmean(result.most for result in results) >= 0.89


@pytest.mark.long
def test_errors_of_left_out_sources_are_reported_with_the_others(report: Report) -> None:
    """Sources that a constant was set on are worse without; their scores by these constants are no evidence."""
    rows = {(row.source, row.quantity): row for row in report.summaries}
    assert all(row.left_out is not None for (_, quantity), row in rows.items() if quantity in ("time", "peak"))
    for source, quantity in (("vtrain", "composed"), ("megatron_bridge_perf", "time"), ("llm_foundry", "time")):
        row = rows[source, quantity]
        assert row.left_out is not None
        assert row.left_out > row.mean
