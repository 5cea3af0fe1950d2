"""Losses of a run as a picture: the finding, what is left out, what is thinned."""

from __future__ import annotations

import re

import pytest

from fivefold.errors import UserError
from fivefold.rendering.drawing.lines import MAX_POINTS
from fivefold.rendering.losses import draw_losses, list_points

POINTS = [
    {"step": i, "loss": 5.5 - i / 100, **({"heldout_loss": 5.6 - i / 100} if i % 100 == 0 else {})} for i in range(301)
]


def test_the_title_is_the_finding() -> None:
    assert draw_losses(POINTS).title == "Held-out loss fell from 5.60 to 2.60 by step 300"
    training = [{"step": point["step"], "loss": point["loss"]} for point in POINTS]
    assert draw_losses(training).title == "Training loss fell from 5.50 to 2.50 by step 300"
    assert draw_losses(POINTS[:1]).title == "Held-out loss is 5.60 at step 0"
    assert "rose from 2.00 to 3.00" in draw_losses([{"step": 1, "loss": 2}, {"step": 2, "loss": 3}]).title


def test_points_without_a_finite_loss_are_left_out() -> None:
    points = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": None}, {"tokens": 5}]
    with pytest.raises(UserError, match="none of 3 logged points has a step and a finite loss"):
        draw_losses(points)
    assert list_points([*points, {"step": 3, "loss": 1.0}], "loss") == [(3, 1.0)]


def test_a_long_run_is_thinned_to_means() -> None:
    chart = draw_losses([{"step": i, "loss": float(i % 2)} for i in range(1, 8_001)]).chart
    (path,) = re.findall(r'<path d="M([^"]+)"', chart)
    points = [tuple(map(float, point.split())) for point in path.split("L")]
    assert len(points) <= MAX_POINTS
    assert points[-1][0] == 1000.0
    assert len({y for _, y in points}) == 1
