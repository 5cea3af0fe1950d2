"""The doctor's page says what its records say."""

from __future__ import annotations

import pytest
from rich.console import Console

from fivefold.rendering.doctor import describe_advice, merge_ranges, render_page
from fivefold.results.diagnosis import Advice, Diagnosis, Fullest, Holding, ModuleCost
from fivefold.units import GIB, MIB

HOLDING = Holding(
    bytes=64 * MIB, number=2, category="activations", name="blocks.*.mlp", line="mine.py:7 loss", operation="aten::mm"
)
STEADY = Fullest(
    parameters_bytes=GIB,
    activations_bytes=3 * GIB,
    phase="backward",
    module="blocks.1.mlp",
    line="mine.py:7 loss",
    operation="aten::mm",
    largest=(HOLDING,),
)


def part(module: str, kind: str, flops: int) -> ModuleCost:
    return ModuleCost(
        module=module,
        kind=kind,
        parameters=1000,
        forward_flops=flops,
        backward_flops=2 * flops,
        recomputed_flops=0,
        kept_bytes=MIB,
    )


def make_advice(**changes: object) -> Advice:
    values = {
        "budget_bytes": 2 * GIB,
        "fits": True,
        "modules": ("blocks.0", "blocks.1", "blocks.3.mlp"),
        "predicted_peak_bytes": GIB,
        "peak_bytes": GIB + MIB,
        "extra_flops": 10,
        "extra_share": 0.05,
    }
    return Advice.model_validate(values | changes)


FOUND = Diagnosis(
    model="Gpt", optimizer="AdamW", parameters=4000, trainable=2000, parameters_bytes=GIB, gradients_bytes=GIB,
    optimizer_bytes=GIB, kept_bytes=GIB, first=STEADY.replace(activations_bytes=2 * GIB), steady=STEADY,
    forward_flops=10**9, backward_flops=2 * 10**9, recomputed_flops=0,
    parts=(part("", "Gpt", 10**9), part("blocks", "ModuleList", 10**9), part("blocks.0", "Block", 4 * 10**8),
           part("blocks.1", "Block", 6 * 10**8)),
    remarks=("mine.py:9: asks",), advice=make_advice(),
)  # fmt: skip


def text(width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as said:
        console.print(render_page(FOUND))
    return said.get()


def test_no_line_is_wider_than_the_terminal() -> None:
    assert max(map(len, text(60).splitlines())) <= 60


@pytest.mark.parametrize("width", [110, 160])
def test_the_page_of_doctor_has_memory_flops_and_parameters(width: int) -> None:
    flat = " ".join(text(width).split())
    for words in (
        "4.00 GiB at the peak",
        "3.00 GiB in the first step",
        "2.00 k trained",
        "3.00 GFLOPs a step",
        "75.0%",
        "2 × 64.00 MiB",
        "blocks.* × 2",
        "1.00 G",
        "mine.py:9: asks",
    ):
        assert words in flat
    assert "ModuleList" not in flat


def test_the_advice_says_whether_the_budget_is_enough() -> None:
    fits = str(describe_advice(make_advice()))
    assert "blocks.{0-1}, blocks.3.mlp" in fits
    assert "+5.0% FLOPs" in fits
    assert fits.endswith("\nfits")
    assert str(describe_advice(make_advice(modules=()))) == "none is needed: 1.00 GiB fits"
    assert "does not fit: too much" in str(describe_advice(make_advice(fits=False, reason="too much")))


def test_names_of_numbered_modules_are_merged_into_ranges() -> None:
    assert list(merge_ranges(["a.0", "a.1", "a.2", "a.4", "a.3.b", "c", "x.1.y.0.z", "0", "1"])) == [
        "c",
        "a.{0-2,4}",
        "a.3.b",
        "x.1.y.0.z",
        "{0-1}",
    ]
