"""Explains each choice of a proposed layout by its nearest alternatives: what each would cost, and why.

An alternative differs in one choice, and in what follows from it. The ranks that an axis gains come from dp, or from pp
or cp if dp has none to give. A pipeline of another size may have other virtual stages and uneven stages. Of the layouts
with the same choice, the fastest one that fits is shown. For the degree of an axis, that may be one that the search has
evaluated with the same degrees of the other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fivefold.layout.names import CP_KINDS, DEFAULT_ORDER
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE, get_1f1b_name
from fivefold.layout.spec import Layout
from fivefold.layout.text import format_stages
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.planner.predict import Planner
from fivefold.planner.search.layout_changes import can_run, change, list_changed_keywords, with_virtual_stages
from fivefold.planner.search.simplest import Evaluated, is_distinguishable
from fivefold.planner.search.stage_balance import balance
from fivefold.results.comparison import break_down
from fivefold.results.search_result import Why

CandidateList = list[Layout | None]  # of one alternative
Fields = dict[str, Any]
VIRTUAL_STAGES = (1, 2, 4)  # virtual stages that are tried where there was no pipeline
DEGREES = ("tp", "cp", "pp", "ep")  # axes whose degree is a choice
ALTERNATIVE_TIME_SHARE = 0.1  # of a step, by which a layout takes longer that is near the best
EQUAL_TIME_SHARE = 5e-4  # share of a step that prints as 0.0 %


def explain_choices(
    chosen: Evaluated,
    *,
    where: Where = ANY_LAYOUT,
    planners: Sequence[Planner] = (),
    evaluated: Iterable[Evaluated] = (),
) -> Iterator[Why]:
    """Yield a line per choice. A choice without a legal alternative has none.

    ``planners``: besides that of ``chosen`` those that reduce gradients of ZeRO-2 and -3 otherwise. ``evaluated``: the
    layouts of the search that fit.
    """
    every = list(dict.fromkeys((chosen.planner, *planners)))
    known = list(evaluated)
    for choice, alternatives in _list_choices(chosen.layout):
        explanations = [
            cost
            for name, layouts in alternatives
            if (
                cost := _describe_cost(
                    name, layouts, chosen, where=where, planners=every, known=_select_degree(known, name, chosen.layout)
                )
            )
        ]
        if explanations:
            yield Why(choice=choice, line="; ".join(explanations))


def _select_degree(evaluated: Iterable[Evaluated], name: str, chosen: Layout) -> list[Evaluated]:
    """Return the layouts that differ from ``chosen`` in the degree that ``name`` says (``pp2``) and in no other but dp.

    None for a choice that is no degree.
    """
    axis, degree = name.rstrip("0123456789"), name.lstrip("abcdefghijklmnopqrstuvwxyz")
    if axis not in DEGREES or not degree:
        return []
    wanted = {other: getattr(chosen, other) for other in DEGREES} | {axis: int(degree)}
    return [
        candidate
        for candidate in evaluated
        if all(getattr(candidate.layout, other) == wanted[other] for other in DEGREES)
    ]


def _describe_cost(
    name: str,
    layouts: CandidateList,
    chosen: Evaluated,
    *,
    where: Where,
    planners: Sequence[Planner],
    known: Sequence[Evaluated],
) -> str:
    """Return what an alternative costs; "" if it is illegal. The text says if ``where`` excludes it.

    ``known``: layouts of the alternative that fit, of which the fastest may be faster than any of ``layouts``.
    """
    planner = chosen.planner
    legal = [
        candidate
        for candidate in dict.fromkeys(layouts)
        if candidate and candidate != chosen.layout and can_run(candidate, planner)
    ]
    admitted = [candidate for candidate in legal if where.is_satisfied_by(candidate)]
    if not legal:
        return ""
    excess_by_candidate = {
        (candidate, planner_of_candidate): planner_of_candidate.excess_bytes(candidate)
        for candidate in admitted or legal
        for planner_of_candidate in (planners if candidate.zero > 1 else [planner])
    }
    fitting = [
        _evaluate(candidate, planner_of_candidate)
        for (candidate, planner_of_candidate), excess in excess_by_candidate.items()
        if not excess
    ]
    fitting += [other for candidate in fitting[:] if name.startswith("pp") and (other := _balance(candidate, where))]
    # without a close alternative that fits, one of the search speaks near the best only, where it has evaluated all
    max_seconds = float("inf") if fitting else chosen.seconds * (1 + ALTERNATIVE_TIME_SHARE)
    fitting += [candidate for candidate in known if candidate.seconds <= max_seconds]
    suffix = "" if admitted else " (excluded)"
    if not fitting:
        least, planner_of_candidate = min(excess_by_candidate, key=lambda pair: excess_by_candidate[pair])
        return (
            f"{_describe_alternative(name, least, chosen.layout)}{suffix} {planner_of_candidate.describe_miss(least)}"
        )
    best = min(fitting, key=lambda candidate: candidate.seconds)
    suffix += f" (--set reduce={best.planner.job.stack.reduce})" if best.planner is not planner else ""
    slower = best.seconds / chosen.seconds - 1
    node = planner.machine.ranks_per_node
    leaves = " leaves the node:" if best.layout.tp > node >= chosen.layout.tp else ""
    cost = (
        f"takes {abs(slower):.1%} {'longer' if slower >= 0 else 'less'}"
        if abs(slower) > EQUAL_TIME_SHARE
        else "takes as long"
    )
    parts = break_down(chosen.time.split, best.time.split) if abs(slower) > EQUAL_TIME_SHARE else ""
    uncertainty = "" if is_distinguishable(chosen, best) else ", within the uncertainty"
    reason = f" ({parts})" if parts else ""
    return f"{_describe_alternative(name, best.layout, chosen.layout)}{suffix}{leaves} {cost}{reason}{uncertainty}"


def _evaluate(layout: Layout, planner: Planner) -> Evaluated:
    estimate = planner.estimate(layout)
    return Evaluated(layout, estimate.step_time, estimate.peak_bytes, planner)


def _balance(even: Evaluated, where: Where) -> Evaluated | None:
    """Return a pipeline with its work spread evenly over its ranks; None if it cannot be, or does not fit."""
    balanced = balance(even.layout, even.planner)
    if balanced is None or not where.is_satisfied_by(balanced) or not even.planner.fits(balanced):
        return None
    return _evaluate(balanced, even.planner)


def _describe_alternative(name: str, other: Layout, chosen: Layout) -> str:
    """Return an alternative's name, and what it changes besides dp."""
    if other == chosen.replace(stages=()):
        return "an even split"
    added, _, dropped = list_changed_keywords(chosen, other).partition("without")
    implied = {*name.split(), get_1f1b_name(2)}  # which v says
    words = [word for word in added.split() if word not in implied and not word.startswith("dp")]
    is_dropped = tuple(kind for kind in ("ac=", "order=") if not name.startswith(kind))  # v and stages go with pp
    without = [word for word in dropped.split() if word.startswith(is_dropped)]
    return " ".join([name, *words, *(["without", *without] if without else [])])


def _list_choices(layout: Layout) -> Iterator[tuple[str, list[tuple[str, CandidateList]]]]:
    """Yield each choice in the layout's own keywords, with the ways of its closest alternatives by name."""
    for axis in DEGREES:
        degree = getattr(layout, axis)
        other_degrees = [size for size in (degree // 2, 2 * degree) if size >= 1]
        alternatives = [
            (f"{axis}{alternative_degree}", _change_degree(layout, axis, alternative_degree))
            for alternative_degree in other_degrees
        ]
        yield f"{axis}{degree}", alternatives + (_list_kinds(layout) if axis == "cp" and degree > 1 else [])
    if layout.dp * layout.cp > 1:
        yield _zero(layout)
    if layout.pp > 1:
        stages = f" {format_stages(layout.stages)}" if layout.stages else ""
        yield f"{layout.schedule} v{layout.v}{stages}", list(_list_schedules(layout))
    sizes = [size for size in (layout.mbs // 2, 2 * layout.mbs) if size >= 1]
    yield f"mbs{layout.mbs}", [(f"mbs{size}", [change(layout, mbs=size)]) for size in sizes]
    kinds = [kind for kind in ("none", "selective", "full") if kind != layout.ac]
    yield f"ac={layout.ac}", [(f"ac={kind}", [change(layout, ac=kind)]) for kind in kinds]
    if layout.order != DEFAULT_ORDER:
        yield f"order={'-'.join(layout.order)}", [("the default order", [change(layout, order=DEFAULT_ORDER)])]
    if not layout.sp:
        yield "nosp", [("sequence parallelism", [change(layout, sp=True)])]


def _list_kinds(layout: Layout) -> list[tuple[str, CandidateList]]:
    return [(f"cp={kind}", [change(layout, cp_kind=kind)]) for kind in CP_KINDS if kind != layout.cp_kind]


def _zero(layout: Layout) -> tuple[str, list[tuple[str, CandidateList]]]:
    """Return the ZeRO stage, and the ranks over which it shards."""
    zero = layout.zero
    group = layout.shard_group
    replicas = layout.dp * layout.cp
    stages = [(level, group if level else None) for level in (zero - 1, zero + 1) if 0 <= level <= 3]
    sizes = [size for size in (group // 2, 2 * group, replicas) if size > 1] if group else []
    stages += [(zero, size if size < replicas else None) for size in dict.fromkeys(sizes)]
    alternatives = [(stage, size, change(layout, zero=stage, shard_group=size)) for stage, size in stages]
    return _list_sharded(zero, group), [(_list_sharded(stage, size), [other]) for stage, size, other in alternatives]


def _list_sharded(zero: int, group: int | None) -> str:
    return f"zero{zero}" + (f"/{group}" if group else "")


def _list_schedules(layout: Layout) -> Iterator[tuple[str, CandidateList]]:
    yield DEFAULT_SCHEDULE, [with_virtual_stages(layout, 1)]
    for v in (layout.v // 2, 2 * layout.v):
        if v > 1 and layout.schedule == get_1f1b_name(layout.v):
            yield f"v{v}", [with_virtual_stages(layout, v)]
    yield "zb1p", [change(layout, schedule="zb1p", v=1, stages=())]


def _change_degree(layout: Layout, axis: str, degree: int) -> CandidateList:
    """Return layouts with another degree of ``axis``.

    Virtual stages stay as they are, or the total number of stages does; ZeRO changes if there were no replicas; each
    layout is also returned with half the micro-batch.
    """
    fields: Fields = {axis: degree, "zero": layout.zero}
    if axis not in ("ep", "etp"):
        moved = _find_exchanged_axis(layout, axis, degree)
        if moved is None:
            return []
        fields |= moved
    layouts = [fields]
    if axis == "pp":
        layouts = [
            fields | {"stages": ()} | virtual
            for virtual in (_list_virtual_stages(layout, degree) if degree > 1 else [{}])
        ]
    if layout.dp * layout.cp == 1:
        layouts = [candidate | {"zero": zero} for candidate in layouts for zero in (0, 1)]
    return [change(layout, **candidate) for candidate in layouts]


def _find_exchanged_axis(layout: Layout, axis: str, degree: int) -> Fields | None:
    """Return the axis that gives or takes the ranks, with its new degree; None if no axis has them."""
    current = int(getattr(layout, axis))
    if degree < current:
        return {"dp": layout.dp * current // degree}
    for giver in ("dp", "pp", "cp"):
        remaining, remainder = divmod(int(getattr(layout, giver)), degree // current)
        if giver != axis and not remainder and remaining:
            return {giver: remaining, **({"stages": ()} if giver == "pp" else {})}
    return None


def _list_virtual_stages(layout: Layout, degree: int) -> list[Fields]:
    """Return schedules for ``degree`` pipeline ranks like the layout's: with as many virtual stages, or stages."""
    if layout.schedule != get_1f1b_name(layout.v):
        return [{}]
    sizes = VIRTUAL_STAGES if layout.pp == 1 else (layout.v, max(1, layout.v * layout.pp // degree))
    return [{"v": v, "schedule": get_1f1b_name(v)} for v in dict.fromkeys(sizes)]
