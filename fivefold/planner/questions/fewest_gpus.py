"""The smallest number of ranks on which a model fits, and a layout for it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.batch import MAX_TRIED_GPUS
from fivefold.layout.spec import Layout
from fivefold.layout.validity.job import validate_job
from fivefold.layout.where import ANY_LAYOUT
from fivefold.machine.catalog import with_ranks
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.questions.answer import build_answer
from fivefold.planner.questions.least_states import bound_ranks
from fivefold.planner.search import find_fitting_layout, search
from fivefold.planner.search.garbage import collect_garbage_rarely
from fivefold.planner.search.layout_changes import list_offload_settings
from fivefold.planner.search.work import EXACT_UNITS, WorkBudget
from fivefold.results.search_result import QuestionAnswer
from fivefold.step import FITS_RISK

NUMBERS_UNITS = 14 * EXACT_UNITS // 5  # of work to try all numbers of ranks, and for the fastest layout of the fewest
GPUS_UNITS = EXACT_UNITS // 2  # of work to find the fastest layout of the fewest ranks


@collect_garbage_rarely()
def find_fewest_gpus(
    *,
    model: Model,
    machine: Machine,
    job: Job,
    risk: float = FITS_RISK,
    within: float | None = None,
    report: Callable[[str, int, int], None] | None = None,
) -> QuestionAnswer:
    """Return the smallest number of ranks of the machine on which a layout fits, with a layout for it.

    That is the fastest, or, with ``within``, what a search proposes: the simplest whose step is longer by that share at
    most.
    Tried are powers of two and all ranks, then multiples of a node below the first of them that fits. A number is
    taken not to fit, and named, if no layout is found to fit within a work limit, or within the work that is left of
    what all numbers share. ``report`` is called with progress.
    """
    validate_job(model, job, machine)
    most, least = machine.ranks, bound_ranks(model, machine, job)
    planner = Planner(model=model, machine=machine, job=job, risk=risk)
    fitting, undecided, budget = dict[int, Layout](), list[int](), WorkBudget(NUMBERS_UNITS)

    def fits(ranks: int) -> bool:
        if ranks < least:
            return False
        if report:
            report(f"layouts of {ranks:,} GPUs", 0, 0)
        resized, work = with_ranks(machine, ranks), budget.allot(reserve=GPUS_UNITS)
        layout = find_fitting_layout(
            ANY_LAYOUT, model=model, machine=resized, job=job, risk=risk, using=planner, work=work
        )
        if layout is not None:
            fitting[ranks] = layout
        elif work.is_spent:
            undecided.append(ranks)
        return layout is not None

    sizes = sorted({*(2**power for power in range(most.bit_length())), most})
    enough = next((size for size in sizes if fits(size)), None)
    if enough is None:
        raise UserError(
            _describe_too_few(model, machine, job, least=ceil(least), undecided=undecided, budget=budget, risk=risk)
        )
    too_few = max((size for size in sizes if size < enough), default=0)
    ranks = next((size for size in _list_node_multiples(too_few, enough, machine.ranks_per_node) if fits(size)), enough)
    resized = with_ranks(machine, ranks)
    result = search(
        model=model,
        machine=resized,
        job=job,
        top=1,
        risk=risk,
        within=within,
        tight=False,
        using=planner,
        work=budget.allot(GPUS_UNITS),
        report=(lambda done, total: report(f"layouts of {ranks:,} GPUs", done, total)) if report else None,
    )
    layout = Layout.parse(result.chosen.step.layout) if result.chosen else fitting[ranks]
    planner = Planner(model=model, machine=resized, job=job, counts=planner.counts, risk=risk)
    remarks = (
        *planner.list_remarks(layout, is_searched=True),
        result.gap_remark(),
        "" if result.best else "the search ended at its work limit: its layout is the first one that fits",
        undecided and f"whether {_join_numbers(undecided)} GPUs would fit was not decided within the work limit",
    )
    bound, node = "at most " if undecided else "", machine.ranks_per_node
    tried = f", multiples of {node} from {too_few} to {enough}" if too_few + node < enough else ""
    line = f"{bound}{ranks} of {machine.name} (tried: powers of two{tried})"
    return build_answer("fewest GPUs", line, ranks, planner, layout).replace(remarks=tuple(filter(None, remarks)))


def _join_numbers(numbers: list[int]) -> str:
    *most, last = (f"{number:,}" for number in sorted(numbers))
    return f"{', '.join(most)} and {last}" if most else last


def _describe_too_few(
    model: Model, machine: Machine, job: Job, *, least: int, undecided: list[int], budget: WorkBudget, risk: float
) -> str:
    """Return that no number of ranks up to those of the machine is known to fit, and what to change."""
    is_default = job.global_batch == Job.model_fields["global_batch"].default
    batch = f"{job.global_batch} sequences per step{' (the default)' if is_default else ''}"
    setting = f"up to {machine.ranks:,} with seq {job.sequence} and {batch}"
    advice = "use more GPUs"
    if least > machine.ranks:
        advice += f" (weights and optimizer states already fill {least:,})"
    if machine.ranks < MAX_TRIED_GPUS:
        advice += f", or name {machine.name} without a number, which tries up to {MAX_TRIED_GPUS:,}"
    for words, offloaded in list_offload_settings(job):
        if _fits_offloaded(model, machine, offloaded, budget=budget, risk=risk):
            advice += f", or use --set {words}"
            break
    if job.global_batch < machine.ranks:
        advice += ", or raise --gbs, so that more ranks can share the step"
    if undecided:
        return (
            f"{model.name} was found to fit on no number of {machine.name} {setting}; {_join_numbers(undecided)} GPUs "
            f"were not decided within the work limit; {advice}"
        )
    return f"{model.name} fits on no number of {machine.name} {setting}; {advice}"


def _fits_offloaded(model: Model, machine: Machine, job: Job, *, budget: WorkBudget, risk: float) -> bool:
    """Return whether a layout over all ranks was found to fit with what the job has in host memory."""
    work = budget.allot(GPUS_UNITS)
    if bound_ranks(model, machine, job) > machine.ranks:
        return False
    return find_fitting_layout(ANY_LAYOUT, model=model, machine=machine, job=job, risk=risk, work=work) is not None


def _list_node_multiples(low: int, high: int, node: int) -> list[int]:
    """Return multiples of a node between two numbers of ranks, at most seven of them, evenly spaced."""
    step = node * ceil(max(1, high - low) / (8 * node))
    return list(range((low // step + 1) * step, high, step))
