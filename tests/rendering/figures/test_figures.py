"""Pictures that explain, against others: formats against torch, collectives against gloo, masks by counting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.errors import UserError
from fivefold.machine.catalog import resolve
from fivefold.rendering.figures import collectives, formats, machine, masks, roofline
from fivefold.trainer.parallel.ring_blocks import list_zigzag_positions
from tests.selection import mark_share

TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", TORCH)
def test_formats_are_those_of_torch(name: str) -> None:
    ours, theirs = formats.FORMATS[name], torch.finfo(TORCH[name])
    assert (ours.max_value, ours.smallest_normal, ours.spacing) == (theirs.max, theirs.tiny, theirs.eps)
    assert ours.sign + ours.exponent + ours.mantissa == theirs.bits
    assert ours.min_value == theirs.smallest_normal * theirs.eps


def test_fp4_has_the_values_of_its_sixteen_codes() -> None:
    """OCP MX 1.0: ±0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    fp4 = formats.FORMATS["fp4 e2m1"]
    assert (fp4.min_value, fp4.smallest_normal, fp4.spacing, fp4.max_value) == (0.5, 1.0, 0.5, 6.0)


def _run_gloo(rank: int, name: str, ranks: int) -> list[list[float]]:
    """What gloo makes of the buffers: chunk c of rank r is 10^r · (c + 1), so that each sum tells its terms."""
    held = collectives.list_buffers_before(name, ranks)
    values = [
        torch.tensor(
            [10.0**place * (chunk + 1) if text else 0.0 for chunk, text in enumerate(row)], dtype=torch.float64
        )
        for place, row in enumerate(held)
    ]
    mine = values[rank]
    if name == "broadcast":
        dist.broadcast(mine, src=0)
    elif name == "reduce":
        dist.reduce(mine, dst=0)
        mine = mine if rank == 0 else torch.zeros(ranks)
    elif name == "all_gather":
        dist.all_gather(list(mine.split(1)), mine[rank : rank + 1].clone())
    elif name == "reduce_scatter":
        one = torch.zeros(1, dtype=torch.float64)
        dist.reduce_scatter(one, list(mine.split(1)))
        mine = torch.zeros(ranks, dtype=torch.float64)
        mine[rank] = one
    elif name == "all_reduce":
        dist.all_reduce(mine)
    else:
        out = torch.empty_like(mine)
        dist.all_to_all_single(out, mine)
        mine = out
    return mine.tolist()  # type: ignore[no-any-return]


def _gloo(ranks: int) -> dict[str, Any]:
    return {name: _run_gloo(dist.get_rank(), name, ranks) for name in collectives.NAMES}


def test_drawn_collectives_end_with_the_results_of_gloo(forked: Callable[..., list[Any]]) -> None:
    ranks = 3
    result = forked(ranks, _gloo, ranks)
    everyone = sum(10.0**rank for rank in range(ranks))

    def value(text: str) -> float:
        if not text:
            return 0.0
        chunk = int(text[1:]) + 1
        return chunk * (everyone if text[0] == "Σ" else 10.0 ** (ord(text[0]) - ord("A")))

    for name in collectives.NAMES:
        drawn = [[value(text) for text in held] for held in collectives.list_buffers_after(name, ranks)]
        assert [item[name] for item in result] == drawn, name


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_masks_are_counted_token_by_token(ranks: int) -> None:
    tokens = 2 * ranks * 50
    for kind in (False, True):
        chunk = tokens // (2 * ranks)
        counted = [0] * ranks
        for query in range(tokens):
            counted[masks.find_owner(query // chunk, ranks=ranks, zigzag=kind)] += query + 1
        assert masks.work(ranks=ranks, zigzag=kind) == pytest.approx(
            [item / sum(counted) for item in counted], rel=2e-2
        )
    for rank in range(ranks):  # as the trainer lays tokens
        held = list_zigzag_positions(ranks=ranks, rank=rank, sequence=tokens).tolist()
        assert {masks.find_owner(token * 2 * ranks // tokens, ranks=ranks, zigzag=True) for token in held} == {rank}
    assert max(masks.work(ranks=ranks, zigzag=True)) == pytest.approx(1 / ranks)


def test_a_roofline_has_every_matmul_under_the_roof() -> None:
    chip = resolve("h100", local=Path("none")).chip
    step = ff.predict("llama3-8b", "h100:8", "dp8 zero3 mbs1", seq=4096)
    values = roofline._merge_labels(
        roofline._build_value(op, ridge=chip.peak("bf16") / chip.memory_bandwidth)
        for op in roofline._merge_equal(step)
        if op.flops
    )
    assert {"mlp.up", "attention.core", "head.out"} <= {value["name"] for value in values}
    (core,) = (op for op in step.operations if op.name == "attention.core")
    assert core.causal_flops * 8192 == core.flops * 4097, "half of the square, with its diagonal"
    for value in values:
        assert value["rate"] <= min(chip.peak("bf16"), value["intensity"] * chip.memory_bandwidth)
    named = [name for value in values if value["label"] for name in (value["name"], *value["others"])]
    assert sorted(named) == sorted(value["name"] for value in values), "each belongs to one label"
    assert all(value["label"].startswith(value["name"]) for value in values if value["label"])


def draw(*words: str) -> None:
    assert CliRunner().invoke(app, ["draw", *words], catch_exceptions=False).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    mark_share(
        3,
        [
            (("roofline", "llama3-8b", "h100:8", "dp8"), ["989.00 TFLOP/s bf16", "attention.core", "of the peak"]),
            (("topology", "h100:32"), ["node 3", "NVLink 4", "9 times slower"]),
            (("bandwidth", "h100:16", "--collective", "all_gather"), ["16 ranks", "all_gather reaches"]),
            (("collectives", "3"), ["C2", "Σ1", "0.67 buffers"]),
            (("masks", "4"), ["44%", "zig-zag"]),
            (("formats", "bf16", "fp8 e4m3"), ["mantissa", "0.0078 apart"]),
            (("memory-parts", "nano", "h100:2", "dp2", "--gbs", "4"), ["peak"]),
        ],
    ),
    ids=lambda value: value[0],
)
def test_each_figure_is_drawn_by_its_command(words: tuple[str, ...], said: list[str], tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    path = tmp_path / "a.svg"
    draw(*words, "-o", str(path))
    text = path.read_text()
    assert [item for item in said if item not in text] == []
    assert "null" not in text
    assert "NaN" not in text


@pytest.mark.slow
def test_a_picture_is_also_png_and_pdf(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    for suffix, magic in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        draw("masks", "2", "-o", str(tmp_path / f"a{suffix}"))
        assert (tmp_path / f"a{suffix}").read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("formats", "bf17"), "unknown format 'bf17'; did you mean bf16"),
        (("collectives", "9"), "use 2 to 8"),
        (("masks", "one"), "is not a list of ranks"),
        (("topology",), "takes one MACHINE"),
        (("bandwidth", "h100:1"), "has one rank"),
        (("roofline", "nano"), "needs MODEL MACHINE LAYOUT"),
        (("masks", "--gbs", "16"), "masks does not depend on a job"),
        (("masks", "-o", "a.gif"), "saved as .svg, .png, .pdf or .html"),
    ],
)  # fmt: skip
def test_a_user_error_is_a_one_line_error(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=line.replace(".", r"\.")):
        CliRunner().invoke(app, ["draw", *words], catch_exceptions=False)


def test_the_figure_of_a_machine_labels_its_links() -> None:
    lines = machine.list_tiers(resolve("h100:32", local=Path("none")))
    assert lines[1] == "NVLink 4: up to 8 ranks, 450 GB/s each way a rank, sums in the switch"
    assert machine.list_rank_counts(resolve("h100:24", local=Path("none"))) == [2, 4, 8, 16, 24]
