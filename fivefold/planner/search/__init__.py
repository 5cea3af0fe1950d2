"""Search over every legal layout: the best ones in order, and why others were rejected.

space · columns · shapes · placements             every legal layout as columns of integers; stages; process groups
bounds · memory_bounds · simulated_bound          lower bounds of time and memory for many layouts at once
estimates · optimistic_times · tables             figures that the bounds use, computed once for equal layouts
branch_and_bound · warm_start · incumbents        evaluates the best bounds first; good first layouts; the best so far
work · garbage                                    the work limit and the gap it allows; fewer garbage collections
stage_balance                                     pipelines whose stages differ
simplest · alternatives · robust                  the proposal; its neighbours; the layout with the smallest regret
layout_changes · job_changes · neighbours         single changes of a layout or a job, and walks over them
rejections · constraints · multi_machine          why layouts lost; the tightest constraint; one run on several machines

Bounds prune the space, so the answer is that of estimating every layout. Equal times are ranked by memory. With a work
limit, a search ends with a gap to the optimum, which the bounds prove.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fivefold.errors import StopSignal, UserError
from fivefold.job import Job, Recipe
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import list_reasons
from fivefold.layout.validity.job import validate_job
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.predict import Planner, get_planner
from fivefold.planner.search.alternatives import explain_choices
from fivefold.planner.search.bounds import Bounds
from fivefold.planner.search.branch_and_bound import BranchAndBound, Report
from fivefold.planner.search.columns import concatenate
from fivefold.planner.search.constraints import describe_uneven_batch, find_binding_constraint
from fivefold.planner.search.garbage import collect_garbage_rarely
from fivefold.planner.search.incumbents import EvaluatedLayout, Incumbents, rank_distinct
from fivefold.planner.search.rejections import find_job_fixes, make_near_miss
from fivefold.planner.search.robust import RegretEvaluator, join_gaps
from fivefold.planner.search.simplest import Evaluated, Simplest, build_alternative
from fivefold.planner.search.space import Space
from fivefold.planner.search.stage_balance import balance_stages
from fivefold.planner.search.warm_start import keep_losers, sweep_from_likely
from fivefold.planner.search.work import SearchWork
from fivefold.planner.time.memory_risk import MemoryRisk
from fivefold.results.search_result import Aim, NearMiss, Point, Proposal, Ranked, SearchResult, TightLayout
from fivefold.stack.spec import Reduce
from fivefold.step import FITS_RISK, TIGHT_RISK

LARGE_GAIN = 0.1  # of a tight layout, from which on the changes are named with which it fits
MISSES = 3  # near misses to show if nothing fits
MISSES_UNITS = 500_000  # of work to find them
UNLIMITED_BYTES = 2**60  # bytes that no layout needs
MIN_RANKED = 10  # layouts ranked at least where the stages of pipelines among them are balanced


class SearchProblem(NamedTuple):
    """The inputs of a search for a layout of the model on the machine that ``where`` admits and that fits."""

    model: Model
    machine: Machine
    job: Job
    where: Where = ANY_LAYOUT
    risk: float = FITS_RISK  # probability of running out of memory up to which a layout fits

    def build_planner(self, counts: Counts | None = None) -> Planner:
        """Return a planner of the problem, which reuses ``counts``."""
        return Planner(model=self.model, machine=self.machine, job=self.job, counts=counts, risk=self.risk)


@collect_garbage_rarely()
def search(
    *,
    model: Model,
    machine: Machine,
    job: Job,
    by: Aim = "time",
    top: int = 10,
    recipes: Sequence[Recipe] = (),
    reduces: Sequence[Reduce] = (),
    worlds: Sequence[int] = (),
    own: Layout | None = None,
    levels: int = 1,
    within: float | None = None,
    uneven: bool = False,
    report: Report | None = None,
    improved: Callable[[str, float], None] | None = None,
    fitted: Callable[[EvaluatedLayout], None] | None = None,
    risk: float = FITS_RISK,
    tight: bool = True,
    using: Planner | None = None,
    exact: bool = False,
    work: SearchWork | None = None,
    **space_arguments: Any,
) -> SearchResult:
    """Search for the ``top`` layouts by time, cost, memory or regret, and the fastest in each of ``levels`` budgets.

    ``within``: propose the simplest layout whose time is within this share of the best (``simplest.py``). Pipelines of
    uneven stages are tried too then, or with ``uneven``, and at the work limit only the best is proven. ``recipes``:
    precisions to try besides the job's; ``reduces``: other ways to reduce gradients. ``worlds``: numbers of ranks; by
    default all of the machine, and by cost every divisor of it. ``own``: a layout to predict next to those that are
    found. ``space_arguments``: arguments of ``Space``.

    ``improved``: called with each better layout and its score; ``fitted``: with every evaluated layout that fits.
    ``risk``: the probability of running out of memory up to which a layout fits. With ``tight`` the best of the tight
    layouts beyond it is returned too, if it beats those that fit. ``using``: a planner, as in ``find_fitting_layout``.
    ``work``: its counter of work, which has a limit other than the default, beyond which the search may leave a ``gap``
    to the best possible; ``exact``: no limit.

    If the search is interrupted once it has a layout, it returns the best so far. Raises ``UserError`` if no layout is
    legal.
    """
    start, work = time.perf_counter(), None if exact else work or SearchWork()
    problem = SearchProblem(model, machine, job, space_arguments.get("where", ANY_LAYOUT), risk)
    unsearched = _describe_unsearched(problem)
    ranked_own = _rank(problem.build_planner(), own) if own else None
    spaces = _list_spaces(problem, by=by, recipes=recipes, reduces=reduces, worlds=worlds, **space_arguments)
    proposes = (within is not None and by != "memory") or by == "robust"
    finds_best = proposes or uneven
    incumbents = Incumbents(
        _bound_peak(spaces, problem),
        by="time" if by == "robust" else by,
        top=max(top, MIN_RANKED) if finds_best else top,  # a shorter table has the same fastest layout
        levels=min(levels, 1),
        best_only=finds_best,
        improved=improved,
        fitted=fitted,
        largest_tight=_bound_peak(spaces, problem._replace(risk=TIGHT_RISK)) if tight and by in ("time", "cost") else 0,
        work=work,
    )
    total, timed = sum(space.layouts for _, space in spaces), by != "memory" or levels > 0
    solver = BranchAndBound(incumbents, ranks_per_node=machine.ranks_per_node, timed=timed, report=report, total=total)
    planners = _search_until_stopped(solver, spaces, {job: using} if using else {}, problem)
    if levels > 1 and planners and incumbents.best:
        planners = _search_budgets(solver, spaces, planners, problem, levels=levels, report=report)
    misses = () if incumbents.best else _find_near_misses(incumbents, spaces, planners, problem, exact=exact)
    total += balance_stages(incumbents, where=problem.where) if planners and finds_best else 0
    proposal = _propose(incumbents, within or 0.0, planners.values(), problem) if proposes else None
    incumbents.shorten_ranking(top)
    result = _build_result(incumbents, within or 0.0, problem, misses=misses).replace(
        by=by,
        own=ranked_own,
        proposal=proposal,
        tried=total if planners else solver.done,
        stopped=not planners,
        seconds=time.perf_counter() - start,
    )
    if by == "robust" and incumbents.best and planners:
        result = _rank_until_stopped(result, incumbents, space_arguments=space_arguments, report=report, exact=exact)
    reordered = () if by == "robust" else incumbents.describe_reordered()
    remarks = (*_list_remarks(result, recipes, problem), *unsearched, *reordered)
    return result.replace(remarks=remarks, seconds=time.perf_counter() - start)


def _build_result(
    incumbents: Incumbents, within: float, problem: SearchProblem, *, misses: tuple[NearMiss, ...]
) -> SearchResult:
    """Return the layouts that were found, and why others lost."""
    best = incumbents.best
    reasons = incumbents.rejections.reasons(
        problem.machine,
        best[0].estimate if best else None,
        risk=problem.risk,
        smallest=misses[0].layout if misses else "",
    )
    return SearchResult(
        by=incumbents.by,
        best=tuple(_rank(entry.planner, entry.estimate.layout) for entry in best),
        front=tuple(_select_pareto_front(incumbents.fitting)),
        risk=problem.risk,
        tight=_find_tight(incumbents, within),
        misses=misses,
        reasons=reasons,
        binding_constraint="" if best else _find_binding_constraint(problem),
        tried=0,
        gap=incumbents.gap,
        ranked=incumbents.is_exact and not incumbents.is_ranking_over,
        undecided=incumbents.is_undecided and not best,
        evaluated=incumbents.evaluated,
        seconds=0.0,
    )


def _list_remarks(result: SearchResult, recipes: Sequence[Recipe], problem: SearchProblem) -> tuple[str, ...]:
    """Return what the job or the chosen layout has that is valid but perhaps not intended."""
    chosen, job = None, problem.job
    if result.chosen:
        chosen = Layout.parse(result.chosen.step.layout)
        job = job.replace(
            precision=result.chosen.step.job["precision"], stack=job.stack.replace(reduce=result.chosen.reduce)
        )
    return get_planner(problem.model, problem.machine, job).list_remarks(
        chosen, is_searched=True, recipes=(problem.job.precision, *recipes), where=problem.where
    )


def _list_spaces(
    problem: SearchProblem,
    *,
    by: Aim,
    recipes: Sequence[Recipe],
    reduces: Sequence[Reduce],
    worlds: Sequence[int],
    **space_arguments: Any,
) -> list[tuple[Job, Space]]:
    """Return the layouts of every job and number of ranks. Raises ``UserError`` if there is none."""
    model, machine, job, *_ = problem
    jobs = [job, *(job.replace(precision=recipe) for recipe in recipes if recipe != job.precision)]
    for variant in jobs:
        validate_job(model, variant, machine)
    worlds = worlds or (list_divisors(machine.ranks)[::-1] if by == "cost" else (machine.ranks,))
    spaces = list(_build_spaces(jobs, reduces, model=model, worlds=worlds, **space_arguments))
    if not any(space.layouts for _, space in spaces):
        raise UserError(_describe_no_layout(problem, worlds=worlds, **space_arguments))
    return spaces


def _build_spaces(
    jobs: Sequence[Job], reduces: Sequence[Reduce], *, model: Model, worlds: Sequence[int], **space_arguments: Any
) -> Iterator[tuple[Job, Space]]:
    """Yield the layouts of each job.

    For a changed job these are only the ones that also differ by how often gradients are reduced.
    """
    for job in jobs:
        for world in worlds:
            yield job, Space(model, job, world=world, **space_arguments)
    for job in (
        base_job.replace(reduce=reduce) for base_job in jobs for reduce in reduces if reduce != base_job.stack.reduce
    ):
        for world in worlds:
            yield job, Space(model, job, world=world, reduces_often=True, **space_arguments)


def _propose(
    incumbents: Incumbents, within: float, planners: Collection[Planner], problem: SearchProblem
) -> Proposal | None:
    """Return the simplest layout within ``within`` of the best, on as many ranks and in the same precision.

    By cost, the best is the fastest layout within that share of the lowest cost: it may take more ranks.

    If the best layout has another precision than the job, the fastest in the job's is returned too (``unchanged``).
    Layouts estimated on the way are added to ``incumbents.best``. Returns None if nothing fits.
    """
    if not incumbents.best:
        return None
    where, precision = problem.where, problem.job.precision.name
    largest_score = incumbents.best[0].score * (1 + within)
    best = incumbents.best[0]
    if incumbents.by == "cost":
        similar_costs = (entry for entry in incumbents.fitting if entry.score <= largest_score)
        best = min(similar_costs, key=lambda entry: (entry.seconds, *entry[:4]))
    ranks = best.estimate.layout.world
    max_seconds = largest_score / ranks if incumbents.by == "cost" else largest_score
    # no planner finished if the search was interrupted: take those of the layouts found
    usable = planners or dict.fromkeys(entry.planner for entry in incumbents.fitting)
    same_precision = [planner for planner in usable if planner.job.precision == best.planner.job.precision]
    evaluated = (
        entry.to_evaluated()
        for entry in incumbents.fitting
        if entry.planner in same_precision and entry.estimate.layout.world == ranks
    )
    simplest = Simplest(
        same_precision, evaluated, max_seconds=max_seconds, largest_peak=incumbents.largest_peak, where=where
    )
    chosen = simplest.find()
    simpler, faster = (build_alternative(rival, chosen) for rival in simplest.find_rivals(chosen))
    unchanged = [entry for entry in incumbents.fitting if entry.precision == precision != best.precision]
    fastest_unchanged = min(unchanged, key=lambda entry: entry[:4]).to_evaluated() if unchanged else None
    listed = {(entry.text, entry.planner.job) for entry in incumbents.best}
    for candidate in sorted(
        simplest.evaluated.values(), key=lambda candidate: (candidate.seconds, candidate.peak_bytes)
    )[: incumbents.top]:
        if (str(candidate.layout), candidate.planner.job) not in listed:
            incumbents.evaluate(candidate.planner, candidate.layout)
    incumbents.best = rank_distinct(incumbents.fitting)[: incumbents.top]
    return Proposal(
        layout=str(chosen.layout),
        within=within,
        simpler=simpler,
        faster=faster,
        unchanged=build_alternative(fastest_unchanged, chosen),
        similar_layouts=sum(entry.seconds <= simplest.max_seconds for entry in simplest.evaluated.values()),
        choice=_rank(chosen.planner, chosen.layout),
        why=tuple(explain_choices(chosen, where=where, planners=same_precision, evaluated=simplest.evaluated.values())),
        remark="; ".join(
            filter(
                None,
                (
                    describe_uneven_batch(chosen.layout, batch=chosen.planner.job.global_batch),
                    _describe_idle_ranks(chosen, incumbents),
                ),
            )
        ),
    )


def _describe_idle_ranks(chosen: Evaluated, incumbents: Incumbents) -> str:
    """Return what the fastest layout on more ranks gains, and costs more; empty if the proposal takes all ranks."""
    world, ranks = chosen.layout.world, chosen.planner.machine.ranks
    more = [entry for entry in incumbents.fitting if entry.estimate.layout.world > world]
    if world == ranks:
        return ""
    line = f"{world:,} of the {ranks:,} GPUs: the others are idle"
    if not more:
        return line
    fastest = min(more, key=lambda entry: (entry.seconds, *entry[:4]))
    layout = fastest.estimate.layout
    less_time = 1 - fastest.seconds / chosen.seconds
    more_cost = fastest.seconds * layout.world / (chosen.seconds * world) - 1
    return f"{line}; {layout} on {layout.world:,} takes {less_time:.1%} less time and {more_cost:.1%} more GPU hours"


def _rank_until_stopped(
    result: SearchResult, known: Incumbents, *, space_arguments: Mapping[str, Any], report: Report | None, exact: bool
) -> SearchResult:
    """Return ``result`` ranked by regret, or ranked by time if the ranking is interrupted."""
    try:
        return _rank_by_regret(result, known, space_arguments=space_arguments, report=report, exact=exact)
    except (KeyboardInterrupt, StopSignal):
        return result.replace(by="time", stopped=True)


def _rank_by_regret(
    result: SearchResult, known: Incumbents, *, space_arguments: Mapping[str, Any], report: Report | None, exact: bool
) -> SearchResult:
    """Return ``result`` with the most robust layouts as its best, and with a proposal compared with them."""
    planner, fastest = known.best[0].planner, known.best[0].estimate.layout
    simplest = Layout.parse(result.proposal.layout) if result.proposal else fastest
    evaluator = RegretEvaluator(
        planner, world=fastest.world, space_arguments=space_arguments, report=report, exact=exact
    )
    fitting = (candidate.estimate.layout for candidate in known.fitting if candidate.planner is planner)
    ranked = evaluator.find_most_robust(fitting, included=(fastest, simplest), top=known.top)
    within = f"the simplest within {result.proposal.within:.1%}" if result.proposal else "the fastest"
    best = [evaluated.layout for evaluated in ranked[: known.top]]
    return result.replace(
        best=tuple(_rank(planner, layout) for layout in best),
        proposal=None,
        gap=join_gaps(result.gap, evaluator.gap),
        robust=evaluator.to_record(ranked, notes={simplest: within, fastest: "the fastest"}, top=known.top),
    )


def _bound_peak(spaces: Sequence[tuple[Job, Space]], problem: SearchProblem) -> int:
    """Return the predicted peak that no layout of ``spaces`` exceeds if it fits."""
    return max(
        MemoryRisk(model=problem.model, machine=problem.machine, job=job).largest_peak(space.world, risk=problem.risk)
        for job, space in spaces
    )


def _find_tight(incumbents: Incumbents, within: float) -> TightLayout | None:
    """Return the fastest, or cheapest, tight layout, compared with the best that fits.

    None if it does not gain more than ``within`` of the best, which a proposal gives up for a simpler layout.
    """
    tight = incumbents.tight
    best = incumbents.best[0] if incumbents.best else None
    if tight is None or (best and best.score <= tight.score * (1 + within)):
        return None
    gain = best.score / tight.score - 1 if best else None
    fixes = find_job_fixes(tight.planner, tight.estimate.layout) if gain is not None and gain >= LARGE_GAIN else ()
    return TightLayout(
        layout=tight.text,
        precision=tight.planner.job.precision.name,
        reduce=tight.planner.job.stack.reduce,
        risk=tight.planner.out_of_memory_risk(tight.estimate.layout, tight.estimate.ranks),
        memory_bytes=tight.peak_bytes,
        step_seconds=tight.seconds,
        faster=gain,
        gain="cheaper" if incumbents.by == "cost" else "faster",
        fixes=tuple(fix.words for fix in fixes),
    )


@collect_garbage_rarely()
def find_fitting_layout(
    where: Where,
    *,
    model: Model,
    machine: Machine,
    job: Job,
    risk: float = FITS_RISK,
    using: Planner | None = None,
    work: SearchWork | None = None,
) -> Layout | None:
    """Return a layout over all ranks that fits and that ``where`` admits.

    It is a ``search`` that stops at the first one.

    ``using``: a planner of the same model and job on other ranks of the machine, whose counts are reused. ``work``: if
    its limit is exceeded, no layout was found, but one may fit.
    """
    problem = SearchProblem(model, machine, job, where, risk)
    planners = {job: using} if using else {}
    space = Space(model, job, world=machine.ranks, where=where)
    smallest = space.restrict_to_smallest()
    for admitted in (smallest, space) if smallest.layouts < space.layouts else (space,):
        spaces = [(job, admitted)]
        peak = _bound_peak(spaces, problem)
        incumbents = Incumbents(peak, by="memory", top=1, levels=0, any_will_do=True, work=work)
        solver = BranchAndBound(incumbents, ranks_per_node=machine.ranks_per_node, timed=False)
        planners |= _search_spaces(solver, spaces, planners, problem)
        if incumbents.best:
            return incumbents.best[0].estimate.layout
    return None


def _describe_unsearched(problem: SearchProblem) -> tuple[str, ...]:
    """Return a remark on recomputations that ``where`` names and the software's config cannot express, else nothing.

    Raises ``UserError`` if it names no others.
    """
    stack, where = problem.job.stack, problem.where
    named = where.list_values("ac")
    skipped = [ac for ac in named if not stack.runs.can_express(ac, experts=problem.model.moe is not None)]
    if not skipped:
        return ()
    line = (
        f"search does not try ac={','.join(skipped)} with {stack.name}, whose config cannot express it; "
        "predict and compare take it"
    )
    if len(skipped) == len(named):
        raise UserError(f"where {str(where)!r}: {line}")
    return (line,)


def _find_binding_constraint(problem: SearchProblem) -> str:
    """Return the constraint to relax when no layout fits, and a layout that fits without it."""
    model, machine, job, where, risk = problem
    if not where.terms:
        return ""

    def find_passing(admitted: Where) -> Layout | None:
        return find_fitting_layout(admitted, model=model, machine=machine, job=job, risk=risk)

    binding = find_binding_constraint(where, find_layout=find_passing, model=model, world=machine.ranks)
    return f"nothing that meets {str(where)!r} fits; {binding}" if binding else ""


def _search_until_stopped(
    solver: BranchAndBound,
    spaces: Sequence[tuple[Job, Space]],
    known: Mapping[Job, Planner],
    problem: SearchProblem,
) -> dict[Job, Planner]:
    """Run ``_search_spaces``. Returns an empty result if it is interrupted when a layout is known."""
    try:
        return _search_spaces(solver, spaces, known, problem)
    except (KeyboardInterrupt, StopSignal):
        if not solver.incumbents.best:
            raise
        return {}


def _search_budgets(
    solver: BranchAndBound,
    spaces: Sequence[tuple[Job, Space]],
    known: Mapping[Job, Planner],
    problem: SearchProblem,
    *,
    levels: int,
    report: Report | None,
) -> dict[Job, Planner]:
    """Search again, for the fastest layouts in each of ``levels`` memory budgets, with as much work as before.

    It comes after the search for the best, which would find a slower layout if budgets took a part of its work.
    Returns the planners, or an empty result if it is interrupted.
    """
    incumbents = solver.incumbents
    work, incumbents.work = incumbents.work, incumbents.work and SearchWork(exact_units=incumbents.work.exact_units)
    incumbents.set_budgets(levels)
    with keep_losers(solver):
        solver.done, solver.report = 0, report
        planners = _search_until_stopped(solver, spaces, known, problem)
    incumbents.work = work
    return planners


def _search_spaces(
    solver: BranchAndBound,
    spaces: Sequence[tuple[Job, Space]],
    known: Mapping[Job, Planner],
    problem: SearchProblem,
) -> dict[Job, Planner]:
    """Search each space; return the planners by job, which reuse the counts of those ``known``."""
    planners: dict[Job, Planner] = {}
    bounds: Bounds | None = None
    for job, space in spaces:
        if space.layouts:
            if job not in planners:
                other = known.get(job)
                if other and (other.machine, other.risk) == (problem.machine, problem.risk):
                    planners[job] = other
                else:
                    planners[job] = problem._replace(job=job).build_planner(other.counts if other else None)
            planned = planners[job].job
            has_equal_bounds = bounds is not None and bounds.planner.job.replace(reduce=job.stack.reduce) == planned
            like = bounds if has_equal_bounds else None
            work = solver.incumbents.work
            bounds = Bounds(planners[job], space, concatenate(()), like=like, work=work)
            sweep_from_likely(solver, bounds)
    return planners


def _find_near_misses(
    incumbents: Incumbents,
    spaces: Sequence[tuple[Job, Space]],
    planners: Mapping[Job, Planner],
    problem: SearchProblem,
    *,
    exact: bool,
) -> tuple[NearMiss, ...]:
    """Return the layouts that need the least memory, searched as if memory were unlimited.

    Unless ``exact``, others may need a little less, beyond a work limit. Those that fit after all, because the search
    had spent its work, are added to ``incumbents``.
    """
    machine = problem.machine
    unlimited = machine.replace(chip=machine.chip.replace(memory_bytes=UNLIMITED_BYTES))
    work = None if exact else SearchWork(exact_units=MISSES_UNITS)
    smallest = Incumbents(UNLIMITED_BYTES, by="memory", top=MISSES, levels=0, work=work)
    solver = BranchAndBound(smallest, ranks_per_node=machine.ranks_per_node, timed=False)
    _search_spaces(solver, spaces, planners, problem._replace(machine=unlimited))
    planner_by_job = {planner.job: planner for planner in planners.values()}
    nearest = [(planner_by_job[candidate.planner.job], candidate.estimate) for candidate in smallest.best]
    if incumbents.is_undecided:
        incumbents.add_unsearched(nearest)
    return () if incumbents.best else tuple(make_near_miss(estimate, planner) for planner, estimate in nearest)


def _select_pareto_front(evaluated: Sequence[EvaluatedLayout]) -> Iterator[Point]:
    """Yield the Pareto front of time and memory, from the fastest layout to the smallest."""
    smallest = None
    for candidate in sorted(evaluated, key=lambda candidate: (candidate.seconds, candidate.peak_bytes)):
        if smallest is None or candidate.peak_bytes < smallest:
            smallest = candidate.peak_bytes
            yield Point(
                layout=candidate.text,
                precision=candidate.planner.job.precision.name,
                reduce=candidate.planner.job.stack.reduce,
                world=candidate.estimate.layout.world,
                memory_bytes=candidate.peak_bytes,
                step_seconds=candidate.seconds,
            )


def _rank(planner: Planner, layout: Layout) -> Ranked:
    """Return a layout's step with its GPU hours and, if the machine has a price, dollars per step."""
    step = planner.step(layout)
    hours = step.time.step_seconds * step.world / 3600
    price = planner.machine.dollars_per_rank_hour
    dollars = None if price is None else hours * price
    reduce = planner.job.stack.reduce
    return Ranked(step=step, gpu_hours=hours, dollars=dollars, reduce=reduce)


def _describe_no_layout(problem: SearchProblem, *, worlds: Sequence[int], **space_arguments: Any) -> str:
    """Return the error of a search without a legal layout, with the constraint or batch that would allow one."""
    model, machine, job, where, _ = problem

    def find_legal(admitted: Where, job: Job = job) -> Layout | None:
        for space in (Space(model, job, world=world, **{**space_arguments, "where": admitted}) for world in worlds):
            for partials in space.blocks if space.layouts else ():
                if len(indices := space.count_candidates(partials).nonzero()[0]):
                    return space.pick_layout(partials, int(indices[0]))
        return None

    ranks = machine.ranks
    near_batch = -(-job.global_batch // ranks) * ranks
    larger = job.replace(global_batch=near_batch)
    if where.terms and (binding := find_binding_constraint(where, find_layout=find_legal, model=model, world=ranks)):
        fix = f"gbs {near_batch} would allow it, or {binding}" if find_legal(where, larger) else str(binding)
        refused = f"meets {str(where)!r} with gbs {job.global_batch}"
        return f"no layout of {model.name} on {ranks} ranks of {machine.name} {refused}; {fix}"
    if near_batch == job.global_batch:
        zero = job.stack.runs.expressible_zero(pp=1)[-1] if ranks > 1 else 0
        plain = Layout(dp=ranks, zero=zero, mbs=job.min_micro_batch)
        if (reason := next(list_reasons(plain, model=model, job=job, machine=machine), None)) is not None:
            return (
                f"no layout of {model.name} on {ranks} ranks of {machine.name} is valid with {job.stack.name}; that of "
                f"data parallelism alone, {str(plain)!r}: {reason}"
            )
    return (
        f"no layout spreads {model.name} with global batch {job.global_batch} over all {ranks} ranks of "
        f"{machine.name}; try gbs {near_batch}, or fewer ranks"
    )
