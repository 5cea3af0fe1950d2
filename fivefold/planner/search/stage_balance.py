"""Pipelines with uneven stages: equal seconds on every rank (``stages=9x2-8-6``), or recomputation on few ranks.

Input: a pipeline layout. Output: the faster layouts with other stages. The load of a rank is the seconds of one
micro-batch through its stages. One layer at a time (or a part of several that stay together) moves from the most loaded
rank to another while the largest load becomes smaller. The first ranks hold the most micro-batches, so recomputation
(``ac=full@2``) starts with them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from fivefold.layout.spec import Layout
from fivefold.layout.stages import count_stage_parts, sum_parts
from fivefold.layout.validity import is_legal
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.planner.counts.update import list_stages
from fivefold.planner.predict import Planner
from fivefold.planner.search.incumbents import Incumbents
from fivefold.planner.time.stage_time import estimate_stage_seconds

MOVES = 16  # layers that may change their rank
LOOKED_AT, TRIED = 60, 20  # of the best pipelines, those whose stages are weighed, and evened out
MIN_LOAD_GAIN = 1e-3  # share of the largest load by which a move must lower it


def balance(layout: Layout, planner: Planner) -> Layout | None:
    """Return the layout with its work spread evenly over the pipeline's ranks.

    Returns None if no move of a layer helps.
    """
    if layout.pp == 1 or not planner.job.stack.runs.uneven_stages:
        return None
    stages_of_ranks, best = list_stages(layout), layout
    loads = _sum_loads(layout, planner, stages_of_ranks)
    for _ in range(MOVES):
        best_move = min(
            (
                (max(rank_loads), other, rank_loads)
                for other in _move_layer(best, planner, loads, stages_of_ranks)
                for rank_loads in [_sum_loads(other, planner, stages_of_ranks)]
            ),
            key=lambda move: move[0],
            default=None,
        )
        if best_move is None or best_move[0] >= max(loads) * (1 - MIN_LOAD_GAIN):
            break
        _, best, loads = best_move
    if best is layout or not is_legal(best, model=planner.model, job=planner.job, machine=planner.machine):
        return None
    return best


def reduce_recomputation(layout: Layout, planner: Planner) -> Layout | None:
    """Return the layout with recomputation on as few pipeline ranks as it needs to fit; None if it needs all."""
    if not _recomputes_everywhere(layout, planner):
        return None
    variants = [layout.replace(ac=f"{layout.ac}@{ranks}") for ranks in range(1, layout.pp)]
    first_fitting = bisect_left(variants, True, key=planner.fits)
    return variants[first_fitting] if first_fitting < len(variants) else None


def _recomputes_everywhere(layout: Layout, planner: Planner) -> bool:
    """Return whether all pipeline ranks recompute although some would fit without it."""
    can_restrict = (
        layout.pp > 1 and layout.ac != "none" and "@" not in layout.ac and not layout.pipeline.enters_both_ends
    )
    return can_restrict and planner.job.stack.runs.can_express(f"{layout.ac}@1", experts=planner.model.moe is not None)


def bound_gain(layout: Layout, planner: Planner) -> float:
    """Return an upper bound of the share of its time that a layout can save by other stages and less recomputation."""
    stages_of_ranks = list_stages(layout)
    least_loads = _sum_loads(
        layout.replace(ac="none") if _recomputes_everywhere(layout, planner) else layout, planner, stages_of_ranks
    )
    return 1 - sum(least_loads) / len(least_loads) / max(_sum_loads(layout, planner, stages_of_ranks))


def balance_stages(incumbents: Incumbents, *, where: Where = ANY_LAYOUT) -> int:
    """Evaluate the best pipelines of ``incumbents`` with balanced stages and with recomputation on fewer ranks.

    Only those that may beat the best are evaluated. Return how many there were.
    """
    pipelines = [
        candidate
        for candidate in incumbents.fitting
        if candidate.estimate.layout.pp > 1 and not candidate.estimate.layout.stages
    ]
    n_evaluated = 0
    for pipeline in sorted(pipelines, key=lambda candidate: candidate[:4])[:LOOKED_AT]:
        time_ratio = 1 - bound_gain(pipeline.estimate.layout, pipeline.planner)
        if n_evaluated < TRIED and incumbents.can_candidate_win(
            pipeline.score * time_ratio, pipeline.peak_bytes, pipeline.seconds * time_ratio
        ):
            for variant in filter(
                where.is_satisfied_by, _list_alternatives(pipeline.estimate.layout, pipeline.planner)
            ):
                incumbents.evaluate(pipeline.planner, variant)
                n_evaluated += 1
    return n_evaluated


def _list_alternatives(layout: Layout, planner: Planner) -> Iterator[Layout]:
    """Yield the layout with balanced stages; with less recomputation; with both."""
    less_recomputed = reduce_recomputation(layout, planner)
    yield from (balanced for base in (layout, less_recomputed) if base and (balanced := balance(base, planner)))
    if less_recomputed:
        yield less_recomputed


def _sum_loads(layout: Layout, planner: Planner, stages_of_ranks: tuple[tuple[int, ...], ...]) -> list[float]:
    """Return the seconds of one micro-batch through the stages of each pipeline rank, forward and backward."""
    stages = estimate_stage_seconds(planner.units, layout).times
    return [
        sum(stages[stage].forward.seconds + stages[stage].full_backward.seconds for stage in rank_stages)
        for rank_stages in stages_of_ranks
    ]


def _move_layer(
    layout: Layout, planner: Planner, loads: list[float], stages_of_ranks: tuple[tuple[int, ...], ...]
) -> Iterator[Layout]:
    """Yield the layout with one layer (or part) less on the most loaded rank, and one more on a less loaded one."""
    parts = planner.model.stage_parts
    sizes = count_stage_parts(planner.model, layout)
    least_sizes = [1] * len(sizes)
    least_sizes[0] = least_sizes[-1] = int(planner.job.freezes_text)  # else an end may have no layers
    busiest = max(range(len(loads)), key=lambda rank: loads[rank])
    giving_stages = [stage for stage in stages_of_ranks[busiest] if sizes[stage] > least_sizes[stage]]
    if not giving_stages:
        return
    giving_stage = max(giving_stages, key=lambda stage: (sizes[stage], stage))
    receiving_ranks = sorted((rank for rank in range(len(loads)) if rank != busiest), key=lambda rank: loads[rank])[:2]
    for rank in receiving_ranks:
        receiving_stage = min(stages_of_ranks[rank], key=lambda stage: (sizes[stage], stage))
        if receiving_stage != giving_stage:
            changed = list(sizes)
            changed[giving_stage] -= 1
            changed[receiving_stage] += 1
            yield layout.replace(stages=sum_parts(parts, changed))
