"""NVIDIA's tables (NeMo, DGX Cloud, Megatron-Bridge): counts, facts, and their FLOPs against ours."""

from __future__ import annotations

import pytest

from benchmarks.published import reader
from benchmarks.published.case import Case, Excluded, rows
from benchmarks.published.readers import (
    deepseek_v3,
    dgxc_benchmarking,
    megatron_bridge_memory,
    megatron_bridge_perf,
    nemo_perf,
)
from fivefold.layout.spec import Layout
from fivefold.planner.counts.flops import work
from fivefold.planner.predict import get_planner


def cases(source: str) -> dict[str, Case]:
    return {case.row: case for case in reader(source)() if isinstance(case, Case)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "scored", "left_out"),
    [
        (nemo_perf, 12, 18),
        (dgxc_benchmarking, 125, 50),
        (megatron_bridge_perf, 168, 44),
        (megatron_bridge_memory, 17, 67),
        (deepseek_v3, 1, 4),
    ],
)
def test_every_row_of_the_data_is_read(module: object, scored: int, left_out: int) -> None:
    result = list(module.cases())  # type: ignore[attr-defined]
    assert sum(isinstance(case, Case) for case in result) == scored
    assert sum(isinstance(case, Excluded) for case in result) == left_out


def test_deepseek_v3s_hours_are_the_seconds_that_it_printed_later() -> None:
    """19.926 s a step: table 4 of arXiv:2505.09343, of the same run on the same network."""
    (case,) = cases("deepseek_v3").values()
    assert case.step_seconds == pytest.approx(19.926, rel=2e-3)
    assert case.layout.micro_batches(case.job) == 120


def flops(case: Case, *, causal: bool = False) -> int:
    done = work(case.model, layout=Layout(), job=case.job)
    return done.model_flops_causal if causal else done.model_flops_non_causal


def test_nemo_flops_count_attention_without_the_causal_mask() -> None:
    """FLOPs per token that the table's two columns imply, to the three digits printed."""
    printed = {row["row_id"]: float(row["implied_flops_per_token"] or 0) for row in rows("nemo_perf")}
    for row, case in cases("nemo_perf").items():
        assert flops(case) / case.job.tokens_per_step == pytest.approx(printed[row], rel=2e-3), row


def test_dgx_cloud_flops_equal_ours_except_for_three_conventions() -> None:
    """Of one sequence. Nemotron before v25.04 ignores GQA, 405B counts 16 query groups, Grok is causal.

    Of models with fewer layers the page prints the full model's; the rate and the MFU show their own.
    """
    printed = {row["row_id"]: row for row in rows("dgxc_benchmarking")}
    for name, case in cases("dgxc_benchmarking").items():
        row, grok = printed[name], case.model.name == "grok1-314b"
        expected = float(row["published_model_flops_per_seq"])
        if "GQA ignored" in row["flops_convention"]:
            expected *= {"nemotron4-15b": 3.85e14 / 4.345e14, "nemotron4-340b": 8.6212e15 / 1.01e16}[case.model.name]
        tolerance = 0.01 if case.model.name == "llama3-405b" else 3e-3
        if "PROXY" in row["note"]:
            expected, tolerance = float(row["implied_model_flops_per_seq"]), 0.02
        assert flops(case, causal=grok) / case.job.global_batch == pytest.approx(expected, rel=tolerance), name


def test_dgx_cloud_seconds_and_tokens_agree() -> None:
    printed = {row["row_id"]: float(row["tokens_per_s"]) for row in rows("dgxc_benchmarking")}
    for name, case in cases("dgxc_benchmarking").items():
        assert case.step_seconds is not None
        assert case.job.tokens_per_step / case.step_seconds == pytest.approx(printed[name], rel=6e-3), name


def test_dgx_cloud_rows_have_the_settings_of_their_hydra_files() -> None:
    result = cases("dgxc_benchmarking")
    grok, nemotron, gpt = (result[f"dgxc_benchmarking-{row}"] for row in ("0007", "0092", "0065"))
    assert str(grok.layout) == "dp8 tp4 cp2 pp8 ep8 etp4 v8 zero1 interleaved mbs1"
    assert "tp" not in grok.job.stack.overlap
    assert grok.model.moe is not None
    assert grok.model.moe.capacity == 1.0
    assert (nemotron.layout.ac, result["dgxc_benchmarking-0310"].layout.ac) == ("selective", "none")
    assert {"pp", "tp"} < set(gpt.job.stack.overlap)
    # grad_sync_dtype is bf16 in GPT-3's file and left to its fp32 default in Nemotron 15B's.
    assert (gpt.job.precision.summed_bytes, result["dgxc_benchmarking-0075"].job.precision.summed_bytes) == (2, 4)
    assert result["dgxc_benchmarking-0255"].job.precision.summed_bytes == 2


@pytest.mark.slow
def test_megatron_bridge_flops_count_only_visible_query_key_pairs() -> None:
    """Where token rates are not rounded: not the .01 releases and 26.08. GPT-OSS counts windows only since 26.06.

    Of Nemotron 3 Nano it counts 7 % more FLOPs than ours.
    """
    exact = {
        row["row_id"]: float(row["implied_flops_per_token"])
        for row in rows("megatron_bridge_perf")
        if not any(part in row["release"] for part in (".01", "26.08"))
        and not any(part in row["model"] for part in ("OSS", "Nemotron"))
    }
    result = {row: case for row, case in cases("megatron_bridge_perf").items() if row in exact}
    assert len(result) > 60
    for row, case in result.items():
        assert flops(case, causal=True) / case.job.tokens_per_step == pytest.approx(exact[row], rel=8e-3), row


@pytest.mark.slow
def test_megatron_bridge_rows_have_the_settings_of_their_recipes() -> None:
    result = cases("megatron_bridge_perf")
    rack, nvfp4, drop = (result[f"megatron_bridge_perf-{row}"] for row in ("0036", "0079", "0293"))
    assert (rack.machine.ranks_per_node, [link.span for link in rack.machine.links]) == (64, [64, 256])
    assert ("tp" in rack.job.stack.overlap, "tp" in nvfp4.job.stack.overlap) == (True, False)
    assert drop.model.moe is not None
    assert drop.model.moe.capacity == 1.0
    assert result["megatron_bridge_perf-0267"].job.precision.name == "fp8-grad16"
    assert result["megatron_bridge_perf-0266"].job.precision.name == "mxfp8-grad16"
    legacy, whole, hopper, flat = (
        result[f"megatron_bridge_perf-{row}"].job.stack for row in ("0098", "0048", "0151", "0258")
    )
    assert (legacy.cuda_graphs, legacy.dispatcher, legacy.pairs) == ("router", "fused", False)
    assert (whole.cuda_graphs, whole.dispatcher, whole.pairs) == ("full", "fused", True)
    assert (hopper.cuda_graphs, hopper.dispatcher, hopper.pairs) == ("none", "all_to_all", True)
    assert (flat.cuda_graphs, flat.dispatcher, flat.pairs) == ("none", "all_to_all", False)
    deepseek = result["megatron_bridge_perf-0247"]
    assert (deepseek.layout.ac, deepseek.layout.stages) == ("up+rope", (*[4] * 15, 1))
    assert result["megatron_bridge_perf-0228"].step_seconds == pytest.approx(51.3, abs=0.1)  # a regression: scored
    left_out = {case.row: case.rule for case in megatron_bridge_perf.cases() if isinstance(case, Excluded)}
    assert (result["megatron_bridge_perf-0037"].layout.pp, result["megatron_bridge_perf-0037"].layout.v) == (16, 8)
    assert left_out["megatron_bridge_perf-0077"] == megatron_bridge_perf.OFFLOADED


def test_moonlight_has_sixteen_billion_parameters_and_decimal_gigabytes() -> None:
    result = cases("megatron_bridge_memory")
    runs = [case for case in result.values() if case.rivals == "moonlight recomputation"]
    assert [case.layout.ac for case in runs] == ["none", "selective", "up+rope+mlp", "act"]
    assert runs[0].model.parameters / 1e9 == pytest.approx(15.96, rel=1e-3)
    assert runs[0].memory_bytes == pytest.approx(36.618e9)
    assert (runs[0].job.precision.total_bytes, runs[0].job.precision.moments_bytes) == (12, (2, 2))


def test_packed_samples_give_memory_but_no_time() -> None:
    runs = [case for case in cases("megatron_bridge_memory").values() if case.rivals == "llama3-70b fine-tuning"]
    assert [case.memory_bytes for case in runs] == [59e9, 55.6e9, 50.2e9]
    assert {case.step_seconds for case in runs} == {None}


def test_expert_exchanges_of_qwen3_overlap_another_micro_batch_only_where_the_recipe_says_so() -> None:
    runs = [cases("megatron_bridge_memory")[f"megatron_bridge_memory-00{row}"] for row in (23, 24, 25)]
    assert [("ep" in case.job.stack.overlap, case.job.stack.pairs) for case in runs] == [
        (False, False),
        (True, True),
        (True, True),
    ]
    assert {(case.job.stack.cuda_graphs, case.job.stack.dispatcher) for case in runs} == {("none", "all_to_all")}
    assert {case.layout.micro_batches(case.job) for case in runs} == {64}


def test_deepseek_v3_fits_as_its_authors_keep_activations() -> None:
    """On 80 GB, with which it ran: 17 chunks live on every rank (table 2 of the report). In 16 bits it would not."""
    (case,) = cases("deepseek_v3").values()
    wide = case.job.replace(stack=case.job.stack.replace(low_precision_saved=()))
    peaks, wider = (
        [rank.peak_bytes for rank in get_planner(case.model, case.machine, job).memory(case.layout)]
        for job in (case.job, wide)
    )
    assert max(peaks) < 75e9 < 80e9 < max(wider)
    assert max(peaks[2:14]) < 1.01 * min(peaks[2:14])


def test_gpt_oss_has_the_unfused_rotary_embedding_since_its_factor_of_yarn_is_applied() -> None:
    releases = {row["row_id"]: row["release"] for row in rows("megatron_bridge_perf")}
    ropes = {
        (case.model.name, releases[row] >= "26.02"): case.job.stack.rope
        for row, case in cases("megatron_bridge_perf").items()
    }
    assert (ropes["gpt-oss-120b", True], ropes["gpt-oss-120b", False]) == ("unfused", "fused")
    assert {rope for (name, _), rope in ropes.items() if name != "gpt-oss-120b"} == {"fused"}
