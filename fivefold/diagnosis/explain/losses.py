"""Explain the losses of any trainer's log: when they became NaN or infinite, spiked, rose, or stopped falling.

    spike: above median + 8 · 1.4826 · MAD of the last good ones (``trainer/faults/spikes.py``)
    divergence: spikes up to the end, or windows whose median rises from their least until the end
    plateau: windows whose medians have not fallen by more than their spread, until the end

Formats: JSON lines, CSV, trainer_state.json, and text such as Megatron's, torchtitan's, nanotron's, Hugging Face's.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fivefold.results.explanation import Explanation, LossEvent
from fivefold.trainer.faults.spikes import NORMAL, Faults, LossGuard

LOSS = (
    "loss",
    "lm_loss",
    "lm loss",
    "train_loss",
    "train/loss",
    "training_loss",
    "loss/train",
    "global_avg_loss",
    "loss_metrics/global_avg_loss",
    "train/lm_loss",
)
STEP = ("step", "iteration", "iter", "global_step", "_step", "it", "train/global_step", "steps")
NORM = ("grad_norm", "gradient_norm", "grad norm", "gnorm", "train/grad_norm", "grad-norm")
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
TEXT_STEP = re.compile(r"\b(?:step|iteration|iter)s?\b[\s:=#\[]*(\d[\d,]*)", re.IGNORECASE)
TEXT_LOSS = re.compile(
    rf"(?<![\w-])(?:lm[ _]|train(?:ing)?[ _/]|(?:global_)?avg[ _])?loss['\"]?\s*[:=]?\s*({NUMBER})\b", re.IGNORECASE
)
TEXT_NORM = re.compile(rf"(?:grad(?:ient)?[ _-]?norm|gnorm)['\"]?\s*[:=]?\s*({NUMBER})\b", re.IGNORECASE)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LINE_CHARACTERS = 4000  # longer lines are not searched for a loss
MIN_LOSSES = 8  # least number of losses that are explained
DIVERGENCE_SPREADS = 3.0  # in a divergence the last window is this many spreads above the least one


class LossPoint(NamedTuple):
    """A loss, with the gradient norm if the log has it (else 0)."""

    step: int
    loss: float
    norm: float


def read(text: str) -> list[LossPoint]:
    """Return the losses of a text, in order; empty if it has none."""
    rows = _parse_json_rows(text) or _parse_csv_rows(text)
    return list(_list_points(rows)) if rows else list(_parse_text_points(text))


def explain(points: Sequence[LossPoint], *, files: tuple[str, ...]) -> Explanation | None:
    """Explain what happened to the losses; None if they are too few."""
    bad_norm_steps = [point.step for point in points if not math.isfinite(point.norm)]
    ends_with_bad_norm = bool(bad_norm_steps) and bad_norm_steps[-1] == points[-1].step
    if len(points) < MIN_LOSSES and not ends_with_bad_norm and all(math.isfinite(point.loss) for point in points):
        return None
    events = sorted(_find_events(points), key=lambda event: event.step)
    finite_points = [point for point in points if math.isfinite(point.loss)]
    least_point = min(finite_points, key=lambda point: point.loss, default=None)
    last = points[-1]
    findings = (
        [f"least {least_point.loss:.4g} at step {least_point.step}, last {last.loss:.4g} at step {last.step}"]
        if least_point
        else []
    )
    restarts = [(a.step, b.step) for a, b in pairwise(points) if b.step <= a.step]
    if restarts:
        findings.append(
            f"the log goes back {len(restarts)} times, first from step {restarts[0][0]} to {restarts[0][1]}: restarts"
        )
    if bad_norm_steps:
        findings.append(
            f"the gradient norm is not a number at step {bad_norm_steps[0]}, "
            f"{len(bad_norm_steps)} of {len(points)} in all"
        )
    if (bad := next((i for i, point in enumerate(points) if not math.isfinite(point.loss)), 0)) >= 3:
        before = ", ".join(f"{point.loss:.4g}" for point in points[max(0, bad - 4) : bad])
        findings.append(
            f"losses before it: {before}; a lower learning rate, clipping or skipped batches may prevent it"
        )
    worst = next(
        (
            event
            for kind in ("not a number", "divergence", "spike", "plateau")
            for event in events
            if event.kind == kind
        ),
        None,
    )
    verdict = (
        worst.line
        if worst
        else findings.pop()
        if ends_with_bad_norm
        else f"{len(points)} losses fall as they should, from {points[0].loss:.4g} to {last.loss:.4g}"
    )
    return Explanation(kind="losses", files=files, verdict=verdict, findings=tuple(findings), losses=tuple(events))


# What happened


def _find_events(points: Sequence[LossPoint]) -> Iterator[LossEvent]:
    """Yield the spikes, divergences, losses that are not numbers, and trends of a log."""
    window = max(MIN_LOSSES, min(64, len(points) // 4))
    guard = LossGuard(Faults(on_nan="skip", on_spike="skip", spike_window=window))
    usual_loss = dict[int, float]()
    flagged = list[tuple[int, bool]]()  # index, whether it is finite
    for index, point in enumerate(points):
        finite = math.isfinite(point.loss)
        usual_loss[index] = statistics.median(guard.recent) if guard.recent else math.nan
        if guard.judge(point.loss, point.norm if math.isfinite(point.norm) and finite else 0.0) is not None:
            flagged.append((index, finite))
    runs = list(_split_runs(flagged))
    for finite, first, last in runs:
        yield _make_event(points, finite, first, last, usual=usual_loss, window=window)
    if any(last == len(points) - 1 for _, _, last in runs):
        return  # no trend can be determined after such an end
    flagged_indices = {index for index, _ in flagged}
    unflagged = [point for index, point in enumerate(points) if index not in flagged_indices]
    yield from _find_trend(unflagged, window)


def _split_runs(flagged: Iterable[tuple[int, bool]]) -> Iterator[tuple[bool, int, int]]:
    """Yield runs of neighbours: whether they are finite, and their first and last index."""
    run: tuple[bool, int, int] | None = None
    for index, finite in flagged:
        if run is not None and run[0] == finite and index == run[2] + 1:
            run = (finite, run[1], index)
            continue
        if run is not None:
            yield run
        run = (finite, index, index)
    if run is not None:
        yield run


def _make_event(
    points: Sequence[LossPoint], finite: bool, first: int, last: int, *, usual: Mapping[int, float], window: int
) -> LossEvent:
    """Describe the losses from point ``first`` to ``last``, which the guard has flagged, in one sentence."""
    begin, end = points[first].step, points[last].step
    when = f"at step {begin}" if begin == end else f"from step {begin} to {end}"
    to_end = last == len(points) - 1
    if not finite:
        norm_text = _describe_norm(points, first - 1, window) if first else ""
        until_end = ", to the end of the log" if to_end and last > first else ""
        return LossEvent(
            kind="not a number", step=begin, last=end, line=f"the loss is no number {when}{until_end}{norm_text}"
        )
    highest = max(point.loss for point in points[first : last + 1])
    size_text = f"up to {highest:.4g}, where {usual[first]:.4g} is usual{_describe_norm(points, first, window)}"
    if to_end and last - first + 1 >= MIN_LOSSES // 2:
        return LossEvent(
            kind="divergence", step=begin, last=end, line=f"the loss diverges {when}: {size_text}, to the end"
        )
    return LossEvent(kind="spike", step=begin, last=end, line=f"the loss leaps {when}: {size_text}")


def _describe_norm(points: Sequence[LossPoint], place: int, window: int) -> str:
    """Describe the gradient norm at ``place``, if it is far above what was usual."""
    previous_norms = [point.norm for point in points[max(0, place - window) : place] if math.isfinite(point.norm)]
    usual = statistics.median(previous_norms) if previous_norms else 0.0
    norm = points[place].norm
    return f"; gradient norm {norm:.4g}, where {usual:.4g} is usual" if usual > 0 and not norm < 3 * usual else ""


def _find_trend(points: Sequence[LossPoint], window: int) -> Iterator[LossEvent]:
    """Yield a slow divergence or a plateau, by the medians of consecutive windows."""
    starts = range(len(points) % window, len(points) - window + 1, window)
    medians = [statistics.median(point.loss for point in points[start : start + window]) for start in starts]
    if len(medians) < 3:
        return
    least_index = min(range(len(medians)), key=medians.__getitem__)
    spread = statistics.median(_spread([point.loss for point in points[start : start + window]]) for start in starts)
    spread = max(spread, 1e-3 * abs(medians[least_index]))
    step, last = points[starts[least_index]].step, points[-1].step
    if least_index < len(medians) - 1 and medians[-1] > medians[least_index] + DIVERGENCE_SPREADS * spread:
        line = f"the loss rises from step {step}, from {medians[least_index]:.4g} to {medians[-1]:.4g}"
        yield LossEvent(kind="divergence", step=step, last=last, line=line)
        return
    plateau_start = len(medians) - 1
    while plateau_start > 0 and abs(medians[plateau_start - 1] - medians[-1]) <= spread:
        plateau_start -= 1
    if len(medians) - plateau_start >= 3:
        step = points[starts[plateau_start]].step
        line = f"the loss stands still from step {step}, at {medians[-1]:.4g} within {spread:.2g}"
        yield LossEvent(kind="plateau", step=step, last=last, line=line)


def _spread(losses: Sequence[float]) -> float:
    """Return the standard deviation of a window from differences of neighbours, so that a trend adds none."""
    steps = [b - a for a, b in pairwise(losses)]
    median_step = statistics.median(steps)
    return NORMAL * statistics.median(abs(step - median_step) for step in steps) / math.sqrt(2)


# Reading


def _parse_json_rows(text: str) -> list[dict[str, Any]]:
    """Return the objects of a text of JSON: one a line, a list, or the log_history of a trainer_state.json."""
    begin = text.lstrip()[:1]
    if begin not in ("{", "["):
        return []
    try:
        data = json.loads(text)
        data = data.get("log_history", [data]) if isinstance(data, dict) else data
        return [row for row in data if isinstance(row, dict)]
    except (ValueError, RecursionError):
        pass
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _parse_csv_rows(text: str) -> list[dict[str, Any]]:
    """Return the rows of a table whose first line names a column of losses."""
    header = text.lstrip().partition("\n")[0]
    delimiter = next((delimiter for delimiter in (",", "\t", ";") if delimiter in header), None)
    names = [name.strip().strip('"').lower() for name in header.split(delimiter)] if delimiter else []
    if not set(names) & set(LOSS):
        return []
    return list(csv.DictReader(text.lstrip().splitlines(), fieldnames=names, delimiter=delimiter or ","))[1:]


def _list_points(rows: Sequence[Mapping[str, Any]]) -> Iterator[LossPoint]:
    """Yield step, loss and gradient norm of each row of a table that has a loss."""
    count = 0
    for row in rows:
        lower = {str(key).lower(): value for key, value in row.items()}
        loss = next((number for key in LOSS if (number := _number(lower.get(key))) is not None), None)
        if loss is None:
            continue
        count += 1
        step = next((number for key in STEP if (number := _number(lower.get(key))) is not None), None)
        norm = next((number for key in NORM if (number := _number(lower.get(key))) is not None), 0.0)
        yield LossPoint(int(step) if step is not None and math.isfinite(step) and step >= 0 else count, loss, norm)


def _parse_text_points(text: str) -> Iterator[LossPoint]:
    """Yield step, loss and gradient norm of each line of a log that has a loss."""
    count = 0
    for raw in text.splitlines():
        if len(raw) > LINE_CHARACTERS:
            continue
        line = ANSI.sub("", raw)
        loss = TEXT_LOSS.search(line)
        if loss is None:
            continue
        count += 1
        step, norm = TEXT_STEP.search(line), TEXT_NORM.search(line)
        number = int(step[1].replace(",", "")) if step else count
        yield LossPoint(number, _number(loss[1]) or 0.0, (_number(norm[1]) or 0.0) if norm else 0.0)


def _number(value: object) -> float | None:
    """Return a number, also from text; None if the value is not a number."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value.replace(",", "") if isinstance(value, str) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
