"""Facts of single sources: stages, networks, kinds of parallelism, seconds from TFLOP/s."""

from __future__ import annotations

import pytest

from benchmarks.published import reader
from benchmarks.published.case import Case, Excluded, rows
from benchmarks.published.readers import (
    bloom_prequel,
    korthikanti2022,
    llama3_table4,
    megascale,
    megatron2021,
    simumax_b200,
    vtrain,
    zero_bubble,
)
from fivefold.layout.spec import Layout
from fivefold.layout.stages import list_stage_layers
from fivefold.planner.counts.flops import work
from fivefold.units import GIB


def cases(source: str) -> dict[str, Case]:
    return {case.row: case for case in reader(source)() if isinstance(case, Case)}


@pytest.mark.parametrize(
    ("module", "scored", "left_out"),
    [
        (korthikanti2022, 13, 29),  # four times, three figures of three columns; layers, a saving, shares, formulas
        (megatron2021, 8, 10),
        (megascale, 22, 1),
        (llama3_table4, 1, 0),
        (bloom_prequel, 51, 25),
        (vtrain, 938, 0),
        (zero_bubble, 28, 82),
        (simumax_b200, 56, 0),  # 28 rows, twice: peak and reserved bytes
    ],
)
def test_every_row_of_the_data_is_read(module: object, scored: int, left_out: int) -> None:
    result = list(module.cases())  # type: ignore[attr-defined]
    assert sum(isinstance(case, Case) for case in result) == scored
    assert sum(isinstance(case, Excluded) for case in result) == left_out


def test_table_5_is_interleaved_and_figure_1_is_of_the_first_stage() -> None:
    result = cases("korthikanti2022")
    run = result["korthikanti2022-0009"]
    assert str(run.layout) == "dp1 tp8 pp8 v3 zero0 interleaved mbs1 ac=selective"
    assert run.step_seconds == 13.75
    figure = [case for row, case in result.items() if row.startswith("korthikanti2022-0017 ")]
    assert [case.quantity for case in figure] == ["states", "activations", "activations"]
    assert figure[0].memory_bytes == 45.5625 * GIB
    # Their count: layers only, 18 bytes per parameter.
    assert figure[0].memory_bytes == 18 * 96 * 12 * 12288**2 / 64


def test_seconds_follow_from_tflops_by_the_papers_own_formula() -> None:
    """Table 1's seconds, which the data derive from the same formula to a millisecond."""
    printed = [row for row in rows("megatron2021") if row["iteration_s_derived"]]
    assert len(printed) == 6
    for row in printed:
        seconds = megatron2021.hardware_flops(row) / (float(row["hw_tflops_per_gpu"]) * 1e12 * int(row["gpus"]))
        assert seconds == pytest.approx(float(row["iteration_s_derived"]), abs=1e-3)


def test_days_for_300b_tokens_agree_with_the_seconds() -> None:
    """Table 2 prints both, the days as a whole number."""
    days = {row["row_id"]: row["days_for_300b_tokens"] for row in rows("megatron2021")}
    for row, case in cases("megatron2021").items():
        assert case.step_seconds is not None
        steps = 300e9 / case.job.tokens_per_step
        assert case.step_seconds * steps / 86400 == pytest.approx(float(days[row]), rel=0.03, abs=0.6), row


def test_printed_mfu_of_megascale_counts_half_of_attention_and_that_of_megatron_all() -> None:
    """Table 2 prints seconds and MFU: of Megatron-LM's rows by full attention, of MegaScale's by half of it."""
    result = cases("megascale")
    for row in rows("megascale"):
        if row["iteration_s"] and (case := result.get(row["row_id"])):
            done = work(case.model, layout=Layout(), job=case.job)
            flops = done.model_flops_non_causal if row["framework"] == "Megatron-LM" else done.model_flops_causal
            mfu = flops / case.step_seconds / case.machine.ranks / 312e12
            assert mfu == pytest.approx(float(row["mfu_pct"]) / 100, rel=0.03), row["row_id"]


def test_megascale_overlaps_the_messages_of_each_step_of_table_3() -> None:
    steps = [case for row, case in cases("megascale").items() if "0017" <= row[-4:] <= "0025"]
    assert [case.model.block for case in steps] == ["pre", *["parallel_shared"] * 8]
    assert [case.job.stack.overlap for case in steps[2:6]] == [(), ("tp",), ("pp", "tp"), ("dp", "pp", "tp")]
    assert [case.job.stack.attention for case in steps[5:7]] == ["unfused", "flash2"]
    assert [case.job.global_batch for case in steps] == [*[256] * 8, 768]
    seconds = [case.step_seconds for case in steps[:-1]]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("source", ["megascale", "llama3_table4", "deepseek_v3", "modalities"])
def test_sources_with_assumptions_are_not_used_in_fits(source: str) -> None:
    assert all(case.held_out for case in cases(source).values())


def test_embedding_and_head_of_llama_3_are_stages_of_their_own() -> None:
    (case,) = cases("llama3_table4").values()
    sizes = [len(stage) for stage in list_stage_layers(case.model, case.layout)]
    assert sizes == [0, *[1] * 126, 0]
    assert case.layout.micro_batches(case.job) == 32


def test_bloom_uses_the_uneven_stages_of_its_notes() -> None:
    result = cases("bloom_prequel")
    assert result["bloom_prequel-0094"].layout.stages == (*[7] * 11, 1)
    assert result["bloom_prequel-0118"].layout.stages == (8, *[9] * 10, 8)
    assert result["bloom_prequel-0057"].layout.stages == ()
    assert result["bloom_prequel-0057"].machine.links[-1].bandwidth == 6.25e9  # four 100 Gbit/s links for 8 GPUs
    assert result["bloom_prequel-0057"].memory_bytes == 55 * GIB
    assert result["bloom_prequel-0004"].job.precision.name == "bf16-grad16"


def test_the_first_and_last_stage_of_zero_bubble_rows_have_one_layer_less() -> None:
    result = cases("zero_bubble")
    assert result["zero_bubble-0010"].layout.stages == (1, *[2] * 30, 1)
    assert (result["zero_bubble-0037"].layout.v, result["zero_bubble-0037"].layout.stages) == (3, ())  # 22 layers
    assert {case.layout.schedule for case in result.values()} == {"1f1b", "interleaved", "zb1p", "zb2p"}


def test_vtrain_runs_few_micro_batches_as_gpipe() -> None:
    result = cases("vtrain")
    assert result["vtrain-0190"].layout.schedule == "gpipe"  # 2 micro-batches in 4 stages
    assert result["vtrain-0096"].layout.schedule == "1f1b"
    assert result["vtrain-0096"].step_seconds == pytest.approx(55.1096)
    assert result["vtrain-0096"].machine.links[-1].bandwidth == 12.5e9


def test_vtrain_rows_of_one_node_are_excluded() -> None:
    """To the nanosecond, micro-batches add up: with 16 beyond 8 come twice as many seconds as with 8 beyond 4."""
    result, printed = cases("vtrain"), dict[tuple[str, ...], dict[str, float]]()
    for row in rows("vtrain"):
        assert result[row["row_id"]].composed == (row["set"] == "single-node")
        if row["set"] == "single-node":
            same = tuple(row[key] for key in ("layers", "hidden", "dp", "tp", "pp", "mbs"))
            printed.setdefault(same, {})[row["microbatches"]] = float(row["iteration_ms"])
    several = [by for by in printed.values() if {"4", "8", "16"} <= by.keys()]
    assert len(several) > 40
    for by in several:
        assert by["16"] - by["8"] == pytest.approx(2 * (by["8"] - by["4"]), abs=2e-6)


def test_vtrain_composes_as_its_predictor_does() -> None:
    """No layer again, words that tp divides, and an unfused softmax on two squares of scores."""
    of = {(case.layout.tp, case.layout.mbs): case for case in cases("vtrain").values() if case.composed}
    assert {case.layout.ac for case in of.values()} == {"none"}
    assert [of[tp, 1].model.vocab for tp in (1, 2, 4, 8)] == [50257, 50256, 50256, 50256]
    kernels = [of[at].job.stack.extra_kernels for at in ((4, 1), (8, 1), (8, 2))]
    assert kernels == [(0, 12), (5, 18), (0, 12)]


def test_simumax_models_are_the_shortened_ones() -> None:
    result = cases("simumax_b200")
    llama, deepseek = result["simumax_b200-0025"].model, result["simumax_b200-0005"].model
    assert (llama.layers, llama.kv_heads) == (4, 16)
    assert deepseek.mla is not None
    assert deepseek.moe is not None
    assert (deepseek.moe.experts, deepseek.moe.shared_experts, deepseek.moe.dense_layers) == (160, 2, 1)
    assert deepseek.moe.capacity == 1.0
    assert result["simumax_b200-0037"].layout.cp_kind == "ulysses"
