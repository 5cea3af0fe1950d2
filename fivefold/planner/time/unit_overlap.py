"""Seconds of one micro-batch through each unit of a layout, with data parallelism's messages overlapped.

A unit's gathers of weights and reductions of gradients overlap with its own passes, but only in the seconds in which
the links between nodes are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.layout.sharding import get_policy, needs_backward_gather
from fivefold.layout.spec import Layout
from fivefold.planner.counts.counts import Name, UnitGroup
from fivefold.planner.time.gather_reduce import GatherReduceTime
from fivefold.planner.time.network import MessageTime
from fivefold.planner.time.unit_time import AXES, UnitTime
from fivefold.planner.time.units import Units


class UnitMessages(NamedTuple):
    """A unit's data-parallel messages in one layout.

    They are those of every forward and of every backward, and a reduction that overlaps the next forward
    (``next_forward``). ``every_micro_batch``: gradients are reduced after every backward. ``forward_copy``,
    ``backward_copy``: seconds of copies between buffers of messages and tensors, for which compute waits.
    ``accumulation``: seconds in which gradients are added to those of other micro-batches, on average of a step's.
    """

    time: GatherReduceTime
    forward: MessageTime
    backward: MessageTime
    next_forward: MessageTime
    every_micro_batch: bool
    forward_copy: float
    backward_copy: float
    accumulation: float


class OverlappedUnitSeconds(NamedTuple):
    """Seconds of a micro-batch through one unit, overlapped with data parallelism's messages; exposed ones by axis.

    ``time``: without those messages. ``free_seconds``: what its other messages, forward and backward, add to the
    compute in which data parallelism's link between nodes is free: exposed ones that do not use it, less overlapped
    ones that do. ``full_backward_exposed``: exposed data parallelism of a full backward; ``forward_spare``: the part of
    its forward in which the link is free; ``next_forward_reduce``: the reduction that overlaps the next forward.
    """

    time: UnitTime
    messages: UnitMessages
    free_seconds: tuple[float, float]
    forward: float
    backward: float
    full_backward: float
    weight: float
    forward_exposed: list[tuple[str, float]]
    backward_exposed: list[tuple[str, float]]
    full_backward_exposed: float = 0.0
    forward_spare: float = 0.0
    next_forward_reduce: MessageTime | None = None


def estimate_unit_seconds(units: Units, layout: Layout) -> dict[UnitGroup, OverlappedUnitSeconds]:
    """Return the seconds of every distinct unit of a layout."""
    counts = units.counts
    stage_work = counts.stage_work(layout)
    stays_gathered = get_policy(layout, units.job).weights_stay
    sends = not stays_gathered or counts.reduces_every_micro_batch(layout)
    free_axes = dict[str, bool]()

    def is_free(axis: str) -> bool:
        if axis not in free_axes:
            free_axes[axis] = leaves_link_free(units, layout, axis)
        return free_axes[axis]

    def overlap_unit(unit_group: UnitGroup) -> OverlappedUnitSeconds:
        """Return the seconds of one unit, with messages that overlap with its compute taken out."""
        time = units.unit(layout, unit_group)
        messages = estimate_unit_messages(units, layout, unit_group.name, stays=stays_gathered)
        free = add_free_seconds(time, is_free)
        forward_exposed = _list_exposed(time.forward_exposed)
        backward_exposed = _list_exposed(time.backward_exposed)
        weight = time.weight + messages.accumulation
        full_backward = time.backward + weight
        without_messages = OverlappedUnitSeconds(
            time,
            messages,
            free,
            time.forward,
            time.backward,
            full_backward,
            weight,
            forward_exposed,
            backward_exposed,
        )
        return _with_messages(units, unit_group.name, without_messages) if sends else without_messages

    distinct = {run for stage in dict.fromkeys(counts.equal_stages(layout)) for run, _ in stage_work[stage]}
    return {run: overlap_unit(run) for run in distinct}


def add_free_seconds(time: UnitTime, is_free: Callable[[str], bool]) -> tuple[float, float]:
    """Return ``OverlappedUnitSeconds.free_seconds`` of a unit; ``is_free``: whether an axis leaves the link free.

    A second of compute overlaps one message of a link: a hop of a ring between nodes, or a reduction.
    """
    free = [0.0, 0.0]
    passes = (
        (time.forward_exposed, time.forward_unoverlapped, time.forward),
        (time.backward_exposed, time.backward_unoverlapped, time.backward + time.weight),
    )
    for side, (exposed, unoverlapped, compute) in enumerate(passes):
        for axis, seconds, alone in zip(AXES, exposed, unoverlapped, strict=True):
            if alone:
                free[side] += seconds if is_free(axis) else min(0.0, seconds - alone)
        free[side] = max(free[side], -compute)
    return free[0], free[1]


def estimate_unit_messages(units: Units, layout: Layout, name: Name, *, stays: bool) -> UnitMessages:
    """Return the gathers and reductions of the FSDP unit ``name`` (embedding, block or head) in each pass.

    Only blocks are gathered again. ``stays``: weights stay gathered.
    """
    reduces_every_backward = units.counts.reduces_every_micro_batch(layout, name)
    reduces_in_forward = overlaps_next_forward(name, units.job)
    time, no_message = units.gather_reduce(layout, name), MessageTime(0.0, 0.0)
    gather = MessageTime(time.gather, time.gather_busy)
    reduce = MessageTime(time.reduce, time.reduce_busy)
    gathers_again = needs_backward_gather(name, layout, units.job) and units.counts.has_backward(name)
    backward_gather = gather if time.again is None else MessageTime(time.again, 0.0)
    backward_messages = backward_gather if gathers_again else no_message
    if reduces_every_backward and not reduces_in_forward:
        backward_messages = MessageTime(
            backward_messages.seconds + reduce.seconds, backward_messages.busy + reduce.busy
        )
    next_forward = reduce if reduces_every_backward and reduces_in_forward else no_message
    n_micro_batches = layout.micro_batches(units.job)
    return UnitMessages(
        time,
        no_message if stays else gather,
        backward_messages,
        next_forward,
        reduces_every_backward,
        forward_copy=0.0 if stays else time.copy_out,
        backward_copy=time.copy_out * gathers_again + time.copy_in * reduces_every_backward,
        accumulation=(time.first_sum + (n_micro_batches - 1) * time.later_sum) / n_micro_batches,
    )


def overlaps_next_forward(name: Name, job: Job) -> bool:
    """Return True if a unit's reduction after every micro-batch overlaps the forward of the next."""
    return name == "embed" and job.stack.kernel_facts.overlaps_each_reduction


def leaves_link_free(units: Units, layout: Layout, axis: str) -> bool:
    """Return True if data parallelism's link between nodes is free during messages of an axis."""
    nodes = units.network.nodes
    return nodes(group(layout, axis)) == 1 or (nodes(group(layout, "shard")) == nodes(group(layout, "replica")) == 1)


def overlap_message(units: Units, message: MessageTime, compute_seconds: float) -> tuple[float, float]:
    """Return the exposed seconds of a message during ``compute_seconds`` of compute, and the slowdown of compute."""
    overlapped = min(message.overlappable_seconds, compute_seconds) if units.overlaps else 0.0
    return message.seconds - overlapped, units.contention * overlapped


def _with_messages(units: Units, name: Name, unit: OverlappedUnitSeconds) -> OverlappedUnitSeconds:
    """Return a unit whose weights are gathered, or gradients reduced, during its passes."""
    sent_messages, (forward_free, backward_free) = unit.messages, unit.free_seconds
    forward = unit.forward + sent_messages.forward_copy
    backward = unit.backward + sent_messages.backward_copy
    full_backward = unit.full_backward + sent_messages.backward_copy
    forward_compute = forward + forward_free
    forward_exposed, forward_slowdown = overlap_message(units, sent_messages.forward, forward_compute)
    backward_exposed, backward_slowdown = overlap_message(units, sent_messages.backward, backward + backward_free)
    full_exposed, full_slowdown = overlap_message(units, sent_messages.backward, full_backward + backward_free)
    return unit._replace(
        forward=forward + forward_slowdown,
        backward=backward + backward_slowdown,
        full_backward=full_backward + full_slowdown,
        forward_exposed=[*unit.forward_exposed, ("dp", forward_exposed)],
        backward_exposed=[*unit.backward_exposed, ("dp", backward_exposed)],
        full_backward_exposed=full_exposed,
        forward_spare=max(0.0, forward_compute - sent_messages.forward.seconds),
        next_forward_reduce=sent_messages.next_forward if overlaps_next_forward(name, units.job) else None,
    )


def _list_exposed(exposed: tuple[float, ...]) -> list[tuple[str, float]]:
    """Return nonzero exposed seconds, in the order of ``AXES``, with their axes."""
    return [(axis, seconds) for axis, seconds in zip(AXES, exposed, strict=True) if seconds] if any(exposed) else []
