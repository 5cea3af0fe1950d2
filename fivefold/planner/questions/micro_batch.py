"""The largest micro-batch with which a layout fits."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import is_legal, refuse
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.predict import Planner
from fivefold.planner.questions.answer import build_answer, describe_shortage
from fivefold.planner.questions.bisection import find_largest_by_bytes
from fivefold.planner.questions.sequence import MAX_SEQUENCE
from fivefold.results.search_result import QuestionAnswer
from fivefold.step import FITS_RISK


def find_largest_micro_batch(
    *,
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout,
    risk: float = FITS_RISK,
    is_batch_given: bool = True,
) -> QuestionAnswer:
    """Return the largest mbs with which ``layout`` fits: a divisor of a replica's batch, or of any batch if not given.

    A batch that is not given is of ``2 pp`` micro-batches per replica, so that gradients are added up and the pipeline
    is filled. Raises ``UserError`` if none fits.
    """
    if not is_batch_given:
        return _find_largest_micro_batch_of_any_batch(model, machine, job, layout, risk)
    planner = Planner(model=model, machine=machine, job=job, risk=risk)
    batch = max(1, job.global_batch // layout.dp)  # of one replica
    sizes = (layout.replace(mbs=size) for size in reversed(list_divisors(batch)))
    legal = [size for size in sizes if is_legal(size, model=model, job=job, machine=machine)]
    for tried in legal:
        if planner.fits(tried):
            if tried.mbs < batch:
                return _answer_micro_batch(planner, tried)
            return _answer_micro_batch(
                planner,
                tried,
                f"the global batch of {job.global_batch} is the limit, not memory: it has {_count_sequences(tried)} "
                f"for each of {layout.dp} replicas; a larger one may allow more, such as --gbs {8 * job.global_batch}",
            )
    if not legal:
        refuse(layout.replace(mbs=job.min_micro_batch), model=model, job=job, machine=machine)
    raise UserError(describe_shortage(planner, legal[-1]))


def _find_largest_micro_batch_of_any_batch(
    model: Model, machine: Machine, job: Job, layout: Layout, risk: float
) -> QuestionAnswer:
    """Return the largest mbs with which ``layout`` fits, with a global batch of ``2 pp`` micro-batches per replica."""
    unit = job.min_micro_batch

    def get_planner(size: int) -> Planner:
        batch = 2 * layout.pp * layout.dp * size
        return Planner(model=model, machine=machine, job=job.replace(global_batch=batch), risk=risk)

    smallest = layout.replace(mbs=unit)
    refuse(smallest, model=model, job=get_planner(unit).job, machine=machine)
    size = unit * find_largest_by_bytes(
        lambda units: get_planner(units * unit).count_spare_bytes(layout.replace(mbs=units * unit)),
        limit=max(1, MAX_SEQUENCE // job.sequence // unit),
        start=2,
    )
    if size == 0:
        raise UserError(describe_shortage(get_planner(unit), smallest))
    planner = get_planner(size)
    replicas = "1 replica" if layout.dp == 1 else f"each of {layout.dp} replicas"
    remark = (
        f"predicted for a global batch of {planner.job.global_batch}, {2 * layout.pp} micro-batches for {replicas}; "
        "with --gbs: the largest that divides that batch"
    )
    return _answer_micro_batch(planner, layout.replace(mbs=size), remark)


def add_full_recomputation(
    answer: QuestionAnswer, layout: Layout, *, find: Callable[..., QuestionAnswer], is_batch_given: bool
) -> QuestionAnswer:
    """Return the largest micro-batch of ``layout`` with the larger one of full recomputation, and its price.

    ``find``: ``find_largest_micro_batch`` of the same model, machine and job.
    """
    if layout.ac == "full":
        return answer
    try:
        other = find(layout=layout.replace(ac="full"))
    except UserError:  # not legal, or does not fit
        return answer
    if other.value <= answer.value or not (answer.step_seconds and other.step_seconds):
        return answer
    batch = 1 if is_batch_given else other.value / answer.value  # of its step, over that of the answer
    longer = other.step_seconds / answer.step_seconds / batch - 1
    remark = (
        f"with full recomputation (ac=full) {other.line} fit; each sequence takes {abs(longer):.1%} "
        f"{'more' if longer > 0 else 'less'} time"
    )
    return answer.replace(remarks=(*answer.remarks, remark))


def _answer_micro_batch(planner: Planner, layout: Layout, *remarks: str) -> QuestionAnswer:
    answer = build_answer("largest micro-batch", f"{_count_sequences(layout)} at a time", layout.mbs, planner, layout)
    return answer.replace(remarks=remarks)


def _count_sequences(layout: Layout) -> str:
    return f"{layout.mbs} sequence{'s' if layout.mbs > 1 else ''}"
