"""Compares two steps of one layout, predicted and measured, quantity by quantity.

    error = predicted / measured - 1

Counts (parameters, bytes of state, FLOPs, collective calls) must be equal. Estimates (peak memory, seconds, tokens/s)
have a relative error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, Literal

from fivefold.errors import UserError
from fivefold.layout.spec import Layout
from fivefold.record import Record
from fivefold.step import StageMemory, Step
from fivefold.text_files import read_file

Unit = Literal["parameters", "bytes", "FLOPs", "calls", "seconds", "tokens/s"]


class QuantityComparison(Record):
    """One quantity of two steps. ``error`` is relative to the measured value; None if that is 0."""

    quantity: str
    unit: Unit
    predicted: int | float
    measured: int | float
    error: float | None
    exact: bool  # a count, which must be equal

    @property
    def is_wrong(self) -> bool:
        """Tell whether this is a count and the two values differ."""
        return self.exact and self.predicted != self.measured


def read_pair(path: Path) -> tuple[Step, Step]:
    """Read the predicted and measured step that ``train`` wrote to ``path``; raises ``UserError`` if one is missing."""
    pair = read_file(path)
    try:
        predicted, measured = (Step.read(pair[kind], origin=f"{path}: {kind}") for kind in ("predicted", "measured"))
    except KeyError as error:
        raise UserError(f"{path} holds no {error} step; was it written by fivefold train?") from None
    return predicted, measured


def compare(predicted: Step, measured: Step) -> list[QuantityComparison]:
    """Return a row for every quantity; raises ``UserError`` if the two layouts differ."""
    if predicted.layout != measured.layout:
        raise UserError(
            f"{predicted.layout!r} and {measured.layout!r} are different layouts; compare steps of the same layout"
        )
    # tokens of separate documents attend to fewer others than is planned: how many, the data decides; nothing counts
    # what is computed within the kernels of fused scans
    stack: Any = predicted.job.get("stack") or {}
    counts_all = predicted.job.get("documents") != "separate" and not stack.get("fused_scans")
    return [
        _build_row("parameters", "parameters", predicted.work.parameters, measured.work.parameters, exact=True),
        *_compare_states(predicted.memory.stages, measured.memory.stages),
        _build_row("peak memory", "bytes", predicted.memory.peak_bytes, measured.memory.peak_bytes),
        _build_row(
            "hardware FLOPs", "FLOPs", predicted.work.hardware_flops, measured.work.hardware_flops, exact=counts_all
        ),
        *_compare_traffic(predicted, measured),
        _build_row("step time", "seconds", predicted.time.step_seconds, measured.time.step_seconds),
        _build_row(
            "tokens/s per GPU", "tokens/s", predicted.tokens_per_second_per_gpu, measured.tokens_per_second_per_gpu
        ),
    ]


def describe_assumption(predicted: Step) -> str:
    """State, as one line, the prediction's assumption on routing for experts sharded over ranks; "" without any."""
    work, imbalance = predicted.work, predicted.job.get("imbalance", 1.0)
    if Layout.parse(predicted.layout).ep == 1 or work.active_parameters == work.parameters:
        return ""
    rows = "every rank's experts get as many rows as any other's"
    if imbalance != 1:
        rows = f"the most loaded rank's experts get {imbalance:g} times the even share of rows"
    return f"assumed: {rows}; activations, peak memory and time are those of a run whose routing is so (imbalance)"


def compare_unfinished(predicted: Step, log: Sequence[Mapping[str, Any]]) -> list[QuantityComparison]:
    """Compare what a run in progress has logged with its prediction: the first rank's peak, the typical step.

    ``log``: its lines. The step in which memory was measured and the steps before it take longer than the others.
    """
    batch, stages = predicted.job.get("global_batch"), predicted.memory.stages
    steps = [line for line in log if _is_positive(line.get("seconds")) and line.get("batch", batch) == batch]
    metered_steps = [index for index, line in enumerate(steps) if _is_positive(line.get("peak_bytes"))]
    rows = []
    if metered_steps and stages:
        peak = steps[metered_steps[-1]]["peak_bytes"]
        rows.append(_build_row("peak memory of the first rank", "bytes", stages[0].peak_bytes, peak))
    typical_steps = steps[metered_steps[-1] + 1 :] if metered_steps else []
    if steps:
        seconds = median(line["seconds"] for line in typical_steps or steps)
        tokens = predicted.tokens_per_second_per_gpu * predicted.time.step_seconds
        rows.append(_build_row("step time", "seconds", predicted.time.step_seconds, seconds))
        rows.append(_build_row("tokens/s per GPU", "tokens/s", predicted.tokens_per_second_per_gpu, tokens / seconds))
    return rows


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < inf


def _build_row(
    quantity: str, unit: Unit, predicted: float, measured: float, *, exact: bool = False
) -> QuantityComparison:
    error: float | None = 0.0
    if predicted != measured:
        error = predicted / measured - 1 if measured else None
    return QuantityComparison(
        quantity=quantity, unit=unit, predicted=predicted, measured=measured, error=error, exact=exact
    )


def _compare_states(predicted: Sequence[StageMemory], measured: Sequence[StageMemory]) -> Iterator[QuantityComparison]:
    """Yield the states and activations of each stage, predicted and measured; states must be equal."""
    left, right = ({stage.stage: stage for stage in stages} for stages in (predicted, measured))
    numbers = sorted(left.keys() | right.keys())
    for number in numbers:
        where = f", stage {number}" if len(numbers) > 1 else ""
        for name, field in (
            ("parameter state", "parameters_bytes"),
            ("gradient state", "gradients_bytes"),
            ("optimizer state", "optimizer_bytes"),
            ("all states", "states_bytes"),
        ):
            sizes = (getattr(stages.get(number), field, 0) for stages in (left, right))
            yield _build_row(f"{name}{where}", "bytes", *sizes, exact=True)
        kept = (getattr(stages.get(number), "activations_bytes", 0) for stages in (left, right))
        yield _build_row(f"activations{where}", "bytes", *kept)


def _compare_traffic(predicted: Step, measured: Step) -> Iterator[QuantityComparison]:
    """Yield a row of messages and a row of bytes sent for each (axis, collective) of either step, in order."""
    left, right = (_sum_traffic(step) for step in (predicted, measured))
    for axis, collective in {**left, **right}:
        messages, sizes = zip(*(side.get((axis, collective), (0, 0)) for side in (left, right)), strict=True)
        yield _build_row(f"{axis} {collective}, calls", "calls", *messages, exact=True)
        # over etp, rows are padded to the busiest rank of a layer, which depends on routing
        yield _build_row(f"{axis} {collective}, sent", "bytes", *sizes, exact=axis != "etp")


def _sum_traffic(step: Step) -> dict[tuple[str, str], tuple[int, int]]:
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for item in step.traffic:
        messages, size = sums.get((item.axis, item.collective), (0, 0))
        sums[item.axis, item.collective] = (messages + item.calls, size + item.bytes)
    return sums
