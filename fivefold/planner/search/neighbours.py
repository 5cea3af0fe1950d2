"""The layouts that differ from a given one in one choice, and the walk that takes the best change each time.

A choice: ranks moved from one axis to another · ep · etp · mbs · ZeRO · its shard group · schedule and v ·
recomputation, and on which pipeline ranks · order · kind of cp · sp. What a choice rules out goes with it: no
pipeline, no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

from fivefold.layout.legal import is_legal, refuse, told
from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.schedule import PIPELINE_SCHEDULES
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, SCHEDULES
from fivefold.layout.spec import Layout, divisors
from fivefold.layout.where import ANY, CP_KINDS, Where
from fivefold.planner.predict import Estimate, Planner
from fivefold.planner.search.recomputations import recomputations_of
from fivefold.planner.search.stage_balance import balanced, recomputing_less
from fivefold.results.objectives import By
from fivefold.results.search_result import Change, Walk

Fields = dict[str, Any]
RANKED = ("dp", "tp", "cp", "pp")  # axes whose product is the world
LEAST = 0.002  # share of a step by which a change of the walk must be faster
MOST = 8  # changes of a walk


def walk(planner: Planner, layout: Layout, *, by: By = "time", where: Where = ANY) -> Walk:
    """Every single change of ``layout`` that ``where`` admits, the best first, and the best change after the best."""
    refuse(layout, model=planner.model, job=planner.job, machine=planner.machine)
    here = start = planner.estimate(layout)
    first: tuple[Estimate, ...] = ()
    path: list[Estimate] = []
    while len(path) < MOST:
        others = _ranked(planner, here.layout, by=by, where=where)
        first = first or tuple(others)
        if not others or not _better(planner, others[0], than=here, by=by):
            break
        here = others[0]
        path.append(here)
    before = (start, *path)
    return Walk(
        start=_change(planner, start, start),
        changes=tuple(_change(planner, start, each) for each in first),
        path=tuple(_change(planner, *each) for each in zip(before, path, strict=False)),
    )


def neighbours(layout: Layout, planner: Planner) -> Iterator[Layout]:
    """Every legal layout that differs from ``layout`` in one choice."""
    seen = {layout}
    for fields in _choices(layout, planner):
        try:
            made = layout.replace(**fields)
        except ValueError:
            continue
        model, job = planner.model, planner.job
        runs = told(made, model=model, job=job) and is_legal(made, model=model, job=job, machine=planner.machine)
        if made not in seen and runs:
            yield made
        seen.add(made)


def _choices(layout: Layout, planner: Planner) -> Iterator[Fields]:
    """The fields of each other choice; some of them may contradict the rest of the layout."""
    model, batch = planner.model, planner.job.even_batch
    for give, take in permutations(RANKED, 2):
        for factor in divisors(getattr(layout, give))[1:]:
            degrees: Fields = {give: getattr(layout, give) // factor, take: getattr(layout, take) * factor}
            yield degrees | _ruled_out(layout.model_copy(update=degrees))
    if model.moe:
        yield from ({"ep": ep} for ep in divisors(model.moe.experts))
        yield from ({"etp": etp} for etp in divisors(layout.tp))
    yield from ({"mbs": mbs} for mbs in divisors(max(1, batch // layout.dp)))
    if (replicas := layout.dp * layout.cp) > 1:
        yield from ({"zero": z, "shard_group": layout.shard_group if z else None} for z in range(4))
        yield from ({"shard_group": size if size < replicas else None} for size in divisors(replicas)[1:])
    if layout.pp > 1:
        yield from _schedules(layout, layers=model.layers)
        split = balanced(layout.replace(stages=()), planner)
        yield from ({"stages": stages} for stages in ((), split.stages if split else ()))
    for ac in recomputations_of(model):
        yield {"ac": ac}
        if fewer := recomputing_less(layout.replace(ac=ac), planner):
            yield {"ac": fewer.ac}
    active = {axis for axis in DEFAULT_ORDER if getattr(layout, axis) > 1}
    orders = {tuple(axis for axis in order if axis in active): order for order in permutations(DEFAULT_ORDER)}
    now = tuple(axis for axis in layout.order if axis in active)
    yield from ({"order": order} for axes, order in orders.items() if axes != now)
    yield from ({"cp_kind": kind} for kind in CP_KINDS)
    yield from ({"sp": sp} for sp in (True, False))


def _schedules(layout: Layout, *, layers: int) -> Iterator[Fields]:
    each = -(-layers // layout.pp)
    several = {*divisors(each), *divisors(max(1, layers // layout.pp))} - {1}
    for name, pipeline in PIPELINE_SCHEDULES.items():
        for v in sorted(several) if pipeline.stages_per_rank is None else (pipeline.stages_per_rank,):
            stages = layout.stages if v == layout.v else ()
            yield {"schedule": name, "v": v, "stages": stages}


def _ruled_out(layout: Layout) -> Fields:
    """What a layout with other degrees cannot keep."""
    replicas = layout.dp * layout.cp
    fields: Fields = {}
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
    if replicas == 1:
        fields |= {"zero": 0}
    if replicas == 1 or (layout.shard_group and replicas % layout.shard_group) or layout.shard_group == replicas:
        fields |= {"shard_group": None}
    return fields


def _ranked(planner: Planner, layout: Layout, *, by: By, where: Where) -> list[Estimate]:
    """The neighbours that ``where`` admits: those that fit first, then by time (of memory: by bytes)."""
    found = [planner.estimate(each) for each in neighbours(layout, planner) if where.holds(each)]

    def key(each: Estimate) -> tuple[bool, float, float]:
        fits, seconds, size = planner.fits(each.layout, each.ranks), each.step_time.seconds, float(each.peak_bytes)
        return (not fits, size, seconds) if by == "memory" or not fits else (False, seconds, size)

    return sorted(found, key=key)


def _better(planner: Planner, each: Estimate, *, than: Estimate, by: By) -> bool:
    """Whether a change is worth making: it fits at last, or is smaller where nothing fits, or is faster."""
    fits, fitted = planner.fits(each.layout, each.ranks), planner.fits(than.layout, than.ranks)
    if fits != fitted:
        return fits
    if not fits or by == "memory":
        return each.peak_bytes < than.peak_bytes
    return each.step_time.seconds < than.step_time.seconds * (1 - LEAST)


def _change(planner: Planner, before: Estimate, after: Estimate) -> Change:
    risk = planner.out_of_memory_risk(after.layout, after.ranks)
    return Change(
        change=changed_words(before.layout, after.layout),
        layout=str(after.layout),
        fits=risk <= planner.risk,
        risk=risk,
        memory_bytes=after.peak_bytes,
        step_seconds=after.step_time.seconds,
        faster=before.step_time.seconds / after.step_time.seconds,
        saved_bytes=before.peak_bytes - after.peak_bytes,
    )


def changed_words(before: Layout, after: Layout) -> str:
    """The words of ``after`` that ``before`` has not, and those that it dropped: ``dp32 tp4 without v2``."""
    was, now = str(before).split(), str(after).split()
    kinds = {_kind(word) for word in now}
    dropped = [word for word in was if word not in now and _kind(word) not in kinds]
    words = [word for word in now if word not in was]
    return " ".join([*words, *(["without", *dropped] if dropped else [])])


def _kind(word: str) -> str:
    """What a word of a layout sets: ``tp8`` and ``tp4`` the same, and so any two schedules."""
    if word in SCHEDULES:
        return "schedule"
    return word.partition("=")[0] if "=" in word else word.rstrip("0123456789/x")
