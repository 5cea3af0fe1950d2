"""Pictures of made-up rows: their labels, their findings, and why one is not drawn; the page on a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fivefold.rendering import charts
from fivefold.rendering.sweep.charts import PICTURES
from fivefold.rendering.sweep.settings import find_best, format_setting, list_fixed, list_varied_axes
from fivefold.rendering.sweep.table import render_page
from fivefold.results.sweep_row import SweepRow
from fivefold.units import GIB

pytest.importorskip("vl_convert")
PARTS = ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "temporary_bytes")


def row(**values: Any) -> SweepRow:
    least: dict[str, Any] = {
        "model": "small",
        "parameters": 10**9,
        "machine": "h100",
        "ranks": 8,
        "layout": "dp8 zero1 mbs1",
        "dp": 8,
        "recomputation": "none",
        "sequence": 4096,
        "batch": 256,
        "precision": "bf16",
        "stack": "fivefold",
        "status": "fits",
        "mfu_causal": 0.4,
        "tokens_per_second_per_gpu": 10_000.0,
        "step_seconds": 2.0,
        "peak_bytes": 20 * GIB,
        "capacity_bytes": 79 * GIB,
        **dict.fromkeys(PARTS, 4 * GIB),
    }
    return SweepRow(**least | values)


GRID = [
    row(
        model=model,
        parameters=size,
        ranks=ranks,
        layout=f"dp{ranks} zero{zero} mbs1",
        mfu_causal=mfu - zero / 100,
        tokens_per_second_per_gpu=1e4 * mfu,
        peak_bytes=(30 - 5 * zero) * GIB,
    )
    for model, size, ranks, mfu in (
        ("small", 10**9, 8, 0.50),
        ("small", 10**9, 16, 0.40),
        ("large", 7 * 10**10, 16, 0.45),
    )
    for zero in (0, 1)
] + [row(model="large", parameters=7 * 10**10, layout="dp8 zero0 mbs1", status="memory", mfu_causal=0.9)]
LONG = [
    row(
        sequence=sequence,
        batch=2**20 // sequence,
        recomputation=ac,
        layout=f"dp8 zero1 mbs1 ac={ac}",
        mfu_causal=mfu,
        status="fits" if sequence < 32768 or ac == "full" else "memory",
    )
    for sequence in (8192, 16384, 32768)
    for ac, mfu in (("none", 0.5), ("full", 0.4))
]


def draw_texts(name: str, rows: Sequence[SweepRow], folder: Path) -> list[str]:
    """The texts of a picture, as they stand in its file; lines of one text are joined."""
    picture = PICTURES[name](rows)
    assert not isinstance(picture, str), picture
    charts.save(picture, folder / f"{name}.svg")
    texts = re.findall(r"<text[^>]*>(.*?)</text>", (folder / f"{name}.svg").read_text())
    return [" ".join(re.findall(r"[^<>]+", re.sub(r"</?tspan[^>]*>", "<>", text))) for text in texts]


def test_the_heat_map_has_the_best_layout_in_each_cell(tmp_path: Path) -> None:
    texts = draw_texts("mfu", GRID, tmp_path)
    assert "The best layouts reach 40% to 50% MFU, most on 8 ranks" in texts
    assert {"small (1.00 B)", "large (70.00 B)", "8", "16", "ranks"} <= set(texts)
    assert {"50.0%", "40.0%", "45.0%", "none fits", "dp8", "dp16", "zero0 mbs1", "30.00 GiB"} <= set(texts)
    assert "90.0%" not in texts  # which does not fit
    assert texts.index("large (70.00 B)") < texts.index("small (1.00 B)")  # the smallest at the bottom, as one reads
    assert "null" not in texts


@pytest.mark.slow
def test_other_varied_settings_get_a_panel_each(tmp_path: Path) -> None:
    both = GRID + [item.replace(batch=1024) for item in GRID]
    assert {"batch 256", "batch 1,024"} <= set(draw_texts("mfu", both, tmp_path))


def test_a_chart_shows_throughput_against_memory(tmp_path: Path) -> None:
    faster = row(layout="dp4 tp2 zero1 mbs1", tokens_per_second_per_gpu=12_500.0, peak_bytes=40 * GIB)
    texts = draw_texts("throughput", [row(), faster], tmp_path)
    assert "2 layouts fit: 50% less memory costs 20% of the throughput" in texts
    assert {"dp4 tp2 zero1 mbs1", "peak memory per rank, GiB", "tokens/s per GPU"} <= set(texts)
    small = [item.replace(peak_bytes=2**20 * size) for item, size in ((row(), 3), (faster, 5))]
    assert "peak memory per rank, MiB" in draw_texts("throughput", small, tmp_path)


def test_the_scaling_chart_says_how_much_throughput_is_kept(tmp_path: Path) -> None:
    texts = draw_texts("scaling", GRID, tmp_path)
    assert "small keeps 80% of its throughput per GPU to 16 ranks" in texts  # large has one number of ranks alone
    one = [
        row(ranks=8, layout="dp8"),
        row(ranks=16, layout="dp16", tokens_per_second_per_gpu=9e3),
        row(ranks=8, layout="dp4 tp2", tp=2),
        row(ranks=16, layout="dp8 tp2", tp=2, tokens_per_second_per_gpu=5e3),
    ]
    texts = draw_texts("scaling", one, tmp_path)
    assert "dp·tp keeps 50% of its throughput per GPU to 16 ranks" in texts
    assert {"dp", "dp·tp", "8", "16", "tokens/s per GPU"} <= set(texts)


@pytest.mark.slow
def test_a_chart_shows_memory_and_mfu_by_sequence_length(tmp_path: Path) -> None:
    texts = draw_texts("memory", LONG, tmp_path)
    assert {"8,192", "16,384", "32,768", "ac=none", "ac=full", "activations", "optimizer"} <= set(texts)
    assert "small (1.00 B), dp8 zero1 mbs1" in texts
    texts = draw_texts("sequence", LONG, tmp_path)
    assert "small at 32,768 tokens: ac=full is best, 40% MFU" in texts
    assert {"ac=none", "ac=full", "tokens per sequence", "MFU"} <= set(texts)


def test_a_chart_shows_predicted_against_measured_times(tmp_path: Path) -> None:
    rows = [
        row(measured="measured", measured_step_seconds=2.5),
        row(),
        row(layout="dp4 tp2 zero0 mbs1", measured="measured", measured_step_seconds=1.0),
        row(layout="dp8 zero3 mbs1", measured="measured", measured_step_seconds=2.0),
    ]
    texts = draw_texts("measured", rows, tmp_path)
    assert "3 steps: predicted within 20.0% of measured (median), 100% at worst" in texts
    assert {"dp8 zero1 mbs1", "dp4 tp2 zero0 mbs1", "predicted step, s", "measured step, s"} <= set(texts)


@pytest.mark.parametrize(
    ("name", "rows", "why"),
    [
        ("mfu", [row()], "needs several models and several numbers of ranks"),
        ("mfu", [item.replace(status="memory") for item in GRID], "needs rows that fit"),
        ("throughput", [row()], "needs several layouts that fit"),
        ("scaling", LONG, "needs several numbers of ranks"),
        ("scaling", [GRID[0], GRID[4]], "needs rows that fit on several numbers of ranks"),
        ("memory", GRID, "needs several sequence lengths"),
        ("sequence", [item.replace(peak_bytes=None) for item in LONG], "needs rows with a prediction"),
        ("memory", [item.replace(peak_bytes=None) for item in LONG], "needs rows with a prediction"),
        ("measured", GRID, "needs measured rows (--measure)"),
        ("throughput", [], "needs several layouts that fit"),
    ],
)
def test_constant_settings_of_a_sweep_are_not_drawn(name: str, rows: list[SweepRow], why: str) -> None:
    assert PICTURES[name](rows) == why


def test_the_varied_settings_of_a_sweep_are_found() -> None:
    assert list_varied_axes(GRID) == ["model", "ranks"]
    assert list_varied_axes(LONG) == ["sequence"]  # its batch follows
    assert list_varied_axes([*LONG, row(sequence=8192, batch=7)]) == ["sequence", "batch"]
    assert list_fixed(GRID) == "h100, sequence 4,096, bf16, fivefold, batch 256"
    assert format_setting(GRID[0], ["model", "ranks", "batch"]) == "small, 8 ranks, batch 256"
    result = find_best(GRID, lambda item: item.ranks)
    assert {ranks: item.layout for ranks, item in result.items()} == {8: "dp8 zero0 mbs1", 16: "dp16 zero0 mbs1"}


def show(rows: Sequence[SweepRow]) -> str:
    console = Console(width=120, file=StringIO())
    with console.capture() as result:
        console.print(render_page(rows))
    return result.get().lstrip()


def test_the_page_of_a_sweep_lists_its_rows() -> None:
    text = show(GRID)
    assert text.startswith("7 rows: 6 fit, 1 do not fit in memory")
    assert [line.split()[:2] for line in text.splitlines() if "zero0" in line] == [
        ["small", "8"],
        ["small", "16"],
        ["large", "16"],
    ]
    invalid = row(status="invalid", why="layout 'dp3': global batch 256 is not divisible", mfu_causal=None)
    assert "2 invalid: layout 'dp3': global batch 256 is not divisible" in show([row(), invalid, invalid])
    assert show([]).startswith("No rows")
    tried = [
        row(measured="measured", measured_step_seconds=2.5, measured_peak_bytes=19 * GIB),
        row(layout="dp8 zero3 mbs1", measured="timeout", measured_why="was not done with 8 steps in 300 s"),
    ]
    text = " ".join(show(tried).split())
    assert "1 measured, 1 timeout" in text
    assert "2.00 s 2.50 s -20.0% 20.00 GiB 19.00 GiB" in text
    assert "2.00 s timeout 20.00 GiB was not done with 8 steps in 300 s" in text
