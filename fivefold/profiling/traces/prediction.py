"""Compare a predicted step with traces: time by part, messages by axis and collective.

Measured values are means over the steps: times over all ranks, messages of the lowest rank that has a trace. The bubble
of a pipeline is measured as receives that wait, so it is counted with the exposed communication.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.errors import UserError
from fivefold.layout.mesh import list_members
from fivefold.layout.spec import Layout
from fivefold.results.step_comparison import QuantityComparison, Unit
from fivefold.results.trace_report import MessageLine, TraceReport
from fivefold.step import Step, Traffic, count_sent_bytes

AXES = {"tp": "tp", "cp": "cp", "pp": "pp", "shard": "dp", "replica": "dp", "world": "world"}  # group → axis
OF_EXPERTS = {"ep": "ep", "etp": "etp", "expert_shard": "dp", "expert_replica": "dp"}


def find_axes(layout: Layout) -> dict[tuple[int, ...], str]:
    """Return the axis of each process group, by its members; axes that share a group are named together."""
    by_members: dict[tuple[int, ...], set[str]] = {}
    groups = AXES | (OF_EXPERTS if layout.ep * layout.etp > 1 else {})
    for rank in range(layout.world):
        for name, axis in groups.items():
            ranks = list_members(layout, name, rank=rank)
            if len(ranks) > 1:
                by_members.setdefault(ranks, set()).add(axis)
    classes: list[set[str]] = []
    for axes in by_members.values():
        overlapping = [axis_class for axis_class in classes if axis_class & axes]
        classes = [axis_class for axis_class in classes if not axis_class & axes] + [axes.union(*overlapping)]
    label_by_axis = {axis: ", ".join(sorted(axis_class)) for axis_class in classes for axis in axis_class}
    return {ranks: label_by_axis[min(axes)] for ranks, axes in by_members.items()}


def compare_with_prediction(
    predicted: Step, report: TraceReport, *, messages: Sequence[MessageLine]
) -> list[QuantityComparison]:
    """Return a row for each quantity that both have; raises ``UserError`` if the numbers of ranks differ.

    ``messages``: the messages of one rank.
    """
    if predicted.world != report.world:
        raise UserError(
            f"--against has a layout of {predicted.world} ranks, but the traces have {report.world}; "
            "name the layout that ran"
        )
    time, windows = predicted.time, report.breakdown

    def average(*parts: str) -> float:
        total: float = sum(getattr(window, f"{part}_seconds") for window in windows for part in parts)
        return total / len(windows)

    bubble = sum(time.exposed_seconds.values()) + time.bubble_seconds
    rows = [
        _build_row("step time", "seconds", time.step_seconds, report.step_seconds),
        _build_row("compute", "seconds", time.compute_seconds, average("compute") - average("optimizer")),
        _build_row("optimizer", "seconds", time.optimizer_seconds, average("optimizer")),
        _build_row("exposed communication, bubble", "seconds", bubble, average("exposed", "idle_waiting")),
        _build_row("copies, idle host", "seconds", 0.0, average("memcpy_alone", "idle_host")),
    ]
    return rows + _compare_messages(predicted.traffic, messages)


def _build_row(quantity: str, unit: Unit, predicted: float, measured: float) -> QuantityComparison:
    error = 0.0 if predicted == measured else predicted / measured - 1 if measured else None
    return QuantityComparison(
        quantity=quantity, unit=unit, predicted=predicted, measured=measured, error=error, exact=False
    )


def _compare_messages(traffic: Sequence[Traffic], lines: Sequence[MessageLine]) -> list[QuantityComparison]:
    """Return rows of messages and bytes sent, by axis (or axes that share a group) and collective, without receives."""
    labels = {axis: line.axis for line in lines for axis in line.axis.split(", ")}
    sums: dict[tuple[str, str], list[float]] = {}
    for item in traffic:
        totals = sums.setdefault((labels.get(item.axis, item.axis), item.collective), [0.0] * 4)
        totals[0] += item.calls
        totals[2] += item.bytes
    for line in lines:
        if line.axis and line.collective != "recv":
            collective = "p2p" if line.collective == "send" else line.collective
            totals = sums.setdefault((line.axis, collective), [0.0] * 4)
            totals[1] += line.calls
            totals[3] += count_sent_bytes(collective, payload=round(line.bytes or 0), ranks=line.ranks or 1)
    rows = []
    for (axis, collective), (planned, counted, size, sent) in sums.items():
        rows.append(_build_row(f"{axis} {collective}, calls", "calls", planned, counted))
        if size or sent:
            rows.append(_build_row(f"{axis} {collective}, sent", "bytes", size, sent))
    return rows
