"""Losses of a run as one picture, in the report, on the page and as a file: training and held-out, over steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from fivefold.errors import UserError
from fivefold.rendering.drawing.file import PictureFile
from fivefold.rendering.drawing.lines import HEIGHT, Curve, draw_lines

CURVES = {"loss": ("training", "F"), "heldout_loss": ("held-out", "BW")}  # key of a logged point → name and look


def list_loss_curves(log: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """Return a curve for each loss that is logged with a step and a finite value."""
    lines = list(log)
    curves = (Curve(name, look, list_points(lines, key)) for key, (name, look) in CURVES.items())
    return [curve for curve in curves if curve.points]


def list_points(log: Iterable[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return (step, value) of each logged line that has a finite number under ``key``."""
    pairs = ((line.get("step"), line.get(key)) for line in log)
    return sorted((x, y) for x, y in pairs if x is not None and isinstance(y, int | float) and isfinite(y))


def describe_losses(curves: Sequence[Curve]) -> str:
    """Return the finding: the change of the held-out loss, or of the training loss if there is no other."""
    curve = curves[-1]
    (_, first), (step, last) = curve.points[0], curve.points[-1]
    if len(curve.points) == 1:
        return f"{curve.name.capitalize()} loss is {last:.2f} at step {step:,.0f}"
    direction = "fell" if last < first else "rose"
    return f"{curve.name.capitalize()} loss {direction} from {first:.2f} to {last:.2f} by step {step:,.0f}"


def draw_losses(log: Iterable[Mapping[str, Any]], *, subtitle: str = "") -> PictureFile:
    """Draw the losses; a point has ``step`` and ``loss`` or ``heldout_loss`` or both, in nats per token."""
    lines = list(log)
    curves = list_loss_curves(lines)
    if not curves:
        raise UserError(f"none of {len(lines)} logged points has a step and a finite loss; log one or more")
    title = describe_losses(curves)
    chart = draw_lines(curves, label=title, x_title="optimizer step", y_title="loss, nats")
    return PictureFile(title, (subtitle,), chart, HEIGHT, [(curve.look, curve.name) for curve in curves])
