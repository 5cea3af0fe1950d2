"""Answers the questions of ``fivefold ask`` with records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.errors import UserError, warn
from fivefold.layout.batch import MAX_TRIED_GPUS
from fivefold.requests.commands import DEFAULT_TOKENS, UNRANKABLE_DIFFERENCE, AskRequest, Question
from fivefold.requests.offers import parse_deadline
from fivefold.requests.words import parse_dollars, parse_tokens
from fivefold.step import FITS_RISK

if TYPE_CHECKING:
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.machine.datacenter import Site
    from fivefold.machine.spec import Machine
    from fivefold.model.spec import Model
    from fivefold.planner.search.work import SearchWork, WorkBudget
    from fivefold.results.run_estimate import RunEstimate
    from fivefold.results.search_result import Batch

SIMPLER_DIFFERENCE = 0.05  # share by which a step of `ask gpus`, which is not about time, may be longer to be simpler
SHORTEST_SEQUENCE = 64  # tokens at which `ask sequence` looks for a layout that fits, if none does at longer ones
QUESTIONS: Mapping[Question, str] = {  # what each question asks, in the order of the page
    "micro-batch": "Largest micro-batch that fits",
    "sequence": "Longest sequence that fits",
    "gpus": "Fewest GPUs with enough memory",
    "model": "Largest model of this shape that fits",
    "batch": "Reasonable global batch sizes",
    "run": "Days, cost and energy of a training run",
    "tokens": "Tokens of a run that ends in time, or within a budget",
    "changes": "What each change gains, and the best pairs",
    "finetune": "Full fine-tuning, LoRA or QLoRA: what fits",
}
OF_LAYOUT = tuple(question for question in QUESTIONS if question not in ("gpus", "model"))  # may be given a layout
USED_BY: Mapping[str, Sequence[Question]] = {
    "tokens": ("batch", "run"),
    "deadline": ("tokens",),
    "budget": ("tokens",),
    "assume": ("run", "tokens"),
    "noise": ("batch",),
}
SEARCHED_SEQUENCES = 8  # per GPU, of the batch for whose fastest layout `ask micro-batch` answers if none is given
MAX_BATCHES_TRIED = 4  # by `ask tokens`, of which each is advised for the tokens of a run with the one before


class RunLimits(NamedTuple):
    """The longest that a run may take, in seconds, and the most that it may cost, in dollars; None: any."""

    seconds: float | None
    dollars: float | None

    @classmethod
    def parse(cls, deadline: str | None, budget: float | str | None) -> RunLimits | None:
        """Return the limits of ``--deadline`` and ``--budget``, or None without either."""
        if deadline is None and budget is None:
            return None
        try:
            dollars = None if budget is None else parse_dollars(budget)
        except ValueError as error:
            raise UserError(f"--budget {budget!r} {error}") from None
        return cls(None if deadline is None else parse_deadline(deadline), dollars)

    def find_seconds(self, machine: Machine) -> float:
        """Return the longest that a run on ``machine`` may take; raises ``UserError`` for a budget without a price."""
        limits = [] if self.seconds is None else [self.seconds]
        if self.dollars is not None:
            if not machine.dollars_per_rank_hour:
                raise UserError(f"--budget: {machine.name} has no price; add the dollars per GPU hour: --price 2.5")
            limits.append(3600 * self.dollars / (machine.dollars_per_rank_hour * machine.ranks))
        return min(limits)


def find_answers(
    question: Question,
    model: Model,
    machine: Machine,
    layout: Layout | None,
    *,
    job: Job,
    tokens: float,
    site: Site,
    limits: RunLimits | None = None,
    noise: float | None = None,
    counted: bool = True,
    stated: Collection[str] = (),
    risk: float = FITS_RISK,
    report: Callable[[str, int, int], None] | None = None,
) -> list[Any]:
    """Return the answers to one question; without a layout, for the fastest that fits.

    ``noise``: the measured gradient noise scale, in tokens; ``counted``: whether the user gave the machine's number of
    ranks, without which the fewest GPUs are searched up to ``MAX_TRIED_GPUS``; ``limits``: those
    of the run of ``tokens``; ``stated``: the fields of the job that the user gave. ``report``: called with progress.
    """
    from fivefold.machine.catalog import with_ranks
    from fivefold.planner.playbook import plan_batch_stage
    from fivefold.planner.predict import get_planner, predict
    from fivefold.planner.questions.changes import list_changes_and_pairs
    from fivefold.planner.questions.context_length import TARGET_UNITS, compute_lengths
    from fivefold.planner.questions.fewest_gpus import find_fewest_gpus
    from fivefold.planner.questions.fine_tune import list_fine_tunes
    from fivefold.planner.questions.largest_model import find_largest_model
    from fivefold.planner.questions.micro_batch import add_full_recomputation, find_largest_micro_batch
    from fivefold.planner.run_estimate import predict_full_run, validate_tokens
    from fivefold.planner.search import search
    from fivefold.planner.search.work import WorkBudget

    if question == "gpus":
        largest_machine = machine if counted else with_ranks(machine, MAX_TRIED_GPUS)
        about: dict[str, Any] = {"model": model, "machine": largest_machine, "job": job, "risk": risk}
        return [find_fewest_gpus(**about, within=SIMPLER_DIFFERENCE, report=report)]
    if question == "model":
        return [find_largest_model(model=model, machine=machine, job=job, risk=risk)[0]]
    if question == "finetune":
        return list_fine_tunes(model=model, machine=machine, job=job, layout=layout, risk=risk)
    if question == "tokens":
        return [_find_longest_run(model, machine, job, layout, limits=limits, site=site, stated=stated, risk=risk)]
    if question == "batch" and layout is None:
        job = plan_batch_stage(model, job.replace(ramp=None), tokens=validate_tokens(tokens), is_given=False)[1]
    is_batch_given = "global_batch" in stated or job.ramp is not None
    if question == "micro-batch" and layout is None and not is_batch_given:
        job = job.replace(global_batch=SEARCHED_SEQUENCES * machine.ranks)
    budget = WorkBudget()
    chosen, remark = (layout, "") if layout else _choose_layout(question, model, machine, job, budget=budget, risk=risk)
    planner = get_planner(model, machine, job, risk)
    remarks = planner.list_remarks(chosen, is_searched=layout is None)
    if question == "changes" and (miss := planner.describe_miss(chosen)):
        remark = f"{chosen} without a change {miss}"
    elif question == "changes" and layout is None:
        remark = "; ".join(filter(None, (f"changes of {chosen}, the fastest layout that fits", remark)))
    about = {"model": model, "machine": machine, "job": job, "layout": chosen, "risk": risk}
    answers: Sequence[Any]
    match question:
        case "micro-batch":
            find = partial(find_largest_micro_batch, **about, is_batch_given=is_batch_given)
            answers = [find()]
            if layout is None:
                answers = [add_full_recomputation(answers[0], chosen, find=find, is_batch_given=is_batch_given)]
        case "sequence":
            run = partial(search, model=model, machine=machine, top=1, within=UNRANKABLE_DIFFERENCE, risk=risk)
            answers = [
                compute_lengths(
                    **about,
                    search=lambda longer: run(job=longer, work=budget.allot(TARGET_UNITS)),
                    is_searched=layout is None,
                    budget=budget,
                )
            ]
        case "batch":
            answers = _list_batches(
                model, machine, job, layout, chosen, tokens=tokens, noise=noise, budget=budget, risk=risk
            )
        case "run":
            step = predict(model=model, machine=machine, layout=chosen, job=job)
            answers = [predict_full_run(step=step, model=model, machine=machine, job=job, tokens=tokens, site=site)]
        case _:
            answers = list_changes_and_pairs(**about)
    remarks = (*remarks, *filter(None, [remark]))
    return [answer.replace(remarks=(*remarks, *answer.remarks)) for answer in answers]


def _choose_layout(
    question: Question, model: Model, machine: Machine, job: Job, *, budget: WorkBudget, risk: float
) -> tuple[Layout, str]:
    """Return the fastest layout that fits, for which a question is answered, and a remark if it is not proven."""
    from fivefold.planner.search.work import EXACT_UNITS

    if question == "sequence":
        return _search_any_length(model, machine, job, budget=budget, risk=risk)
    if question == "batch":
        work = budget.allot(EXACT_UNITS // 4)  # each batch is searched again
        return _search_fastest(model, machine, job, work=work, risk=risk, proposes=False)
    return _search_fastest(model, machine, job, work=budget.allot(), risk=risk)


def list_open_fields(question: Question, *, counted: bool, stated: Collection[str]) -> Collection[str]:
    """Return the fields of a question that its answer chooses: the GPUs of a machine without a number, the batch."""
    if question == "gpus":
        return () if counted else ("ranks",)
    return {"global_batch"} - set(stated) if question in ("micro-batch", "batch", "tokens") else ()


def refuse_unused(question: Question, **options: object) -> None:
    """Raise ``UserError`` if an option is given that the question does not use."""
    for name, questions in USED_BY.items():
        if question not in questions and options[name] != AskRequest.model_fields[name].default:
            deadline = "; for the fewest GPUs that finish in time: fivefold search MODEL h100 --gpu-counts 64-8192 "
            deadline += "--tokens 15T --deadline 30d"
            hint = deadline if question == "gpus" and name in ("tokens", "deadline") else ""
            raise UserError(
                f"--{name}: `ask {question}` does not use it, only {' and '.join(questions)}; drop it{hint}"
            )


def find_fastest(model: Model, machine: Machine, job: Job, *, risk: float = FITS_RISK) -> Layout:
    """Return the layout that ``search`` ranks first; warn if a better one may exist."""
    from fivefold.planner.search.work import SearchWork

    layout, remark = _search_fastest(model, machine, job, work=SearchWork(), risk=risk)
    if remark:
        warn(remark)
    return layout


def _search_fastest(
    model: Model, machine: Machine, job: Job, *, work: SearchWork, risk: float, proposes: bool = True
) -> tuple[Layout, str]:
    """Return the layout that ``search`` ranks first, and how near it is to the best possible if that is not proven.

    ``proposes``: whether the search also looks for a simpler one, on the way to which it may find a faster one.
    """
    from fivefold.layout.spec import Layout
    from fivefold.planner.search import search as run

    within = UNRANKABLE_DIFFERENCE if proposes else None
    result = run(model=model, machine=machine, job=job, top=1, within=within, uneven=True, risk=risk, work=work)
    if not result.best:
        unfit = result.describe_unfit(f"no layout of {model.name}")
        if not result.misses:
            raise UserError(f"{unfit} or comes close; use more GPUs (`fivefold ask gpus`)")
        miss = result.misses[0]
        raise UserError(
            f"{unfit}: the closest, {miss.layout}, {miss.shortage}; {miss.remedy}; `fivefold search` lists what else "
            "fits"
        )
    return Layout.parse(result.best[0].step.layout), result.gap_remark()


def _find_longest_run(
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout | None,
    *,
    limits: RunLimits | None,
    site: Site,
    stated: Collection[str],
    risk: float,
) -> RunEstimate:
    """Return the longest run within ``limits``; a batch that is not ``stated`` is the one advised for its tokens.

    Without a layout, the one that is fastest with this batch. Raises ``UserError`` if not even one step is within them.
    """
    from fivefold.planner.predict import get_planner
    from fivefold.planner.run_estimate import count_steps_within, predict_full_run
    from fivefold.planner.search.work import SearchWork
    from fivefold.requests.batch import choose_batch

    if limits is None:
        raise UserError("no limit of the run; add --deadline 30d or --budget 50k, or both")
    seconds = limits.find_seconds(machine)
    layouts = [] if layout is None else [layout]
    tokens = DEFAULT_TOKENS
    tried: dict[int, RunEstimate] = {}
    while len(tried) < MAX_BATCHES_TRIED:
        job, reason = choose_batch(model, job, run_tokens=tokens, ranks=machine.ranks, stated=stated, layouts=layouts)
        if job.global_batch in tried:
            break
        chosen, remark = (layout, "") if layout else _search_fastest(model, machine, job, work=SearchWork(), risk=risk)
        planner = get_planner(model, machine, job, risk)
        run_of = partial(predict_full_run, step=planner.step(chosen), model=model, machine=machine, job=job, site=site)
        tokens = job.tokens_per_step * count_steps_within(seconds, run_of(tokens=tokens))
        remarks = (*planner.list_remarks(chosen, is_searched=layout is None), *filter(None, [remark]))
        tried[job.global_batch] = run_of(tokens=tokens).replace(remarks=remarks)
    run = tried[job.global_batch]
    return run.replace(remarks=(f"global batch {job.global_batch:,}, {reason}", *run.remarks)) if reason else run


def _list_batches(
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout | None,
    chosen_layout: Layout,
    *,
    tokens: float,
    noise: float | None,
    budget: WorkBudget,
    risk: float,
) -> list[Batch]:
    """Return the reasonable batches with ``layout``, or without one each with its fastest; one is recommended.

    The job's batch is the one that scaling laws advise. What is left of ``budget`` is shared by the batches.
    """
    from fivefold.layout.spec import Layout
    from fivefold.planner.questions.batches import list_reasonable_batches
    from fivefold.planner.search import search
    from fivefold.planner.search.work import EXACT_UNITS

    batches = list_reasonable_batches(
        job=job, layout=chosen_layout, tokens=tokens, model=model, noise=noise, machine=machine
    )
    if layout is not None:
        return batches
    advised = noise or job.tokens_per_step
    recommended = min(batches, key=lambda batch: abs(log2(batch.tokens / advised)))
    rows = []
    for index, batch in enumerate(batches):
        resized = job.replace(global_batch=batch.global_batch)
        result = search(
            model=model,
            machine=machine,
            job=resized,
            top=1,
            uneven=True,
            risk=risk,
            tight=False,
            work=budget.allot(min(EXACT_UNITS // 4, budget.remaining_units // (len(batches) - index))),
        )
        best, remark = result.best, result.gap_remark()
        fastest = Layout.parse(best[0].step.layout) if best else chosen_layout
        rows.append(
            batch.replace(
                layout=str(fastest),
                micro_batches=fastest.micro_batches(resized),
                step_seconds=best[0].step.time.step_seconds if best else None,
                recommended=batch is recommended,
                remarks=(f"global batch {batch.global_batch:,}: {remark}",) if remark else (),
            )
        )
    return rows


def _search_any_length(
    model: Model, machine: Machine, job: Job, *, budget: WorkBudget, risk: float
) -> tuple[Layout, str]:
    """Return the fastest layout at the job's sequence length, else one that fits at a shorter length, with a remark.

    Lengths are halved. Raises ``UserError`` if none is found to fit.
    """
    from fivefold.layout.where import ANY_LAYOUT
    from fivefold.planner.questions.context_length import LENGTH_UNITS
    from fivefold.planner.search import find_fitting_layout

    try:
        return _search_fastest(model, machine, job, work=budget.allot(), risk=risk)
    except UserError as error:
        tokens = job.sequence // 2
        while tokens >= SHORTEST_SEQUENCE:
            shorter, work = job.replace(sequence=tokens), budget.allot(LENGTH_UNITS)
            layout = find_fitting_layout(ANY_LAYOUT, model=model, machine=machine, job=shorter, risk=risk, work=work)
            if layout is not None:
                longer = f"no layout was found to fit with sequences of {job.sequence:,} tokens"
                return layout, f"{longer}; {layout} fits shorter ones"
            tokens //= 2
        raise error


def read_noise_scale(text: str | None, *, find: Callable[[str], Path] = Path) -> float | None:
    """Return a noise scale in tokens, from a number or from the last value in a run folder's log.

    ``find`` maps the text to the path of a file.
    """
    from fivefold.text_files import read_lines

    if text is None:
        return None
    log = find(f"{text}/log.jsonl")
    if log.exists():
        scales = [line["noise_scale"] for line in read_lines(log) if line.get("noise_scale")]
        if not scales:
            raise UserError(
                f"--noise {text}: its run logged no noise scale; train with noise_scale = true in the run file"
            )
        return float(scales[-1])
    try:
        return parse_tokens(text)
    except ValueError:
        raise UserError(f"--noise {text!r} is neither a run folder nor a number of tokens, such as 4M") from None
