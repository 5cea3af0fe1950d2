"""The pages of a full run, and of one run on several machines."""

from __future__ import annotations

import pytest
from rich.console import RenderableType

from fivefold.machine.datacenter import Site
from fivefold.rendering import run_estimate
from fivefold.rendering.sections import render_sections
from fivefold.results.run_estimate import Goodput, Offer, Offers, RunEstimate
from tests.printed import to_text

DAY = 86400.0
RUN = RunEstimate(
    model="tiny", machine="h100", layout="dp8 zero1 mbs1", ranks=8, tokens=2e12, steps=1000, step_seconds=864.0,
    peak_bytes=2**30, capacity_bytes=2**31, risk=0.01, training_seconds=10 * DAY,
    lost={"evaluation": 0.1 * DAY, "checkpoints": 0.2 * DAY, "restarts": 0.3 * DAY, "repeated": 0.4 * DAY},
    seconds=11 * DAY, low_seconds=10.5 * DAY, high_seconds=15 * DAY, failures=7.0,
    between_failures_seconds=11 * DAY / 7,
    checkpoint_bytes=2**33, blocked_seconds=1.0, written_seconds=20.0, interval_seconds=600.0, young_seconds=580.0,
    goodput=10 / 11, curve=tuple(Goodput(interval_seconds=60.0 * n, share=1 - abs(n - 17) / 100) for n in range(1, 34)),
    gpu_hours=11 * 24 * 8, dollars=4224.0, chip_kwh=1478.4, kwh=2661.12, co2_kg=1280.0, site=Site(),
)  # fmt: skip


def render(run: RunEstimate) -> RenderableType:
    return render_sections(run_estimate.list_sections(run))


def test_the_parts_on_the_page_of_a_run_sum_to_the_step() -> None:
    text = to_text(render(RUN), width=120)
    assert "11.0 days (50 % interval 10.5 days to 15.0 days), 1,000 steps of 14 min 24 s\n" in text
    parts = ("training", "evaluation  ", "checkpoints", "restarts", "repeated")
    lines = [line for line in text.splitlines() if line.startswith(parts) and ("days" in line or " h " in line)]
    shares = [float(line.split("%")[0].split()[-1]) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=0.03)
    assert "2.7 MWh, of which 1.5 MWh by the chips at their power limit" in text
    assert "1.3 t, at 481 g/kWh (world)" in text
    assert "0.29 to 0.81" in text
    short = to_text(render(RUN.replace(kwh=2.345, chip_kwh=0.012, co2_kg=99.0)), width=120)
    assert "2.35 kWh, of which 0.012 kWh by the chips at their power limit" in short
    assert "99 kg, at 481 g/kWh (world)" in short
    assert "arXiv:2407.21783" in text
    tight = RUN.replace(capacity_bytes=2**30, risk=0.3)
    assert "but it is tight: 1.00 GiB of 1.00 GiB, 30 % risk of running out" in to_text(render(tight), width=200)
    small = RUN.replace(capacity_bytes=2**29, risk=1.0, kwh=None, dollars=None)
    assert "does not fit: 1.00 GiB of 512.00 MiB" in to_text(render(small), width=140)
    assert "MWh" not in to_text(render(small), width=120)


def test_offers_are_rows_and_refusals_lines() -> None:
    best = Offer(machine="h100", ranks=8, layout=RUN.layout, mfu=0.4, run=RUN)
    none = Offer(machine="l4", ranks=8, error="nothing fits: dp8 zero3 needs 30 GiB of 21 GiB")
    offers = Offers(model="tiny", by="cost", tokens=2e12, deadline_seconds=30 * DAY, offers=(best, none))
    text = to_text(run_estimate.render_offers(offers), width=120)
    assert "ordered by cost, the fewest ranks that finish within 30.0 days" in text
    row = next(line for line in text.splitlines() if line.startswith("1 "))
    assert row.split() == ["1", "h100:8", "dp8", "zero1", "mbs1", "40.0%", "11.0", "2.11", "k", "4,224", "2.7", "1.3"]
    assert "l4:8    nothing fits: dp8 zero3 needs 30 GiB of 21 GiB" in text


def test_offers_with_prices_say_which_costs_least_and_the_price_of_equal_cost() -> None:
    second = RUN.replace(machine="b200", dollars=1.02 * 4224.0)
    offers = Offers(
        model="tiny",
        by="time",
        tokens=2e12,
        offers=(Offer(machine="b200", ranks=8, run=second), Offer(machine="h100", ranks=8, run=RUN)),
    )
    line = (
        "h100:8 costs least, $4,224; b200:8 costs 2.0% more, which is within the uncertainty of their times, and the "
        "same at $2.00 instead of $2.04 per GPU hour"
    )
    assert offers.describe_costs() == line
    assert line in to_text(run_estimate.render_offers(offers), width=200)
    far = offers.replace(offers=(offers.offers[0].replace(run=second.replace(dollars=9000.0)), offers.offers[1]))
    assert "uncertainty" not in far.describe_costs()
    assert offers.replace(offers=offers.offers[:1]).describe_costs() == ""


def test_the_chart_marks_the_interval() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    spec = run_estimate.draw_chart(RUN).to_dict()
    assert spec["title"]["text"] == "A checkpoint every 10 min 00 s: goodput 100.0%"
    assert [len(layer["data"]["values"]) for layer in spec["layer"]] == [33, 1]
