"""Rows that no reader has seen: every row ends as a case or as an exclusion with its rule, whatever its cells say.

Held-out rows of these sources have the same columns and other values. Each source's file is read with one cell of every
row changed: emptied, another value of that column, a value of that kind from elsewhere, or nonsense.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from benchmarks.published import SOURCES, case, cells, reader, run
from benchmarks.published.case import Case, Excluded, rows
from benchmarks.published.cells import Row
from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from tests.selection import mark_share

NONSENSE = ("", "0", "-1", "7", "3.5", "nan", "inf", "1e400", "1_000", "٣", "n/a", "unknown", "99999999999999999999")
ELSEWHERE = {
    "hardware": ("H200 SXM 141GB", "DGX-GB300", "GB200", "MI300X (192 GiB)", "A100-40GB", "TPU v5p", "H100-80GB PCIe",
                 "GH200 (not certain)", "V100-16GB", "H100 or H200"),
    "schedule": ("1f1b", "interleaved 1f1b", "interleaved 1f1b vpp2", "ZB-V", "ZB-2p", "DualPipeV", "gpipe", "v-min"),
    "precision": ("bf16 (fp32 grad accumulation)", "bf16, fp32 gradient accumulation", "fp8", "MXFP8", "NVFP4", "fp16",
                  "float8 rowwise", "FP8-SC", "int8", "fp16 or bf16"),
    "recompute": ("none", "full", "selective", "selective (every 3rd layer)", "selective: moe", "block 3"),
    "model": ("Llama 3.1 8b", "Llama 2 70B", "Mixtral 8x7B", "DeepSeekV3 (w/o MTP)", "Qwen3_32B", "PaLM 540B",
              "LLAMA3_8B (something)"),
    "zero": ("0", "1", "2", "3", "1 (4 GPUs)", "2-like FSDP"),
    "kind": ("formula",), "trust": ("low", "check"), "oom": ("y",),
}  # fmt: skip


def mutate(source: str, draw: random.Random, *, cells_of_a_row: int = 1) -> list[Row]:
    """The rows of a source, each with cells changed."""
    result = list(rows(source))
    columns = [key for key in result[0] if key not in ("row_id", "source", "note")]
    changed = []
    for row in result:
        for key in draw.sample(columns, cells_of_a_row):
            pool = [*NONSENSE, *ELSEWHERE.get(key, ()), *(draw.choice(result)[key] for _ in range(5))]
            row = row | {key: draw.choice(pool)}
        changed.append(row)
    return changed


def put(folder: Path, source: str, found: list[Row]) -> None:
    """As a data file, with a column more."""
    with (folder / f"{source}.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, fieldnames=[*found[0], "extra"])
        table.writeheader()
        table.writerows(row | {"extra": "x"} for row in found)


def check_all_accounted(found: list[Case | Excluded], source: list[Row]) -> None:
    """Each row once, but for a figure that is several cases."""
    assert {item.row.partition(" ")[0] for item in found} == {row["row_id"] for row in source}
    assert len({item.row for item in found}) == len(found)
    assert all(item.rule for item in found if isinstance(item, Excluded))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_readers_read_or_exclude_every_row(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(source)
    rounds = [mutate(source, draw, cells_of_a_row=1 + index % 3) for index in range(2)]
    monkeypatch.setattr(case, "DATA", tmp_path)
    for changed in rounds:
        put(tmp_path, source, changed)
        result = list(reader(source)())
        check_all_accounted(result, changed)
        for item in result:
            if isinstance(item, Case):
                assert item.layout.world == item.machine.ranks
                assert Layout.parse(str(item.layout)) == item.layout


@pytest.mark.slow
@pytest.mark.parametrize("source", mark_share(2, SOURCES))
def test_readers_survive_an_empty_cell_in_any_column(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of each kind of its table, with each column emptied in turn, and a line that ends early."""
    kept = list({(row["kind"], row.get("table"), row.get("framework")): row for row in rows(source)}.values())
    monkeypatch.setattr(case, "DATA", tmp_path)
    for key in kept[0].keys() - {"row_id"}:
        emptied = [row | {key: ""} for row in kept]
        put(tmp_path, source, emptied)
        check_all_accounted(list(reader(source)()), emptied)
    (tmp_path / f"{source}.csv").write_text(",".join(kept[0]) + f"\n{source}-1,open,y,high,measured\n")
    assert len(list(reader(source)())) == 1


@pytest.mark.slow
def test_layouts_invalid_for_the_planner_are_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in, scores and exclusions out."""
    draw = random.Random(7)
    sources = ("dgxc_benchmarking", "torchtitan", "megatron_bridge_memory", "zero_bubble", "kempnerforge")
    changed = {source: mutate(source, draw) for source in sources}
    monkeypatch.setattr(case, "DATA", tmp_path)
    for source, result in changed.items():
        put(tmp_path, source, result)
    report = run(sources)
    ends = {score.row.partition(" ")[0] for score in (*report.scores, *report.excluded)}
    assert ends == {row["row_id"] for outcome in changed.values() for row in outcome}


@pytest.mark.slow
def test_additional_measurements_are_listed() -> None:
    """Memory that torchtitan's table disputes, KempnerForge's with tp or alone."""
    report = run(("torchtitan", "kempnerforge", "megatron_bridge_memory", "finetune_memory"))
    listed = {refusal.row for refusal in report.excluded if " " in refusal.row}
    assert {f"torchtitan-{row} peak" for row in ("0007", "0008", "0009", "0010")} <= listed
    assert {"kempnerforge-0001 peak", "kempnerforge-0003 peak"} <= listed
    assert not listed & {f"{score.row} {score.quantity}" for score in report.scores}


TIMES = (
    "step_s", "iteration_s", "iteration_s_derived", "iteration_ms", "tokens_per_s", "tokens_per_s_per_gpu",
    "hw_tflops_per_gpu", "model_tflops_per_gpu", "mfu_pct",
)  # fmt: skip
MEMORIES = (
    "peak_allocated_gib", "peak_reserved_gib", "peak_gib", "peak_gb", "peak_mem_gib", "peak_allocated_gb",
    "mem_gb_nvidia_smi", "memory_gb", "peak_allocated_mib", "mem_gib_nvidia_smi", "mem_gb_first_stage",
    "max_memory_gb", "peak_allocated_bytes",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_every_printed_cell_of_a_scored_row_is_scored_or_listed(source: str) -> None:
    """A row that is a case loses neither its time nor its memory in silence."""
    printed = {row["row_id"]: row for row in rows(source)}
    for item in reader(source)():
        if isinstance(item, Case) and item.quantity == "peak":
            row, listed = printed[item.row], dict(item.left_out)
            time = any(row.get(key) for key in TIMES) or " h / " in row.get("value", "")  # hours for a number of tokens
            memory = any(row.get(key) for key in MEMORIES)
            assert (item.step_seconds is not None) + ("time" in listed) == time, item.row
            assert (item.memory_bytes is not None) + ("peak" in listed) == memory, item.row


def convert_row(
    source: str, row_id: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: str
) -> Case | Excluded:
    """What one row becomes with some cells changed."""
    row = next(row for row in rows(source) if row["row_id"] == f"{source}-{row_id}") | changes
    with monkeypatch.context() as patch:
        patch.setattr(case, "DATA", folder)
        put(folder, source, [row])
        result, *others = reader(source)()
    assert all(isinstance(other, Case) and other.quantity == "reserved" for other in others)
    return result


@pytest.mark.parametrize(
    ("source", "row", "changes", "expected"),
    [
        ("dgxc_benchmarking", "0065", {"hardware": "GB200"}, {"machine": "gb200"}),
        ("dgxc_benchmarking", "0255", {"hardware": "H200"}, {"machine": "h200"}),
        ("nemo_perf", "0007", {"hardware": "DGX B200", "precision": "bf16"},
         {"machine": "b200", "precision": "bf16-grad16"}),
        ("bloom_prequel", "0057", {"precision": "bf16 (fp32 grad accumulation)"}, {"sums": 4}),
        ("bloom_prequel", "0057", {"precision": "bf16"}, {"sums": 2}),
        ("bloom_prequel", "0057", {"precision": "fp16 (fp32 grad accumulation)"}, {"sums": 4}),
        ("bloom_prequel", "0057", {"recompute": "none", "hardware": "A100-40GB"}, {"ac": "none", "machine": "a100-40"}),
        ("misc_throughput", "0017", {"precision": "bf16 (fp32 grad accumulation)"}, {"sums": 4}),
        ("torchtitan", "0041", {"pp": "2", "gpus": "256", "schedule": "ZB-1p"}, {"schedule": "zb1p"}),
        ("torchtitan", "0041", {"pp": "2", "gpus": "256", "schedule": "1f1b"}, {"schedule": "1f1b"}),
        ("torchtitan", "0040", {"hardware": "H200 SXM 141GB, 400Gb/s per GPU"}, {"machine": "h200"}),
        ("torchtitan", "0040", {"recompute": "selective (every 4th layer)"}, {"ac": "full/4"}),
        ("torchtitan", "0040", {"model": "Llama 2 7B", "layers": "", "hidden": "", "heads": "", "kv_heads": "",
                                "ffn": ""}, {"model": "llama2-7b"}),
        ("vtrain", "0096", {"gbs": ""}, {"batch": 1536}),
        ("simumax_b200", "0001", {"recompute": "full", "precision": "fp8, fp32 gradient accumulation"},
         {"ac": "full", "precision": "fp8-delayed"}),
        ("ultrascale_playbook", "0001", {"hardware": "H200"}, {"machine": "h200"}),
        ("llm_foundry", "0003", {"hardware": "h100_80gb", "precision": "amp_fp8"},
         {"precision": "fp8-delayed"}),
        ("megatron_bridge_memory", "0060", {"model": "qwen3_8b", "ep": ""}, {"model": "qwen3-8b", "machine": "gb200"}),
    ],
)  # fmt: skip
def test_a_row_is_read_from_its_own_columns(
    source: str,
    row: str,
    changes: dict[str, str],
    expected: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = convert_row(source, row, tmp_path, monkeypatch, **changes)
    assert isinstance(result, Case), result
    read = {
        "machine": result.machine.name,
        "precision": result.job.precision.name,
        "sums": result.job.precision.summed_bytes,
        "ac": result.layout.ac,
        "schedule": result.layout.schedule,
        "model": result.model.name,
        "batch": result.job.global_batch,
    }
    assert expected.items() <= read.items()


@pytest.mark.parametrize(
    ("source", "row", "changes", "words"),
    [
        ("dgxc_benchmarking", "0065", {"hardware": "TPU v5p"}, "'TPU v5p' is no chip of our catalog"),
        ("dgxc_benchmarking", "0255", {"model": "PaLM 540B"}, "model 'PaLM 540B' is not in our catalog"),
        ("dgxc_benchmarking", "0255", {"gbs": "", "grad_accum": ""}, "gbs is not printed"),
        ("nemo_perf", "0007", {"model": "Mixtral-8x7B"}, "over how many ranks the experts lie"),
        ("dgxc_benchmarking", "0255", {"heads": "77"}, "heads is 77, where nemotron4-15b has 48"),
        ("torchtitan", "0041", {"pp": "2", "gpus": "256", "schedule": "interleaved 1f1b"}, "virtual stages"),
        ("torchtitan", "0040", {"recompute": "block 3"}, "recompute is 'block 3'"),
        ("torchtitan", "0040", {"precision": "int8"}, "precision 'int8' is none of ours"),
        ("torchtitan", "0040", {"gpus": "63", "tp": "2"}, "63 GPUs are not divisible by tp2"),
        ("kempnerforge", "0002", {"mbs": "two"}, "mbs is 'two', which is no whole number"),
        ("nemo_perf", "0007", {"tokens_per_s_per_gpu": ""}, "nothing was measured"),
        ("vtrain", "0001", {"heads": "7"}, "hidden 3072 is not divisible by heads 7"),
        ("simumax_b200", "0001", {"model": "qwen3"}, "unknown model 'qwen3'"),
    ],
)  # fmt: skip
def test_unreadable_rows_are_excluded_with_their_cell(
    source: str, row: str, changes: dict[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = convert_row(source, row, tmp_path, monkeypatch, **changes)
    assert isinstance(result, Excluded), result
    assert words in result.rule


def test_a_shard_of_another_size_is_not_comparable() -> None:
    texts = ("DGX-GB300", "a100_40gb", "A100-80GB SXM", "A3 (8x H100-80GB)", "B200 SXM")
    assert [cells.chip(text) for text in texts] == ["gb300", "a100-40", "a100", "h100", "b200"]
    for text in ("A100 64GB", "H100 64GB", "GH200 (not certain)", "B200 or B300", ""):
        with pytest.raises(UserError):
            cells.chip(text)
