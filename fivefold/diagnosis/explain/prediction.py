"""Compare the prediction with memory that was found, and look for the least change with which it fits.

    fits: predicted peak after the change + what was found beyond the prediction ≤ room

Single changes that fit (``planner/questions/changes.py``) are ordered: those that keep the numerics first, then by
time. If none fits, the search proposes a layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.memory.allocator import count_driver_bytes
from fivefold.planner.predict import predict
from fivefold.planner.questions.changes import get_change_sort_key, list_changes
from fivefold.planner.search import search
from fivefold.results.explanation import AgainstPrediction, Explanation, HeldMemory, MemoryComparison
from fivefold.step import Step
from fivefold.units import show_bytes

MEMORY_CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary")
PREDICTED_CATEGORY = {"logits": "activations", "gathers": "temporary", "inputs": "temporary", "fp8 scales": "temporary"}


def compare_largest(
    explanations: Sequence[Explanation], *, model: Model, machine: Machine, layout: Layout, job: Job
) -> AgainstPrediction:
    """Compare the prediction with the memory of the file that holds most; raises ``UserError`` if none records any."""
    memories = [explanation.memory for explanation in explanations if explanation.memory is not None]
    if not memories:
        raise UserError(
            "a prediction is compared with recorded memory, but the files record none; give a snapshot, or a log with "
            "an out-of-memory message"
        )
    memory = max(memories, key=lambda held: held.needed_bytes)
    return compare_with_prediction(memory, model=model, machine=machine, layout=layout, job=job)


def compare_with_prediction(
    memory: HeldMemory, *, model: Model, machine: Machine, layout: Layout, job: Job
) -> AgainstPrediction:
    """Compare the prediction of ``layout`` with ``memory``, and find what would fit."""
    predicted = predict(model=model, machine=machine, layout=layout, job=job)
    driver = count_driver_bytes(machine, layout, job.stack)
    room = machine.chip.memory_bytes - driver
    if memory.capacity_bytes is not None:
        room = min(room, max(0, memory.capacity_bytes - driver))
    excess = max(0, memory.needed_bytes - predicted.memory.peak_bytes)
    fitting_changes = [
        change
        for change in list_changes(model=model, machine=machine, job=job, layout=layout)
        if change.memory_bytes + excess <= room
    ]
    fits = max(memory.needed_bytes, predicted.memory.peak_bytes) <= room and memory.requested_bytes is None
    least_change = None if fits else min(fitting_changes, key=get_change_sort_key, default=None)
    other_layout, remark = (
        ("", "") if fits or least_change else _find_fitting_layout(model, machine, job, capacity=room - excess + driver)
    )
    seconds = predicted.time.step_seconds
    return AgainstPrediction(
        predicted=predicted,
        rows=tuple(_compare_categories(memory, predicted)),
        excess_bytes=excess,
        available_bytes=room,
        change=least_change,
        layout=other_layout,
        slower=max(0.0, least_change.step_seconds / seconds - 1) if least_change and seconds else None,
        findings=(*_list_findings(memory, predicted, machine=machine, room=room), *([remark] if remark else [])),
    )


def _compare_categories(memory: HeldMemory, predicted: Step) -> Iterator[MemoryComparison]:
    """Yield a row for each category, if the file distinguishes them, then for the peak and reserved memory."""
    stage = max(predicted.memory.stages, key=lambda stage_memory: stage_memory.peak_bytes)
    found_bytes_by_part = dict.fromkeys(MEMORY_CATEGORIES, 0)
    for name, size in memory.parts.items():
        category = PREDICTED_CATEGORY.get(name, name)
        if category in found_bytes_by_part:
            found_bytes_by_part[category] += size
    has_parts = any(found_bytes_by_part.values())
    for part in MEMORY_CATEGORIES:
        yield MemoryComparison(
            part=part,
            actual_bytes=found_bytes_by_part[part] if has_parts else None,
            predicted_bytes=getattr(stage, f"{part}_bytes"),
        )
    if rest := sum(
        size
        for name, size in memory.parts.items()
        if PREDICTED_CATEGORY.get(name, name) not in found_bytes_by_part and has_parts
    ):
        yield MemoryComparison(part="not known", actual_bytes=rest, predicted_bytes=None)
    yield MemoryComparison(part="peak", actual_bytes=memory.needed_bytes, predicted_bytes=predicted.memory.peak_bytes)
    if memory.reserved_bytes is not None:
        yield MemoryComparison(
            part="reserved", actual_bytes=memory.reserved_bytes, predicted_bytes=predicted.memory.reserved_bytes
        )


def _list_findings(memory: HeldMemory, predicted: Step, *, machine: Machine, room: int) -> Iterator[str]:
    """Yield the findings of recorded memory compared with the prediction."""
    peak, needed = predicted.memory.peak_bytes, memory.needed_bytes
    capacity, chip = memory.capacity_bytes, machine.chip.memory_bytes
    if memory.requested_bytes is not None and memory.reserved_bytes is not None and memory.reserved_bytes < needed:
        yield (
            f"the peak that was found contains the {show_bytes(memory.requested_bytes)} that could not be allocated; "
            "reserved memory does not, and is therefore less"
        )
    if capacity is not None and not 0.9 < capacity / chip < 1.1:
        yield f"the message is of a device with {show_bytes(capacity)}, and {machine.name} has {show_bytes(chip)}"
    if peak > room:
        yield f"as predicted: the layout needs {show_bytes(peak)} of {show_bytes(room)}"
    elif needed > 1.05 * peak:
        yield (
            f"{show_bytes(needed - peak)} more than predicted: longer sequences or a larger micro-batch than said, "
            "a software that keeps more (--stack), or tensors that are never freed"
        )
    elif memory.requested_bytes is not None:
        yield (
            f"the tensors are no more than predicted, {show_bytes(peak)} of {show_bytes(room)}: what else lies on "
            "the device, or the pieces in which memory is reserved, is the cause"
        )


def _find_fitting_layout(model: Model, machine: Machine, job: Job, *, capacity: int) -> tuple[str, str]:
    """Return the fastest layout that fits in ``capacity`` bytes of a device, and a remark if it may not be the fastest.

    Both are empty if there is none.
    """
    if capacity <= 0:
        return "", ""
    smaller = machine.replace(chip=machine.chip.replace(memory_bytes=capacity))
    try:
        result = search(model=model, machine=smaller, job=job, top=1)
    except UserError:
        return "", ""
    return (result.best[0].step.layout, result.gap_remark()) if result.best else ("", "")
