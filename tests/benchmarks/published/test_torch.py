"""Sources outside Megatron: counts, facts, and their parameters, MFU and seconds against ours."""

from __future__ import annotations

import pytest

from benchmarks.published import reader
from benchmarks.published.case import Case, Excluded, rows
from benchmarks.published.readers import (
    finetune_memory,
    kempnerforge,
    llm_foundry,
    misc_throughput,
    torchtitan,
    ultrascale_playbook,
)
from fivefold.layout.spec import Layout
from fivefold.model.weights import count_adapters
from fivefold.planner.counts.flops import work
from fivefold.units import GIB


def cases(source: str) -> dict[str, Case]:
    return {case.row: case for case in reader(source)() if isinstance(case, Case)}


def mfu(case: Case, *, peak_flops: float, embedding: bool = False) -> float:
    """Percent of ``peak_flops`` with attention as the full square; ``embedding``: its look-up taken for a matmul."""
    assert case.step_seconds is not None
    done = work(case.model, layout=Layout(), job=case.job).model_flops_non_causal
    done += 6 * case.model.vocab * case.model.width * case.job.tokens_per_step * embedding
    return 100 * done / case.step_seconds / case.machine.ranks / peak_flops


@pytest.mark.parametrize(
    ("module", "scored", "left_out"),
    [
        (torchtitan, 19, 24),
        (kempnerforge, 12, 15),
        (llm_foundry, 120, 0),
        (ultrascale_playbook, 15, 11),
        (misc_throughput, 40, 70),
        (finetune_memory, 7, 83),
    ],
)
def test_every_row_of_the_data_is_read(module: object, scored: int, left_out: int) -> None:
    result = list(module.cases())  # type: ignore[attr-defined]
    assert sum(isinstance(case, Case) for case in result) == scored
    assert sum(isinstance(case, Excluded) for case in result) == left_out


def test_torchtitan_mfu_is_the_printed_one() -> None:
    """6N + 12 L T D with the embedding in N, of A100's 312 TFLOP/s and H100's 989 or, with float8, 1979.

    Later versions leave the embedding out, and count heads of D / heads, which Qwen3 32B's are not.
    """
    printed = {
        row["row_id"]: float(row["mfu_pct"])
        for row in rows("torchtitan")
        if row["mfu_pct"] and row["table"] != torchtitan.READ_LATER
    }
    result = {row: case for row, case in cases("torchtitan").items() if row in printed}
    assert len(result) == 6
    for row, case in result.items():
        peak = 312e12 if case.machine.name == "a100" else 1979e12 if case.job.precision.is_low_precision else 989e12
        assert mfu(case, peak_flops=peak, embedding=True) == pytest.approx(printed[row], rel=0.01), row


def test_torchtitan_rows_have_the_settings_of_their_reports() -> None:
    result = cases("torchtitan")
    vanilla, hidden = result["torchtitan-0021"], result["torchtitan-0022"]
    assert ("tp" in vanilla.job.stack.overlap, "tp" in hidden.job.stack.overlap) == (False, True)
    assert vanilla.machine.chip.memory_bandwidth == 2.4e12
    assert (vanilla.job.precision.weights_bytes, vanilla.job.stack.reduce) == (1, "unpipelined")
    assert result["torchtitan-0037"].layout.ac == "full/2"
    assert (result["torchtitan-0011"].memory_bytes, result["torchtitan-0011"].memory) == (71.9 * GIB, "reserved")
    assert all(case.memory_bytes is None for case in result.values() if case.layout.cp > 1)  # disputed: issue 1344
    assert result["torchtitan-0010"].left_out == (("peak", torchtitan.DISPUTED),)


def test_kempnerforge_rows_have_the_printed_mfu_and_parameters() -> None:
    """Its MFU leaves the embedding out, as a table look-up is no matmul."""
    printed = {row["row_id"]: row for row in rows("kempnerforge")}
    for row, case in cases("kempnerforge").items():
        assert case.model.parameters / 1e9 == pytest.approx(float(printed[row]["params_b"]), rel=2e-3), row
        if case.step_seconds:
            assert mfu(case, peak_flops=989e12) == pytest.approx(float(printed[row]["mfu_pct"]), rel=0.06), row
            assert case.step_seconds == pytest.approx(float(printed[row]["step_s"]), abs=0.011), row


def test_kempnerforge_sums_gradients_in_fp32_only_under_fsdp() -> None:
    result = cases("kempnerforge")
    single, sharded = result["kempnerforge-0001"], result["kempnerforge-0002"]
    assert (single.job.precision.total_bytes, single.layout.zero) == (8, 0)
    assert (sharded.job.precision.summed_bytes, sharded.job.stack.reduce, sharded.layout.zero) == (4, "step", 3)
    # Two thirds of six bytes' states and the full gradient sums fit below the peak that was measured, with a margin.
    assert sharded.memory_bytes is not None
    assert 7 * sharded.model.parameters < sharded.memory_bytes < 9 * sharded.model.parameters
    assert sharded.machine.ranks_per_node == 4


def test_mpt_rows_have_the_printed_parameters_and_step_times() -> None:
    """Counts agree but for norms' biases; MFU but for learned positions, which llm-foundry takes for a matmul."""
    printed = {row["row_id"]: row for row in rows("llm_foundry")}
    for name, case in cases("llm_foundry").items():
        row = printed[name]
        assert case.model.parameters == pytest.approx(int(row["n_params"]), rel=7e-4), name
        assert case.step_seconds == pytest.approx(float(row["step_s_derived"]), rel=2e-3), name
        peak = (
            312e12
            if case.machine.name.startswith("a100")
            else 1979e12
            if case.job.precision.is_low_precision
            else 989e12
        )
        positions = case.model.positions * case.model.width / case.model.parameters
        assert mfu(case, peak_flops=peak) == pytest.approx(float(row["mfu_pct"]), rel=2e-3 + positions), name


def test_mpt_rows_have_the_precision_of_their_configs() -> None:
    result = cases("llm_foundry")
    pure, default, fp8 = (result[f"llm_foundry-{row}"].job.precision.name for row in ("0139", "0003", "0072"))
    assert (pure, default, fp8) == ("bf16-grad16", "bf16", "fp8-delayed")
    assert result["llm_foundry-0013"].layout.zero == 2


def test_playbook_rows_have_the_printed_parameters_and_step_times() -> None:
    printed = {row["row_id"]: row for row in rows("ultrascale_playbook")}
    for row, case in cases("ultrascale_playbook").items():
        assert case.model.parameters / 1e9 == pytest.approx(float(printed[row]["params_b"]), rel=4e-3), row
        assert case.step_seconds == pytest.approx(float(printed[row]["step_s_derived"]), rel=1e-3, abs=6e-4), row


def test_stages_of_playbook_rows_balance_layers_and_head() -> None:
    """1B: sixteen layers and a head worth four; the eleventh is the first to exceed ten. 80B: 81.1 layers over 16."""
    result = cases("ultrascale_playbook")
    assert result["ultrascale_playbook-0001"].layout.stages == (11, 5)
    assert result["ultrascale_playbook-0025"].layout.stages == (6, *[5] * 13, 6, 3)
    buckets = {row[-4:] for row, case in result.items() if case.job.stack.wgrad_accumulation == "deferred_buckets"}
    assert buckets == {"0006", "0013", "0020"}  # data parallel without ZeRO


def test_internevo_rows_shard_in_groups() -> None:
    result = cases("misc_throughput")
    layouts = [str(result[f"misc_throughput-{row}"].layout) for row in ("0017", "0018", "0015", "0039")]
    assert layouts == [
        "dp8 zero1 mbs2 ac=norm",
        "dp16 zero1/8 mbs2 ac=norm",
        "dp512 zero1 mbs2 ac=norm",
        "dp256 tp2 zero1/4 mbs4 ac=norm nosp",
    ]
    assert result["misc_throughput-0015"].machine.links[-1].bandwidth == 6.25e9
    rivals = result["misc_throughput-0015"].rivals
    assert sum(case.rivals == rivals for case in result.values()) == 4  # two ZeRO groups, with and without tp


def test_lora_of_litgpt_trains_as_many_parameters_as_it_prints() -> None:
    runs = [case for case in cases("finetune_memory").values() if case.quantity == "adapters"]
    bases = [case.job.base_format and case.job.base_format.label for case in runs]
    assert [case.layout.mbs for case in runs] == [2, 1, 1, 1]
    assert bases == [None, None, "nf4 without double quantization", "nf4"]
    for case in runs:
        assert case.job.sequence == 1304
        assert case.job.adapter is not None
        assert count_adapters(case.model, case.job.adapter) == 4_194_304


def test_torchtune_memory_rows_add_one_optimization_each() -> None:
    runs = [case for case in cases("finetune_memory").values() if case.quantity == "peak"]
    assert [(case.job.stack.loss, case.job.stack.kernels, case.layout.ac) for case in runs] == [
        ("plain", "plain", "none"),
        ("fused", "fused", "none"),
        ("fused", "fused", "full"),
    ]
    # Weights, gradients and two moments of two bytes each fill the last rung but for a tenth.
    assert runs[-1].memory_bytes == pytest.approx(8 * runs[-1].model.parameters, rel=0.1)
