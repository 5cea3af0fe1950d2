"""Lays the prediction beside memory that was found, and looks for the least change with which it fits.

    fits: predicted peak after the change + what was found beyond the prediction ≤ room

Single changes that fit (``planner/questions.py``) are ordered: those that keep the numbers first, then by time.
If none fits, the search proposes a layout.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.memory.allocator import driver_bytes
from fivefold.planner.predict import predict
from fivefold.planner.questions import changes
from fivefold.planner.search import search
from fivefold.record import Mistake
from fivefold.results.explanation import AgainstPrediction, Beside, HeldMemory
from fivefold.results.search_result import Change
from fivefold.step import Step
from fivefold.units import show_bytes

OTHER_NUMBERS = ("fp8", "adamw8bit")  # changes by which another model is trained
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
BELONGS = {"logits": "activations", "gathers": "temporary", "inputs": "temporary", "fp8 scales": "temporary"}


def against(
    memory: HeldMemory, *, model: Model, machine: Machine, layout: Layout, job: Job
) -> AgainstPrediction:  # fmt: skip
    """The prediction of ``layout`` beside ``memory``, and what would fit."""
    predicted = predict(model=model, machine=machine, layout=layout, job=job)
    taken = driver_bytes(machine, layout)
    room = machine.chip.memory_bytes - taken
    if memory.capacity_bytes is not None:
        room = min(room, max(0, memory.capacity_bytes - taken))
    excess = max(0, memory.needed_bytes - predicted.memory.peak_bytes)
    found = [each for each in changes(model=model, machine=machine, job=job, layout=layout)
             if each.memory_bytes + excess <= room]  # fmt: skip
    fits = max(memory.needed_bytes, predicted.memory.peak_bytes) <= room and memory.wanted_bytes is None
    least = None if fits else min(found, key=_cost, default=None)
    other = "" if fits or least else _other_layout(model, machine, job, capacity=room - excess + taken)
    seconds = predicted.time.step_seconds
    return AgainstPrediction(
        predicted=predicted, rows=tuple(_rows(memory, predicted)), excess_bytes=excess, room_bytes=room, change=least,
        layout=other, slower=max(0.0, least.step_seconds / seconds - 1) if least and seconds else None,
        findings=tuple(_findings(memory, predicted, machine=machine, room=room)),
    )  # fmt: skip


def _cost(change: Change) -> tuple[bool, float, int]:
    return change.change in OTHER_NUMBERS, change.step_seconds, change.memory_bytes


def _rows(memory: HeldMemory, predicted: Step) -> Iterator[Beside]:
    """Category by category, where the file tells them apart; then the peak."""
    stage = max(predicted.memory.stages, key=lambda each: each.peak_bytes)
    found = dict.fromkeys(PARTS, 0)
    for name, size in memory.parts.items():
        place = BELONGS.get(name, name)
        if place in found:
            found[place] += size
    known = any(found.values())
    for part in PARTS:
        yield Beside(part=part, found_bytes=found[part] if known else None,
                     predicted_bytes=getattr(stage, f"{part}_bytes"))  # fmt: skip
    if rest := sum(size for name, size in memory.parts.items() if BELONGS.get(name, name) not in found and known):
        yield Beside(part="not known", found_bytes=rest, predicted_bytes=None)
    yield Beside(part="peak", found_bytes=memory.needed_bytes, predicted_bytes=predicted.memory.peak_bytes)
    if memory.reserved_bytes is not None:
        yield Beside(
            part="reserved", found_bytes=memory.reserved_bytes, predicted_bytes=predicted.memory.reserved_bytes
        )


def _findings(memory: HeldMemory, predicted: Step, *, machine: Machine, room: int) -> Iterator[str]:
    peak, needed = predicted.memory.peak_bytes, memory.needed_bytes
    capacity, chip = memory.capacity_bytes, machine.chip.memory_bytes
    if capacity is not None and not 0.9 < capacity / chip < 1.1:
        yield f"the message is of a device with {show_bytes(capacity)}, and {machine.name} has {show_bytes(chip)}"
    if peak > room:
        yield f"as predicted: the layout needs {show_bytes(peak)} of {show_bytes(room)}"
    elif needed > 1.05 * peak:
        yield (f"{show_bytes(needed - peak)} more than predicted: longer sequences or a larger micro-batch than said, "
               "a software that keeps more (--stack), or tensors that nobody lets go")  # fmt: skip
    elif memory.wanted_bytes is not None:
        yield (f"the tensors are no more than predicted, {show_bytes(peak)} of {show_bytes(room)}: what else lies on "
               "the device, or the pieces in which memory is reserved, is the cause")  # fmt: skip


def _other_layout(model: Model, machine: Machine, job: Job, *, capacity: int) -> str:
    """The fastest layout that fits in ``capacity`` bytes of a device, "" if there is none."""
    if capacity <= 0:
        return ""
    smaller = machine.replace(chip=machine.chip.replace(memory_bytes=capacity))
    try:
        found = search(model=model, machine=smaller, job=job, top=1)
    except Mistake:
        return ""
    return found.best[0].step.layout if found.best else ""
