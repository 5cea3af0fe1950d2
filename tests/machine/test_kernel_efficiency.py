from pathlib import Path

import pytest

from fivefold.machine.catalog import ROWS, list_names, resolve
from fivefold.machine.spec import Chip


def chip(name: str) -> Chip:
    return resolve(name, local=Path("no/such/local.toml")).chip


def test_every_chip_states_the_sources_of_its_kernel_efficiencies():
    for name in list_names():
        assert chip(name).share_source == ROWS[name].efficiency.source
        assert 0.4 < chip(name).sustained_flops("fp16") / chip(name).peak("fp16") <= 1.01
    assert chip("h100").sustained_flops("bf16") == pytest.approx(700 * 0.91e12, rel=1e-9)
    assert chip("h100").replace(power_watts=None).sustained_flops("bf16") == pytest.approx(0.93 * 794.5e12, rel=1e-9)
    assert chip("h100").sustained_flops("fp4") == chip("h100").sustained_flops(
        "fp8"
    )  # as its peak: the nearest wider format


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [("mi300x", "bf16", 552), ("mi300x", "fp8", 981), ("mi350x", "bf16", 956), ("mi350x", "fp8", 2061)],
)
def test_cards_of_amd_hold_what_its_acceptance_tests_ask_of_them(name, dtype, tflops):
    """``target_stress`` of rvs/conf/MI300X/gst_single.conf and MI350X/gst_single.conf, on sines (kernel_efficiency)."""
    assert chip(name).sustained_flops(dtype) == pytest.approx(tflops * 1e12, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "loops"),
    [
        ("h100", "bf16", [681, 743]),  # microsoft/vidur@683364e
        ("h100", "fp8", [1217, 1382]),  # Azure/AI-benchmarking-guide
        ("b200", "bf16", [1388]),  # tmoreau89/triton@aabd14f, in fp16
        ("b300", "bf16", [1463, 1503]),  # NVIDIA/TransformerEngine@8f2e635
        ("gb200", "fp8", [2579, 2973]),  # Azure/AI-benchmarking-guide
    ],
)
def test_steps_hold_a_little_less_than_loops_of_large_matmuls(name, dtype, loops):
    shares = [chip(name).sustained_flops(dtype) / (1e12 * tflops) for tflops in loops]
    assert 0.81 < min(shares) <= max(shares) < 1.11
    assert 0.85 < sum(shares) / len(shares) < 1.03


def test_an_h800_computes_as_an_h100() -> None:
    """They differ in their links; the power limit of both is 700 W."""
    assert [chip("h800").sustained_flops(dtype) for dtype in ("bf16", "fp8")] == [
        chip("h100").sustained_flops(dtype) for dtype in ("bf16", "fp8")
    ]


def test_a_chip_without_measurements_has_sound_defaults():
    plain = Chip(name="x", peak_flops={"bf16": 1e15}, memory_bytes=2**36, memory_bandwidth=3e12, source="mine")
    assert plain.sustained_flops("bf16") == 0.75e15
    assert plain.sustained_flops("fp8") == 0.75e15
    assert "default" in plain.share_source
