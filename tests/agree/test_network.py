"""What the table of ``network.py`` is made of, and the line where links cannot be shaped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fivefold.machine.spec import Machine
from tests.agree import network, network_table
from tests.agree.network import Case
from tests.agree.network_table import Row
from tests.planner.time.test_hosts import hosts


def machine() -> Machine:
    known = hosts(1e9)
    assert known.calibration is not None
    points = tuple(point.replace(dtype=dtype) for point in known.calibration.matmuls for dtype in ("fp32", "bf16"))
    return known.replace(calibration=known.calibration.replace(matmuls=points))


def test_compute_is_calibrated_to_the_step_without_traffic_shaping() -> None:
    case = Case("dense", "dp2 zero3 mbs4")
    alone = network_table.predict_seconds(case, machine())
    factor = network_table.compute_factor(case, machine(), 1.7 * alone)
    assert 1.7 < factor < 2.5  # some of a step are messages, which are not slowed
    assert network_table.predict_seconds(case, network_table.slow_down(machine(), factor)) == pytest.approx(
        1.7 * alone, rel=1e-6
    )


def test_faster_of_two_layouts_changes_with_link_speed() -> None:
    """From 0.5 at 1 Gbit/s to 2 at 100 Mbit/s: the same in the middle, 316 Mbit/s."""
    rows = []
    for layout, taken in (("dp2 zero0 mbs4", (0.5, 2.0)), ("pp2 mbs1", (1.0, 1.0))):
        for wire, seconds in zip(("1gbit", "100mbit"), taken, strict=True):
            rows.append(
                Row(Case("dense", layout), wire, seconds, 0.0, 0.4, 1.0 if layout == "pp2 mbs1" else seconds / 1.1, 1.0)
            )
    (line,) = network_table.list_switches(rows)
    one, other, measured, predicted, difference = line.split(" | ")
    assert (one, other, measured) == ("dp2 zero0 mbs4", "pp2 mbs1", "316")
    assert (predicted, difference) == ("270", "-15%")  # the faster prediction crosses later


def test_errors_are_computed_from_the_least_disturbed_round() -> None:
    assert network_table.find_least_disturbed([[3.0, 1.0, 1.1], [1.3, 1.2, 9.0], [1.2]]) == (
        1.1,
        pytest.approx(1.2 / 1.1 - 1),
    )
    row = Row(Case("dense", "dp2 mbs4"), "1gbit", measured=2.0, noise=0.0, unshaped=1.0, network=2.1, whole=1.8)
    assert (row.error, row.added_error, row.full_error) == pytest.approx((0.05, 0.1, -0.1))
    assert row._replace(measured=1.05).added_error is None


def test_links_that_cannot_be_shaped_are_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "describe_missing", lambda: "there is no tc here (Debian: iproute2)")
    monkeypatch.setattr(sys, "argv", ["network", "--folder", str(tmp_path / "none")])
    assert network.main() == 0
    assert capsys.readouterr().out == "skipped: there is no tc here (Debian: iproute2)\n"
