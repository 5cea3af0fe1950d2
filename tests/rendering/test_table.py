from __future__ import annotations

import pytest

from fivefold.rendering import table
from fivefold.step import Interval, Memory, Step, Time, Work
from fivefold.units import GIB
from tests.printed import to_text


def test_the_page_of_a_step_has_its_figures(small: Step) -> None:
    text = to_text(table.step(small))
    for words in (
        "predicted  tiny on local:2, 2 ranks",
        "dp2 zero1 mbs4",
        "step time 820.0 ms",
        "peak memory 169.00 MiB  ·  fits",
        "backward of the head",
        "most time in matmul",
        "exposed dp communication",
        "reduce_scatter",
    ):
        assert words in text
    assert "MFU 38.4% causal, 40.1% non-causal; HFU 40.1%" in " ".join(text.split())
    assert "by pipeline stage" not in text
    assert "bubble" not in text  # there is none
    assert len(text.splitlines()) < 40


def test_interval_of_comparable_runs_is_printed_for_time_and_memory(small: Step) -> None:
    time = Interval(
        low_90=0.7,
        low_50=0.83,
        middle=0.9,
        high_50=0.95,
        high_90=1.4,
        error=0.1,
        sources=2,
        runs=12,
        outside=("software ours",),
    )
    bounds = {name: round(getattr(time, name) * GIB) for name in ("low_90", "low_50", "middle", "high_50", "high_90")}
    peak = time.replace(**bounds, runs=0, sources=0)
    known = small.replace(time=small.time.replace(interval=time), memory=small.memory.replace(interval=peak))
    lines = to_text(table.step(known), width=160).splitlines()
    assert (
        "expected step time 820.0 ms; 50 % interval 830.0–950.0 ms, 90 % interval 700.0 ms–1.40 s"
        " (12 published runs of this kind, from 2 sources)"
    ) in lines
    assert (
        "expected peak memory 169.00 MiB; 50 % interval 849.92–972.80 MiB, 90 % interval 716.80 MiB–1.40 GiB"
        " (no published run of exactly this kind)"
    ) in lines
    assert lines.count("not covered by any published run: software ours") == 1
    assert "comparable" not in to_text(table.step(small))


def test_bars_are_as_long_as_their_shares(small: Step) -> None:
    lines = {line.split()[0]: line.count("█") for line in to_text(table.step(small)).splitlines() if "█" in line}
    assert lines["activations"] == pytest.approx(0.497 * table.BAR_WIDTH, abs=1)
    assert lines["parameters"] == pytest.approx(0.136 * table.BAR_WIDTH, abs=1)


def test_fields_that_only_measured_runs_have_are_printed_only_for_them(small: Step) -> None:
    assert {"data", "host"}.isdisjoint(to_text(table.step(small)).split())
    run = small.replace(time=small.time.replace(data_seconds=0.1, host_seconds=0.2))
    assert {"data", "host"} <= set(to_text(table.step(run)).split())


def test_a_pipeline_has_a_line_per_stage(large: Step) -> None:
    lines = to_text(table.step(large)).splitlines()
    start = next(i for i, line in enumerate(lines) if "by pipeline stage" in line)
    assert "GiB; █ states ▒ activations" in lines[start]
    assert lines[start + 2].split()[:5] == ["0", "17.00", "22.00", "2.00", "41.00"]
    assert "does not fit" in "\n".join(lines)
    assert "235.09 B, 22.19 B active" in "\n".join(lines)


@pytest.mark.parametrize("width", [1, 10, 24, 40, 80, 300])
def test_the_page_of_a_step_is_printed_at_any_width(small: Step, large: Step, width: int) -> None:
    for step in (small, large):
        text = to_text(table.step(step), width=width)
        assert max(map(len, text.splitlines())) <= width
        if width >= 24:
            assert "41.00" in text or "169.00" in text


def test_a_step_of_zeros_is_printed() -> None:
    nothing = Step(
        kind="measured",
        model="m",
        machine="x",
        layout="dp1 zero0 mbs1",
        job={},
        world=1,
        memory=Memory(peak_bytes=0, stages=()),
        work=Work(parameters=0, active_parameters=0, model_flops_causal=0, model_flops_non_causal=0, hardware_flops=0),
        traffic=(),
        time=Time(step_seconds=0.0, compute_seconds=0.0),
        tokens_per_second_per_gpu=0.0,
        mfu={"causal": 0.0, "non_causal": 0.0},
        hfu=0.0,
    )
    text = to_text(table.step(nothing))
    assert "1 rank\n" in text
    assert "none" in text
    assert "peak memory 0 B\n" in text
    assert "MFU not known" in text


def test_measured_memory_says_what_is_reserved(measured: Step) -> None:
    assert "peak memory 166.14 MiB, 583.65 MiB reserved  ·  fits" in to_text(
        table.step(measured.replace(memory=measured.memory.replace(fits=True)))
    )


def test_memory_with_the_driver_is_printed(measured: Step) -> None:
    memory = measured.memory.replace(driver_bytes=1_200_000_000)
    assert "583.65 MiB reserved, 1.12 GiB with the driver" in to_text(table.step(measured.replace(memory=memory)))


def test_time_and_cost_of_a_trillion_tokens(large: Step) -> None:
    """1e12 tokens at 2409.4 per second and GPU are 115 290 GPU-hours."""
    assert "GPU hours per 1 T tokens 115.29 k" in " ".join(to_text(table.step(large)).split())
