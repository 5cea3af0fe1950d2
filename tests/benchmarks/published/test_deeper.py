"""Facts of the sources that came last: counters, what each leaves out, models and layouts as they print them."""

from __future__ import annotations

import re
from statistics import median

import pytest

from benchmarks.published import reader, run
from benchmarks.published.case import Case, Excluded, rows
from benchmarks.published.cells import find_model
from benchmarks.published.readers import megatron_moe_zoo, xtuner
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.units import GIB, MIB


def cases(source: str) -> dict[str, Case]:
    return {case.row: case for case in reader(source)() if isinstance(case, Case)}


@pytest.mark.parametrize(
    ("source", "scored", "left_out"),
    [
        ("prime_rl", 40, 49),  # adapters on frozen weights, two offloaded runs, RTX A6000
        ("nanotron_bench", 29, 0),  # nine of them twice, for reserved bytes
        ("paddlenlp", 9, 2),
        ("flagperf", 12, 15),
        ("xtuner", 26, 12),
        ("megatron_moe_zoo", 6, 12),
        ("nemo_automodel", 12, 5),  # three empty their pipeline often; recipes of two were not read
        ("mosaicgpt", 238, 0),
        ("fms_acceleration", 0, 13),
        ("aleph_alpha", 377, 607),  # 563 ended out of memory, 24 have attention of separate kernels
        ("mlperf", 183, 37),  # of 35 neither the log nor one configuration states the layout
        ("gipfelsturm", 9, 0),
        ("qwen3_layouts", 20, 3),  # two ended out of memory, one offloads activations
        ("vectorlm", 18, 0),
        ("lumen", 4, 4),
        ("cluster_tests", 12, 3),
        ("modalities", 163, 14),  # the heads of the 28B are not stated
        ("megatron_kwai", 16, 53),  # a share of activations is offloaded
        ("vocabulary_parallelism", 16, 24),  # the head is spread over the stages
        ("gpu_recipes", 3, 0),
    ],
)
def test_every_row_of_the_data_is_read(source: str, scored: int, left_out: int) -> None:
    result = list(reader(source)())
    assert sum(isinstance(case, Case) for case in result) == scored
    assert sum(isinstance(case, Excluded) for case in result) == left_out


def test_runs_of_mlperf_are_as_their_logs_print_them() -> None:
    """Also where the log and the configuration of that number of nodes differ in precision, layout or CUDA graphs."""
    of = cases("mlperf")
    jobs = {row: of[f"mlperf-{row}"].job for row in ("0154", "0184", "0187", "0201", "0207")}
    precisions = {row: job.precision.name for row, job in jobs.items()}
    assert precisions["0201"] == precisions["0207"] == precisions["0184"]  # as Nebius's, in nvfp4
    assert "nvfp4" in precisions["0184"]
    assert precisions["0187"].startswith("fp8")
    assert jobs["0154"].stack.cuda_graphs == "full"
    assert [str(of[f"mlperf-{row}"].layout) for row in ("0108", "0114", "0133")] == [
        "dp4 cp2 zero1 mbs1",
        "dp4 cp2 zero1 mbs1",
        "dp4 tp2 zero1 mbs1",
    ]


def test_runs_of_mlperf_have_the_buckets_and_the_common_settings_of_their_configurations() -> None:
    """BUCKET_SIZE of NVIDIA's; without it 128 Mi elements. Those of the University of Florida are in two folders."""
    of = cases("mlperf")
    jobs = {row: of[f"mlperf-{row}"].job for row in ("0171", "0178", "0194", "0212", "0216", "0221", "0222")}
    sizes = {row: job.stack.ddp_bucket_size for row, job in jobs.items()}
    assert sizes["0171"] == sizes["0178"] == sizes["0194"] == (768_000_000, 0)
    assert sizes["0212"] == sizes["0216"] == sizes["0221"] == sizes["0222"] == (2**27, 0)
    assert jobs["0212"] == jobs["0216"].replace(global_batch=64) == jobs["0221"].replace(global_batch=64)


def test_every_row_has_its_commit_or_its_issue() -> None:
    """owner/repository@commit:path, or an issue: where the figures can be read again."""
    sources = (
        "prime_rl",
        "nanotron_bench",
        "paddlenlp",
        "flagperf",
        "xtuner",
        "megatron_moe_zoo",
        "nemo_automodel",
        "mosaicgpt",
        "aleph_alpha",
        "gipfelsturm",
        "qwen3_layouts",
        "vectorlm",
        "lumen",
        "modalities",
        "megatron_kwai",
        "vocabulary_parallelism",
        "gpu_recipes",
    )
    places = {row["source"] for source in (*sources, "fms_acceleration", "nccl_logs") for row in rows(source)}
    assert [place for place in places if not re.search(r"@[0-9a-f]{7}:\S|/\S+ issue \d+$", place)] == []


def test_models_of_aleph_alpha_have_the_flops_that_their_mfu_implies() -> None:
    """6N + 12·L·H·S FLOPs per token, N without norms, of 312 TFLOP/s; the mean of MFU is that of steady steps."""
    printed = {row["row_id"]: float(row["mfu"] or 0) for row in rows("aleph_alpha")}
    ratios = []
    for row, case in cases("aleph_alpha").items():
        model, tokens = case.model, case.job.global_batch * case.job.sequence
        weights = model.parameters - (2 * model.layers + 1) * model.width
        flops = 6 * weights + 12 * model.layers * model.width * case.job.sequence
        assert case.step_seconds is not None
        ratios.append(tokens * flops / (case.step_seconds * case.layout.world * 312e12) / printed[row])
    assert min(ratios) > 0.95
    assert median(ratios) == pytest.approx(1, abs=2e-4)


def test_models_of_modalities_have_the_flops_that_their_mfu_implies() -> None:
    """6 · 12·L·D² + 12·L·D·T FLOPs per token, of 312 and 989 TFLOP/s; samples/s has two or three digits."""
    printed = {row["row_id"]: row for row in rows("modalities")}
    ratios = []
    for row, case in cases("modalities").items():
        layers, width = case.model.layers, case.model.width
        flops = 72 * layers * width**2 + 12 * layers * width * case.job.sequence
        peak = {"Leonardo": 312e12, "MareNostrum 5": 989e12}[printed[row]["site"]]
        assert case.step_seconds is not None
        rate = case.job.global_batch * case.job.sequence * flops / case.step_seconds / case.layout.world
        ratios.append(rate / peak / float(printed[row]["mfu_pct"]) * 100)
    assert median(ratios) == pytest.approx(1, abs=2e-4)
    assert max(abs(ratio - 1) for ratio in ratios) < 0.003


def test_stages_without_a_layer_are_those_of_the_redistributed_runs() -> None:
    layouts = {row: case.layout for row, case in cases("vocabulary_parallelism").items()}
    assert layouts["vocabulary_parallelism-0017"].stages == (4, 4, 4, 5, 5, 5, 5, 0)
    assert layouts["vocabulary_parallelism-0016"].stages == ()


@pytest.mark.parametrize("source", ["llm_foundry", "mosaicgpt"])
def test_models_of_composer_have_the_printed_parameters(source: str) -> None:
    """Biases included."""
    printed = {row["row_id"]: int(row["n_params"]) for row in rows(source)}
    assert [row for row, case in cases(source).items() if case.model.parameters != printed[row]] == []


def test_reinforcement_learning_is_scored_only_by_memory() -> None:
    result = cases("prime_rl")
    tuned, learnt = result["prime_rl-0062"], result["prime_rl-0045"]
    assert (tuned.memory, tuned.memory_bytes, tuned.left_out) == ("reserved", 54.6 * GIB, ())
    assert tuned.step_seconds == 4.6475  # the median of three steps; tokens/s count the second one most
    assert result["prime_rl-0087"].step_seconds == pytest.approx(2 * 8 * 16384 / 54270)  # micro-batches and GPUs
    assert (tuned.job.stack.loss, tuned.job.stack.attention) == ("plain", "flash2")
    assert (learnt.step_seconds, learnt.job.stack.loss) == (None, "chunked")
    assert [quantity for quantity, _ in learnt.left_out] == ["time"]


def test_memory_in_nanotron_logs_is_scored_only_without_a_pipeline() -> None:
    result = cases("nanotron_bench")
    assert result["nanotron_bench-0005"].memory_bytes == 25808.34 * MIB
    piped = result["nanotron_bench-0003"]
    assert (piped.memory_bytes, piped.layout.stages) == (None, (14, 10))
    assert [quantity for quantity, _ in piped.left_out] == ["peak"]
    assert not piped.job.stack.async_tp


def test_paddle_has_no_sequence_parallelism_and_16_bit_gradients() -> None:
    result = cases("paddlenlp")
    assert {str(case.layout) for case in result.values()} == {"dp4 tp2 zero2 mbs1 nosp", "dp4 tp2 zero2 mbs2 nosp"}
    assert {case.job.precision.name for case in result.values()} == {"bf16-grad16"}
    assert [row for row, case in result.items() if case.model.qkv_bias] == ["paddlenlp-0011"]
    assert {case.job.stack.input_grad_all_reduces for case in result.values()} == {(3, 2), (1, 2)}
    assert result["paddlenlp-0011"].job.stack.input_grad_all_reduces == (1, 2)


def test_norms_of_paddle_are_fused_where_the_row_says_so() -> None:
    """FlagPerf's runs print it; PaddleNLP's own configurations say it, all of them."""
    printed = {row: case.job.stack for row, case in cases("flagperf").items() if case.job.stack.name == "paddlenlp"}
    assert {row: stack.kernels for row, stack in printed.items()} == {
        f"flagperf-000{row}": "norms" if row < 5 else "plain" for row in (1, 2, 3, 5, 6, 7)
    }
    assert {stack.rope for stack in printed.values()} == {"unfused"}
    assert {(case.job.stack.kernels, case.job.stack.rope) for case in cases("paddlenlp").values()} == {
        ("norms", "fused")
    }


def test_embedding_and_loss_count_as_two_layers() -> None:
    """Megatron-LM's --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split."""
    model = find_model("Qwen3 235B A22B")
    for layout, stages in (
        (Layout(pp=8, v=4, schedule="interleaved"), (2, *[3] * 30, 2)),
        (Layout(pp=8), (11, *[12] * 6, 11)),
        (Layout(pp=4), (23, 24, 24, 23)),
    ):
        assert megatron_moe_zoo.stages_of(model, layout) == stages
        assert sum(stages) == model.layers
    with pytest.raises(UserError, match="not divisible by 7"):
        megatron_moe_zoo.stages_of(model, Layout(pp=7))
    assert cases("megatron_moe_zoo")["megatron_moe_zoo-0002"].job.stack.pairs


def test_yi_has_34_billion_parameters() -> None:
    assert xtuner.YI.parameters == pytest.approx(34.4e9, rel=0.003)


def test_packed_samples_are_one_sequence_for_attention() -> None:
    """The printed TFLOP/s per token rise with the pack as the full square of attention does: same count, same rows.

    tokens/s · FLOPs per token at 4 passes (one recomputed) = TFLOP/s that the table prints, at the two ends of Llama 2
    7B: 6.74e9 parameters and 32 layers of width 4096.
    """
    printed = {row["row_id"]: row for row in rows("xtuner")}
    ratios = []
    for row in ("xtuner-0001", "xtuner-0002", "xtuner-0004"):
        sequence, rate = int(printed[row]["seq"]), float(printed[row]["tokens_per_s_per_gpu"])
        flops = 4 * (2 * 6.74e9 + 4 * 32 * 4096 * sequence / 2)
        ratios.append(float(printed[row]["tflops_per_gpu"]) * 1e12 / (rate * flops))
    assert max(ratios) / min(ratios) < 1.1, ratios


@pytest.mark.slow
def test_the_table_has_fitted_and_held_out_rows() -> None:
    report = run(["xtuner", "paddlenlp"])
    assert [(row.source, row.quantity) for row in report.summaries] == [
        ("xtuner", "time"),
        ("xtuner", "time, held out"),
        ("paddlenlp", "time"),
        ("paddlenlp", "time, held out"),
        ("paddlenlp", "peak"),
        ("paddlenlp", "peak, held out"),
    ]
