"""Single changes of a layout, each with what follows from it: without a pipeline, for example, no schedule.

Every part that tries layouts near a given one makes them here: the walk (``neighbours.py``), the search for the
simplest (``simplest.py``), the reasons for each choice (``alternatives.py``), and the questions of ``ask``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from itertools import permutations
from typing import Any, NamedTuple, get_args

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.names import Offloaded
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, SCHEDULES, get_1f1b_name
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import is_legal
from fivefold.layout.validity.stack import can_express
from fivefold.model.spec import Model
from fivefold.planner.compare import with_stack
from fivefold.planner.predict import Planner
from fivefold.stack.catalog import build_stack

RANKED = ("dp", "tp", "cp", "pp")  # axes whose product is the world
DEGREES = {*RANKED, "v"}  # with which something else may no longer go
OFFLOADING_STACKS = ("deepspeed", "fsdp2")  # software that is named where that of the job offloads nothing


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
    """The keywords that a layout gets so that less is on the device, the layout with them, and the job that runs it.

    They name the software if it is another one than that of the job.
    """

    words: str
    layout: Layout
    job: Job


def list_offload_settings(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield what a job can offload in addition, under every layout: optimizer states, and weights too."""
    for other in _list_offloading_jobs(job):
        for added in _list_offloaded_states(other, job):
            if {*added} <= {*other.stack.runs.offloads} and not {*added} <= {*job.offload}:
                offload = _sort_offloaded({*job.offload, *added})
                yield f"offload={','.join(offload)}{_name_software(other, job)}", other.replace(offload=offload)


def list_offloadings(layout: Layout, job: Job, *, model: Model, with_activations: bool = False) -> Iterator[Offloading]:
    """Yield the layout with optimizer states in host memory, then with weights too, as far as the job leaves them.

    Its ZeRO stage is raised to the lowest at which the software frees on the device what it offloads. What the job's
    software does not offload is offloaded by another one that can express the layout. ``with_activations``: activations
    are offloaded too, if the software can.
    """
    for other in _list_offloading_jobs(job):
        activations = {"activations"} & {*other.stack.runs.offloads} if with_activations else set()
        for states in _list_offloaded_states(other, job):
            changed = _make_offloading(layout, other, _sort_offloaded({*states, *activations}))
            if changed is not None and (other is job or can_express(changed.layout, model=model, job=other)):
                yield changed._replace(words=f"{changed.words}{_name_software(other, job)}")


def _make_offloading(layout: Layout, job: Job, added: tuple[Offloaded, ...]) -> Offloading | None:
    """Return the layout that offloads ``added`` too; None if the job's software does not, or has it there already."""
    runs = job.stack.runs
    if not {*added} <= {*runs.offloads} or {*added} <= layout.list_offloaded(job):
        return None
    frees_alone = 2 if "optimizer" in added and not job.stack.offloads_with_parameters else 0
    stage = 3 if "parameters" in added else frees_alone if layout.dp * layout.cp == 1 else 0
    if "optimizer" in added:
        stage = max(stage, min(runs.optimizer_offload_zero))
    zero = max(layout.zero, stage)
    if zero not in runs.zero_with(layout.pp):
        return None
    changed = layout.replace(zero=zero, offload=_sort_offloaded({*layout.offload, *added}))
    words = f"zero{zero} " * (zero != layout.zero) + f"offload={'+'.join(added)}"
    if layout.cp > 1 and layout.cp_kind not in runs.cp_kinds:
        changed = changed.replace(cp_kind=runs.cp_kinds[0])
        words += f" cp={changed.cp_kind}"
    return Offloading(words, changed, job)


def _list_offloaded_states(job: Job, before: Job) -> list[tuple[Offloaded, ...]]:
    """Return optimizer states, and those with weights, as the job's software has them in host memory.

    Those that the software of ``before`` has there too are left out if it is another one.
    """
    both: tuple[Offloaded, ...] = ("parameters",) if job.stack.offloads_with_parameters else ("optimizer", "parameters")
    known = set() if job is before else {*before.stack.runs.offloads}
    return [states for states in (("optimizer",), both) if not {*states} <= known]


def _list_offloading_jobs(job: Job) -> Iterator[Job]:
    """Yield the job if its software can offload anything, else, and for Fivefold's trainer, in software that can."""
    if job.stack.runs.offloads:
        yield job
        if not job.stack.is_own_trainer:
            return
    usual = build_stack(job.stack.name)
    own_kernels = {"kernels": usual.kernels, "scan_temporary_bytes": usual.scan_temporary_bytes}
    for name in OFFLOADING_STACKS:
        with suppress(UserError):  # its facts contradict a setting of the job
            yield with_stack(job.replace(stack=job.stack.replace(**own_kernels)), name)


def _name_software(job: Job, before: Job) -> str:
    """Return the option that names the software of ``job`` if it is not that of ``before``."""
    return "" if job is before else f" --stack {job.stack.name}"


def _sort_offloaded(words: Set[str]) -> tuple[Offloaded, ...]:
    return tuple(word for word in get_args(Offloaded) if word in words)


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
