"""Single changes of a layout, each with what follows from it: without a pipeline, for example, no schedule.

Every part that tries layouts near a given one makes them here: the walk (``neighbours.py``), the search for the
simplest (``simplest.py``), the reasons for each choice (``alternatives.py``), and the questions of ``ask``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple, get_args

from fivefold.job import Job, Offloaded
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, SCHEDULES, get_1f1b_name
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import can_express, is_legal
from fivefold.planner.predict import Planner

RANKED = ("dp", "tp", "cp", "pp")  # axes whose product is the world
DEGREES = {*RANKED, "v"}  # with which something else may no longer go


def can_run(layout: Layout, planner: Planner) -> bool:
    """Return whether the layout is legal and the configuration of the job's software can express it."""
    model, job = planner.model, planner.job
    return can_express(layout, model=model, job=job) and is_legal(layout, model=model, job=job, machine=planner.machine)


def change(layout: Layout, **fields: Any) -> Layout | None:
    """Return the layout with other fields, without what they rule out; None if they contradict the rest of it."""
    ruled_out = {} if DEGREES.isdisjoint(fields) else _list_forced_changes(layout, layout.model_copy(update=fields))
    try:
        return layout.replace(**(ruled_out | fields))
    except ValueError:
        return None


def rank_moves(
    layout: Layout, *, give: Sequence[str] = RANKED, take: Sequence[str] = RANKED
) -> Iterator[Layout | None]:
    """Return every layout in which an axis of ``give`` has a fraction of its ranks, and one of ``take`` the others."""
    for giver, taker in permutations(RANKED, 2):
        if giver in give and taker in take:
            for factor in list_divisors(getattr(layout, giver))[1:]:
                degrees = {giver: getattr(layout, giver) // factor, taker: getattr(layout, taker) * factor}
                yield change(layout, **degrees)


def with_zero(layout: Layout, zero: int) -> Layout | None:
    """Return the layout with another ZeRO stage, and its shard group if that shards anything."""
    return change(layout, zero=zero, shard_group=layout.shard_group if zero else None)


def with_virtual_stages(layout: Layout, v: int) -> Layout | None:
    """Return the layout with 1F1B of ``v`` even stages on each rank."""
    return change(layout, schedule=get_1f1b_name(v), v=v, stages=())


class Offloading(NamedTuple):
    """The keywords that a layout gets so that less of its states is on the device, and the layout with them."""

    words: str
    layout: Layout


def list_offloads(job: Job) -> Iterator[tuple[Offloaded, ...]]:
    """Yield what a job can offload in addition: optimizer states, and weights too."""
    for added in (
        ("optimizer",),
        ("parameters",) if job.stack.offloads_with_parameters else ("optimizer", "parameters"),
    ):
        if not {*added} <= {*job.offload}:
            yield tuple(word for word in get_args(Offloaded) if word in {*job.offload, *added})


def list_offloadings(layout: Layout, job: Job) -> Iterator[Offloading]:
    """Yield the layout with optimizer states in host memory, and with weights there too, unless the job has them there.

    Its ZeRO stage is raised to the one from which the software frees on the device what it offloads.
    """
    offloaded = layout.list_offloaded(job)
    is_separate = not job.stack.offloads_with_parameters
    if "optimizer" not in offloaded:
        stage = 2 if is_separate and layout.dp * layout.cp == 1 else 0
        yield from _make_offloading(layout, job, ("optimizer",), stage=stage)
    if "parameters" not in offloaded:
        yield from _make_offloading(
            layout, job, ("optimizer", "parameters") if is_separate else ("parameters",), stage=3
        )


def _make_offloading(layout: Layout, job: Job, added: tuple[Offloaded, ...], *, stage: int) -> Iterator[Offloading]:
    """Yield the layout that offloads ``added`` under ZeRO ``stage`` or a later one, if its software has that stage."""
    words = {*layout.offload, *added}
    offload = tuple(word for word in get_args(Offloaded) if word in words)
    zero = max(layout.zero, stage)
    if zero not in job.stack.runs.zero_with(layout.pp):
        return
    changed = f"zero{zero} " if zero != layout.zero else ""
    yield Offloading(f"{changed}offload={'+'.join(added)}", layout.replace(zero=zero, offload=offload))


def _list_forced_changes(before: Layout, layout: Layout) -> dict[str, Any]:
    """Return what a layout with other degrees than ``before`` cannot keep, as it then is."""
    replicas, group = layout.dp * layout.cp, layout.shard_group
    fields: dict[str, Any] = {}
    if layout.pp == 1:
        fields |= {"schedule": DEFAULT_SCHEDULE, "v": 1}
    if layout.stages and layout.pp * layout.v != len(layout.stages):
        fields |= {"stages": ()}
    if layout.recompute_ranks >= layout.pp:
        fields |= {"ac": layout.recomputation}
    if layout.tp == 1:
        fields |= {"sp": True}
    if layout.tp % layout.etp:
        fields |= {"etp": 1}
    if layout.cp == 1:
        fields |= {"cp_kind": "ring"}
    if replicas != before.dp * before.cp:
        if replicas == 1:
            fields |= {"zero": 0}
        if replicas == 1 or group == replicas or (group and replicas % group):
            fields |= {"shard_group": None}
    return fields


def list_changed_keywords(before: Layout, after: Layout) -> str:
    """Return the words of ``after`` that ``before`` has not, and those that it dropped: ``dp32 tp4 without v2``."""
    keywords_before, keywords_after = str(before).split(), str(after).split()
    kinds_after = {_get_kind(keyword) for keyword in keywords_after}
    dropped = [
        keyword
        for keyword in keywords_before
        if keyword not in keywords_after and _get_kind(keyword) not in kinds_after
    ]
    added = [keyword for keyword in keywords_after if keyword not in keywords_before]
    return " ".join([*added, *(["without", *dropped] if dropped else [])])


def _get_kind(keyword: str) -> str:
    """Return what a word of a layout sets: ``tp8`` and ``tp4`` the same, and so any two schedules."""
    if keyword in SCHEDULES:
        return "schedule"
    return keyword.partition("=")[0] if "=" in keyword else keyword.rstrip("0123456789/x")
