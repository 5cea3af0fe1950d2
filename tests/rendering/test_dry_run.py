from __future__ import annotations

import re

import pytest

from fivefold.rendering.dry_run import PeakTensors, RankPeak, render_page
from fivefold.step import Step
from tests.printed import to_text

MIB = 2**20
MOMENT = RankPeak(
    rank=0,
    parts={"activations": 84 * MIB, "parameters": 23 * MIB, "temporary": 16 * MIB},
    largest=[
        PeakTensors(
            48 * MIB,
            6,
            8 * MIB,
            "activations",
            "forward",
            "blocks.*.mlp",
            "trainer/model/mlp.py:41 Mlp.forward",
        ),
        PeakTensors(23 * MIB, 9, 8 * MIB, "parameters", "", "", ""),
    ],
)


def make_dry_run(step: Step) -> Step:
    return step.replace(kind="dry run")


@pytest.mark.parametrize("width", [60, 100, 160])
def test_findings_of_a_dry_run_are_printed_first(small: Step, width: int) -> None:
    step = make_dry_run(small)
    first = step.memory.stages[0].replace(peak_bytes=100 * MIB, peak_cause="update, zeros_like")
    text = to_text(render_page(step, findings=["rank 0 needs 5 GiB"], moment=MOMENT, first=first), width=width)
    assert text.startswith("rank 0 needs 5 GiB\n\ndry run  tiny on local:2")
    assert all(len(line) <= width for line in text.splitlines())


def test_every_number_of_the_peak_is_printed(small: Step) -> None:
    step = make_dry_run(small)
    first = step.memory.stages[0].replace(peak_bytes=100 * MIB, peak_cause="update, zeros_like")
    text = to_text(render_page(step, findings=[], moment=MOMENT, first=first), width=120)
    assert text.startswith("dry run  tiny")
    assert re.search(r"activations +84.00 MiB +49.7%", text)  # of 169 MiB at the peak
    where = r"activations allocated in forward: blocks.\*.mlp \(trainer/model/mlp.py:41 Mlp.forward\)"
    assert re.search(rf"48.00 MiB +6 × 8.00 MiB +{where}", text)
    assert re.search(r"23.00 MiB +9 of up to 8.00 MiB +parameters$", text, flags=re.MULTILINE)
    assert re.search(r"first +100.00 MiB +update, zeros_like", text)
    assert "estimated from the kernels and messages of the dry run, not measured" in text
    assert "Predicted" not in text


def test_only_unequal_counts_are_reported(small: Step) -> None:
    other = make_dry_run(small).replace(work=small.work.replace(hardware_flops=small.work.hardware_flops + 1))
    first = small.memory.stages[0]
    text = to_text(render_page(other, findings=[], moment=MOMENT, first=first, predicted=small), width=120)
    assert "9 of 10 counts are equal" in text
    below = text.split("Predicted and dry-run")[1]
    assert re.search(r"hardware FLOPs .* off by -1", below)
    assert "parameter state" not in below
    assert re.search(r"peak memory .* \+0.0%", below)
