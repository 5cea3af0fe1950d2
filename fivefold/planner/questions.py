"""The questions of ``fivefold ask``, each answered with a number, a layout, its memory and its step time.

    largest micro-batch · longest sequence · fewest GPUs · largest model · recommended batch sizes ·
    gain of one more change · full fine-tuning, LoRA and QLoRA

The numbers come from ``Planner.estimate`` and ``search``; the largest size that fits is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, inf, log2

from fivefold.adapter import Adapter
from fivefold.base_format import BASE_FORMATS, BaseFormat
from fivefold.job import Job
from fivefold.layout.batch import MAX_TRIED_GPUS
from fivefold.layout.remarks import describe_positions, list_remarks
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import count_image_tokens, is_legal, refuse, validate_job
from fivefold.layout.where import ANY_LAYOUT
from fivefold.machine.catalog import with_ranks
from fivefold.machine.spec import Machine
from fivefold.model.attention import Sliding
from fivefold.model.catalog import find_stored_format
from fivefold.model.spec import Model
from fivefold.planner.batch import apply_scaling_laws, find_nearby_advice
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.predict import Planner
from fivefold.planner.run_estimate import validate_tokens
from fivefold.planner.search import find_fitting_layout, search
from fivefold.planner.search.garbage import collect_garbage_rarely
from fivefold.planner.search.job_changes import NUMERICS_CHANGES, list_job_changes
from fivefold.planner.search.layout_changes import (
    RANKED,
    change,
    list_changed_keywords,
    list_offload_settings,
    list_offloadings,
    rank_moves,
    with_virtual_stages,
    with_zero,
)
from fivefold.planner.search.neighbours import climb, shrink
from fivefold.planner.search.work import EXACT_UNITS, SearchWork, WorkBudget
from fivefold.planner.time.ratio_errors import describe_run, estimate_speed_ratio
from fivefold.record import UserError
from fivefold.results.search_result import Batch, Change, FineTune, QuestionAnswer
from fivefold.step import FITS_RISK, TIGHT_RISK
from fivefold.units import ceil_div, show_bytes, show_count, show_risk, show_risk_option

DOUBLED_MODEL_UNITS = EXACT_UNITS // 2  # of work to find a layout of the first size of a model, or of a doubled one
MODEL_UNITS = EXACT_UNITS // 2  # of work to find layouts of all sizes between
SHRINKING_UNITS = 2 * EXACT_UNITS // 25  # of work to make the layout of another size fit, by single changes
FASTER_MODEL_UNITS = 3 * EXACT_UNITS // 25  # of work to make the layout of the largest model faster
NUMBERS_UNITS = 14 * EXACT_UNITS // 5  # of work to try all numbers of ranks, and for the fastest layout of the fewest
GPUS_UNITS = EXACT_UNITS // 2  # of work to find the fastest layout of the fewest ranks
MAX_PAIRS = 3  # pairs of changes that are returned
MAX_SEQUENCE = 2**24  # tokens of the longest sequence that is tried
FIRST_SEQUENCE = 2**12  # tokens of the first sequence that is tried
MAX_GROWTH = 64  # of the largest size that fits, to the next one that is tried
SOUND_TOKENS = (4e6, 60e6)  # per step: Llama 1 (arXiv:2302.13971) to DeepSeek-V3 (arXiv:2412.19437)


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
    raise UserError(_describe_shortage(planner, legal[-1]))


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
    size = unit * _find_largest_by_bytes(
        lambda units: get_planner(units * unit).count_spare_bytes(layout.replace(mbs=units * unit)),
        limit=max(1, MAX_SEQUENCE // job.sequence // unit),
        start=2,
    )
    if size == 0:
        raise UserError(_describe_shortage(get_planner(unit), smallest))
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
    answer = _answer("largest micro-batch", f"{_count_sequences(layout)} at a time", layout.mbs, planner, layout)
    return answer.replace(remarks=remarks)


def _count_sequences(layout: Layout) -> str:
    return f"{layout.mbs} sequence{'s' if layout.mbs > 1 else ''}"


def search_longest_sequence(
    *, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK
) -> QuestionAnswer:
    """Return the longest sequence in tokens with which ``layout`` fits.

    It is at most 2^24, at least the tokens of the job's images, and a multiple that cp and sp can split.
    """
    step = 2 * layout.cp * layout.tp
    fewer = max(0, ceil_div(count_image_tokens(model, job), step) - 1)  # steps that the images do not fit into
    longest = min(MAX_SEQUENCE, model.positions) if model.position == "learned" else MAX_SEQUENCE
    question = "longest sequence"
    refuse(layout, model=model, job=job.replace(sequence=(fewer + 1) * step), machine=machine)

    def get_planner(steps: int) -> Planner:
        return Planner(model=model, machine=machine, job=job.replace(sequence=steps * step), risk=risk)

    more = _find_largest_by_bytes(
        lambda more: get_planner(fewer + more).count_spare_bytes(layout),
        limit=longest // step - fewer,
        start=max(1, FIRST_SEQUENCE // step - fewer),
    )
    if more == 0:
        raise UserError(
            _describe_shortage(get_planner(fewer + 1), layout, smallest=", even with the shortest sequence")
        )
    most = fewer + more
    beyond_text = "" if most * step <= model.positions else f", beyond the model's {model.positions} positions"
    return _answer(question, f"{most * step:,} tokens{beyond_text}", most * step, get_planner(most), layout)


@collect_garbage_rarely()
def list_fine_tunes(
    *, model: Model, machine: Machine, job: Job, layout: Layout | None = None, risk: float = FITS_RISK
) -> list[FineTune]:
    """Return what fits of full fine-tuning, the job's frozen parts if it has any, LoRA and QLoRA, and how fast each is.

    Adapters are the job's, or of rank 16; of a model that is published in few bits, as gpt-oss in MXFP4, also over
    these weights. Without a ``layout``: all ranks share the weights (ZeRO-3), with full
    recomputation, and a second time without any if that fits. The remarks of the first answer name the methods that
    are not modelled for this model and job; raises ``UserError`` if none is.
    """
    ranks = machine.ranks
    recomputed = Layout(dp=ranks, zero=3 if ranks > 1 else 0, mbs=1, ac="full")
    lora = (job.adapter or Adapter()).replace(base=None, double_quantization=True)
    answers, jobs = list[FineTune](), list[Job]()
    errors = dict[str, UserError]()
    full = job.replace(adapter=None, freeze=())
    adapted = [full.replace(adapter=lora)]
    for base in _list_tried_bases(model, job):
        quantized = lora.replace(base=base.name, double_quantization=base.double_quantization or not base.is_four_bit)
        adapted.append(full.replace(adapter=quantized))
    for tuned in (full, *([job] if job.freeze else []), *adapted):
        for spread in (layout,) if layout else (recomputed, recomputed.replace(ac="none")):
            smallest = spread.replace(mbs=job.min_micro_batch)
            try:
                answer = _predict_fine_tune(model, machine, tuned, smallest, risk=risk)
            except UserError as error:
                errors[name_method(tuned)] = error
                break
            if answer.micro_batch or spread.ac != "none" or layout:
                answers.append(answer)
                jobs.append(tuned)
    if not answers:
        raise next(iter(errors.values()))
    remarks = list[str]()
    fastest = max(answers, key=lambda answer: answer.tokens_per_second)  # the one whose step remarks compare
    for answer, tuned in zip(answers, jobs, strict=True):
        line = Layout.parse(answer.layout)
        planner = Planner(model=model, machine=machine, job=tuned)
        remarks += planner.list_remarks(line) if answer is fastest else list_remarks(model, machine, tuned, line)
    remarks += [f"no answer for {method}: {error}" for method, error in errors.items()]
    if any(answer.longest_sequence > model.positions for answer in answers):
        remarks += describe_positions(model)
    if answers[0].method == "full" and not answers[0].micro_batch:
        remarks += _describe_full_remedy(model, machine, full, recomputed, risk=risk)
    if not any(answer.micro_batch for answer in answers):
        least = min(answers, key=lambda answer: answer.memory_bytes).method
        for tuned in (tuned for tuned in adapted if name_method(tuned) == least):
            remarks += _describe_enough(model, machine, tuned, recomputed, risk=risk)
    return [answers[0].replace(remarks=tuple(dict.fromkeys(remarks))), *answers[1:]]


def _list_tried_bases(model: Model, job: Job) -> Iterator[BaseFormat]:
    """Yield the bases of adapters in few bits: in 4 bits as the job says or as QLoRA has it, and as published."""
    asked = job.base_format
    four_bit = asked if asked is not None and asked.is_four_bit else BASE_FORMATS["nf4"]
    yield four_bit
    stored = find_stored_format(model)
    if stored in BASE_FORMATS and stored != four_bit.name:
        base = BASE_FORMATS[stored]
        yield base._replace(double_quantization=base.is_four_bit and model.double_quantization)


def _describe_full_remedy(model: Model, machine: Machine, job: Job, layout: Layout, *, risk: float) -> Iterator[str]:
    """Yield with what full fine-tuning fits: optimizer states in host memory, or else a larger number of GPUs."""
    smallest = layout.replace(mbs=job.min_micro_batch)
    for _, offloaded, other in list_offloadings(smallest, job, model=model):
        if _fits(model, machine, other, offloaded, risk=risk):
            host = show_bytes(count_host_bytes(Counts(model, other), offloaded, machine))
            software = "" if other is job else f" with --stack {other.stack.name}"
            yield f"full fits as {str(offloaded)!r}{software}, with {host} in the memory of each host"
            break
    yield from _describe_enough(model, machine, job, layout, risk=risk)


def _describe_enough(model: Model, machine: Machine, job: Job, layout: Layout, *, risk: float) -> Iterator[str]:
    """Yield on how many GPUs a method fits that does not on those of the machine."""
    smallest = layout.replace(mbs=job.min_micro_batch)
    for ranks in (machine.ranks * 2**power for power in range(1, 8)):
        larger = smallest.replace(dp=ranks, zero=3)
        if _fits(model, with_ranks(machine, ranks), job, larger, risk=risk):
            yield f"{name_method(job)} fits on {ranks} of {machine.name}, as {str(larger)!r}"
            return


def _fits(model: Model, machine: Machine, job: Job, layout: Layout, *, risk: float) -> bool:
    planner = Planner(model=model, machine=machine, job=job, risk=risk)
    return is_legal(layout, model=model, job=job, machine=machine) and planner.fits(layout)


def name_method(job: Job) -> str:
    """Return how a job trains its model: full, freeze, or the name of its adapter and of a base as published."""
    if job.adapter is not None:
        base, name = job.adapter.base_format, job.adapter.name
        return name if base is None or name.startswith("q") else f"{name} over {base.label}"
    return "freeze" if job.freeze else "full"


def _predict_fine_tune(model: Model, machine: Machine, job: Job, layout: Layout, *, risk: float) -> FineTune:
    """Return the longest sequence and the largest micro-batch of a fine-tuning method, and the step with the latter."""
    planner = Planner(model=model, machine=machine, job=job, risk=risk)
    refuse(layout, model=model, job=job, machine=machine)
    sizes = (layout.replace(mbs=size) for size in reversed(list_divisors(max(1, job.global_batch // layout.dp))))
    legal = [size for size in sizes if is_legal(size, model=model, job=job, machine=machine)]
    largest = next((size for size in legal if planner.fits(size)), None)
    try:
        longest = search_longest_sequence(model=model, machine=machine, job=job, layout=layout, risk=risk).value
    except UserError:  # not even the shortest fits
        longest = 0
    chosen = largest or layout
    estimate = planner.estimate(chosen)
    totals = planner.allocator_totals(chosen, planner.memory(chosen))
    return FineTune(
        method=name_method(job),
        layout=str(chosen),
        longest_sequence=int(longest),
        micro_batch=largest.mbs if largest else 0,
        memory_bytes=estimate.peak_bytes,
        driver_bytes=totals.driver_bytes if totals else None,
        risk=planner.out_of_memory_risk(chosen),
        tokens_per_second=job.tokens_per_step / estimate.step_time.seconds,
    )


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
    most, least = machine.ranks, _bound_ranks(model, machine, job)
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
    return _answer("fewest GPUs", line, ranks, planner, layout).replace(remarks=tuple(filter(None, remarks)))


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
    if _bound_ranks(model, machine, job) > machine.ranks:
        return False
    return find_fitting_layout(ANY_LAYOUT, model=model, machine=machine, job=job, risk=risk, work=work) is not None


def _bound_ranks(model: Model, machine: Machine, job: Job) -> float:
    """Return a lower bound of the ranks whose memory holds the model's states."""
    return count_least_state_bytes(model, job) / machine.chip.memory_bytes


def count_least_state_bytes(model: Model, job: Job) -> float:
    """Return the bytes that weights and optimizer states take at least on the devices of all ranks together."""
    precision = job.precision
    offloads_weights = "parameters" in job.offload
    if offloads_weights and job.stack.offloads_with_parameters:
        return 0
    held: float = 0 if offloads_weights else precision.weights_bytes  # of a parameter, over all ranks at least
    if job.optimizer.kind == "adamw" and "optimizer" not in job.offload:
        held += precision.master_bytes + sum(precision.moments_bytes)
    if job.freezes_text:  # frozen weights have no states, and in four bits half a byte
        held = job.base_format.bits / 8 if job.base_format else job.activation_bytes
        held *= not offloads_weights
    return model.parameters * held


def _list_node_multiples(low: int, high: int, node: int) -> list[int]:
    """Return multiples of a node between two numbers of ranks, at most seven of them, evenly spaced."""
    step = node * ceil(max(1, high - low) / (8 * node))
    return list(range((low // step + 1) * step, high, step))


@collect_garbage_rarely()
def find_largest_model(
    *, model: Model, machine: Machine, job: Job, risk: float = FITS_RISK
) -> tuple[QuestionAnswer, Model]:
    """Return the largest model that fits the machine.

    Layers and heads of ``model`` are scaled in eighths, up to 32 times or to where the states exceed the memory. A
    layout that fits one size is tried first at the next, and then made smaller by single changes. A size is taken not
    to fit, and named, if no layout is found to fit within a work limit, which all sizes between known ones share. The
    layout is the first that was found to fit, made faster by single changes: a search for the fastest at the edge of
    the memory takes many times as long.
    """
    validate_job(model, job, machine)
    fits, undecided = dict[int, tuple[Planner, Layout]](), list[int]()
    work_between = SearchWork(exact_units=MODEL_UNITS)

    def fits_at(eighths: int) -> bool:
        """Tell whether the model fits at ``eighths`` of its layers and heads; the last that fits is tried first."""
        planner = Planner(model=scale_model(model, eighths / 8), machine=machine, job=job, risk=risk)
        between_known = fits and eighths < 2 * max(fits)
        work = work_between if between_known else SearchWork(exact_units=DOUBLED_MODEL_UNITS)
        layout = _find_layout_like(planner, fits[max(fits)][1] if fits else None, work=work)
        if layout is not None:
            fits[eighths] = planner, layout
        elif work.is_spent:
            undecided.append(eighths)
        return layout is not None

    def holds_states(eighths: int) -> bool:
        return _bound_ranks(scale_model(model, eighths / 8), machine, job) <= machine.ranks

    most = _find_largest(fits_at, limit=_find_largest(holds_states, limit=256), start=8)
    if most == 0:
        limit = " within the work limit" if undecided else ""
        raise UserError(
            f"not even an eighth of the layers and heads of {model.name} fits on {machine.name}{limit}; use a chip "
            "with more memory"
        )
    planner, layout = fits[most]
    largest = planner.model
    estimate = climb(planner, layout, work=SearchWork(exact_units=FASTER_MODEL_UNITS))
    size = f"{largest.layers} layers of width {largest.width}"
    size += f", {largest.moe.experts} experts of width {largest.moe.ffn}" if largest.moe is not None else ""
    line = f"{show_count(largest.parameters)} parameters: {model.name} scaled to {size}"
    remarks = [
        *planner.list_remarks(estimate.layout, is_searched=True),
        "the layout is the first one that fits, made faster by single changes; a search may find a faster one",
    ]
    if undecided:
        sizes = " and ".join(f"{model.name} x{eighths / 8:g}" for eighths in sorted(undecided))
        remarks.append(f"whether {sizes} would fit was not decided within the work limit")
    answer = QuestionAnswer(
        question="largest model",
        line=line,
        value=largest.parameters,
        layout=str(estimate.layout),
        memory_bytes=estimate.peak_bytes,
        step_seconds=estimate.step_time.seconds,
        remarks=tuple(remarks),
    )
    return answer, largest


def _find_layout_like(planner: Planner, like: Layout | None, *, work: SearchWork) -> Layout | None:
    """Return a layout that fits: ``like`` or a smaller one, a few single changes away, else any that is found."""
    model, machine, job, risk = planner.model, planner.machine, planner.job, planner.risk
    if like is not None and is_legal(like, model=model, job=job, machine=machine):
        smaller = shrink(planner, like, work=SearchWork(exact_units=SHRINKING_UNITS))
        if smaller is not None:
            return smaller
    if work.is_spent:
        return None
    return find_fitting_layout(ANY_LAYOUT, model=model, machine=machine, job=job, risk=risk, using=planner, work=work)


def scale_model(model: Model, factor: float) -> Model:
    """Return ``model`` with layers and width times ``factor``.

    head_dim and the number of experts stay; ffn, widths of experts, kv heads, and heads or channels of other token
    mixers keep their ratio to heads. Layers that share keys and layers with sparse gates keep their share of layers.
    """
    ratio = model.heads // model.kv_heads
    kv_heads = max(1, round(model.kv_heads * factor))
    share = kv_heads / model.kv_heads
    pair = 2 if model.moe is not None and model.moe.shortcut else 1  # layers of which the second adds the experts
    layers = pair * max(1, round(model.layers * factor / pair))
    sparsity = model.gate_sparsity and [model.gate_sparsity[layer * model.layers // layers] for layer in range(layers)]
    name = f"{model.name} x{factor:g}"

    def scale(ffn: int | None) -> int | None:
        return ffn if ffn is None or share == 1 else 64 * ceil(ffn * share / 64)

    return Model.read(
        model.model_dump()
        | {
            "name": name,
            "layers": layers,
            "shared_kv_layers": _scale_shared_kv_layers(model, layers),
            "shared_kv_ffn": scale(model.shared_kv_ffn),
            "gate_sparsity": sparsity,
            "kv_heads": kv_heads,
            "heads": ratio * kv_heads,
            "sliding": model.sliding and _scale_heads(model, share),
            **{kind: getattr(model, kind).scale(share) for kind in model.non_attention_mixers},
            "width": 8 * round(model.width * share / 8),
            "ffn": scale(model.ffn),
            "moe": model.moe
            and model.moe.replace(
                dense_layers=min(model.moe.dense_layers, layers),
                ffn=scale(model.moe.ffn),
                shared_ffn=scale(model.moe.shared_ffn),
                latent_width=scale(model.moe.latent_width),
            ),
        },
        origin=name,
    )


def _scale_shared_kv_layers(model: Model, layers: int) -> int:
    """Return the share of ``layers`` without keys of their own; those before them have a layer of each window."""
    windows = [model.has_window(layer) for layer in range(layers)]
    lenders = 1 + max(windows.index(window) for window in {*windows})
    return min(model.shared_kv_layers * layers // model.layers, layers - lenders)


def _scale_heads(model: Model, share: float) -> Sliding:
    """Return the geometry of sliding layers with heads and kv heads times ``share``, in the same ratio."""
    attention_shape = model.attention_shapes[-1]
    kv_heads = max(1, round(attention_shape.kv_heads * share))
    assert model.sliding is not None
    if model.mla is not None:  # of latent attention every head has keys of its own
        return model.sliding.replace(heads=kv_heads)
    return model.sliding.replace(kv_heads=kv_heads, heads=attention_shape.heads // attention_shape.kv_heads * kv_heads)


def list_reasonable_batches(
    *,
    job: Job,
    layout: Layout,
    tokens: float,
    model: Model | None = None,
    noise: float | None = None,
    machine: Machine | None = None,
) -> list[Batch]:
    """Return the reasonable global batches that the layout can split, in powers of two.

    They have 4 to 60 million tokens for a run of ``tokens``, or fewer if the laws of ``batch.py`` for ``model``, or a
    measured ``noise`` scale in tokens, advise fewer. With a ``model`` only legal batches are returned, such as those
    with enough micro-batches for its pipeline. Raises ``UserError`` if there is none.
    """
    chunk, tokens = layout.dp * layout.mbs, validate_tokens(tokens)
    if noise is not None and not noise > 0:
        raise UserError(
            f"noise={noise:g}: the noise scale is a positive number of tokens; leave it out if it is unknown"
        )
    recommended = [
        *(law.tokens for law in (apply_scaling_laws(model, tokens) if model else [])),
        *([noise] if noise else []),
    ]
    ends = SOUND_TOKENS
    if recommended:
        ends = min(SOUND_TOKENS[0], min(recommended) / 1.5), min(SOUND_TOKENS[1], 8 * max(recommended))
    least, most = (limit / (chunk * job.sequence) for limit in ends)
    sizes = [2**power for power in range(40) if least <= 2**power <= most] or [max(1, round(least))]
    if model is not None:
        sizes = _list_legal_batches(sizes, model=model, machine=machine, job=job, layout=layout)
    return [
        Batch(
            global_batch=size * chunk,
            layout=str(layout),
            tokens=size * chunk * job.sequence,
            micro_batches=size,
            steps=ceil(tokens / (size * chunk * job.sequence)),
            references=tuple(_cite_references(size * chunk * job.sequence, model=model, tokens=tokens, noise=noise)),
        )
        for size in sizes
    ]


def _list_legal_batches(
    sizes: list[int], *, model: Model, machine: Machine | None, job: Job, layout: Layout
) -> list[int]:
    """Return the numbers of micro-batches with which the layout is legal; ``UserError`` if it is with none of them."""
    chunk = layout.dp * layout.mbs
    batch_sizes = list[int]()
    mistake = UserError()
    for size in sizes:
        try:
            fields = job.model_dump() | {"global_batch": size * chunk, "ramp": None}
            refuse(layout, model=model, job=Job.read(fields, origin="job"), machine=machine)
        except UserError as error:
            mistake = error
        else:
            batch_sizes.append(size)
    if not batch_sizes:
        raise mistake
    return batch_sizes


def _cite_references(size: float, *, model: Model | None, tokens: float, noise: float | None) -> Iterator[str]:
    """Yield the laws and published runs that have a batch of about ``size`` tokens."""
    if noise and abs(log2(noise / size)) < 0.5:
        yield f"the measured noise scale, {show_count(noise)}"
    for advice in find_nearby_advice(size, model=model, tokens=tokens) if model else ():
        yield f"{advice.who}, {show_count(advice.tokens)} ({advice.source})"


def list_changes(*, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK) -> list[Change]:
    """Return the effect of each single change of layout or job: changes that fit come first, then the fastest.

    A precision for which the chip has no matrix units is not among them.
    """
    evaluate = _compare_with(model, machine, job, layout, risk=risk)
    changes = [
        evaluate(words, changed, other)
        for words, changed, other in (*_list_single_changes(model, job, layout), *_list_degree_changes(job, layout))
        if (other, changed) != (layout, job) and is_legal(other, model=model, job=changed, machine=machine)
        if changed.precision == job.precision or machine.chip.has_units(changed.precision.compute)
    ]
    return sorted(changes, key=lambda change: (not change.fits, change.step_seconds, change.memory_bytes))


@collect_garbage_rarely()
def list_changes_and_pairs(
    *, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK
) -> list[Change]:
    """Return the effect of each single change, then of the best pairs of changes that help only together."""
    singles = list_changes(model=model, machine=machine, job=job, layout=layout, risk=risk)
    return [*singles, *find_pairs(singles, model=model, machine=machine, job=job, layout=layout, risk=risk)]


def find_pairs(
    singles: Sequence[Change], *, model: Model, machine: Machine, job: Job, layout: Layout, risk: float = FITS_RISK
) -> list[Change]:
    """Return up to ``MAX_PAIRS`` pairs of changes that help only together: the pair fits and takes less time.

    For example a larger micro-batch, which does not fit, together with recomputation, which by itself is slower.
    ``singles``: the single changes. One helps if it fits and is faster than the layout, or if the layout does not fit;
    then a pair takes less time than every single change that fits. Changes that alter the numerics of training are left
    out.
    """
    base = Planner(model=model, machine=machine, job=job, risk=risk)
    fitting = [change for change in singles if change.fits and change.change not in NUMERICS_CHANGES]
    limit = min((change.step_seconds for change in fitting), default=inf)
    if base.fits(layout):
        limit = base.estimate(layout).step_time.seconds
        fitting = [change for change in fitting if change.step_seconds < limit]
    left_out = {*NUMERICS_CHANGES, *(change.change for change in fitting)}
    evaluate = _compare_with(model, machine, job, layout, risk=risk)
    pairs, tried = list[Change](), {(layout, job)}
    moved = _list_degree_changes(job, layout)
    for first, job_between, between in (*_list_single_changes(model, job, layout), *moved):
        if first in left_out or (between, job_between) == (layout, job):
            continue
        for second, changed, other in _list_single_changes(model, job_between, between):
            is_repeated = _get_changed_field(first) == _get_changed_field(second) or second in left_out
            if is_repeated or (other, changed) in tried or (other, changed) == (between, job_between):
                continue
            tried.add((other, changed))
            planner = Planner(model=model, machine=machine, job=changed, risk=risk)
            if not is_legal(other, model=model, job=changed, machine=machine) or not planner.fits(other):
                continue
            pair = evaluate(f"{first} and {second}", changed, other)
            if pair.step_seconds < limit:
                pairs.append(pair.replace(together=(first, second)))
    return sorted(pairs, key=lambda change: (change.step_seconds, change.memory_bytes))[:MAX_PAIRS]


def _compare_with(
    model: Model, machine: Machine, job: Job, layout: Layout, *, risk: float
) -> Callable[[str, Job, Layout], Change]:
    """Return a function that compares a changed job and layout with these."""
    before = Planner(model=model, machine=machine, job=job).estimate(layout)
    facts = describe_run(model, machine, layout, job)

    def compare(words: str, changed: Job, other: Layout) -> Change:
        planner = Planner(model=model, machine=machine, job=changed, risk=risk)
        after = planner.estimate(other)
        speeds = (1 / after.step_time.seconds, 1 / before.step_time.seconds)
        risk_after = planner.out_of_memory_risk(other, after.ranks)
        return Change(
            change=words,
            layout=str(other),
            fits=risk_after <= risk,
            risk=risk_after,
            memory_bytes=after.peak_bytes,
            step_seconds=after.step_time.seconds,
            faster=before.step_time.seconds / after.step_time.seconds,
            speed=estimate_speed_ratio(describe_run(model, machine, other, changed), facts, speeds),
            saved_bytes=before.peak_bytes - after.peak_bytes,
        )

    return compare


def _get_changed_field(words: str) -> str:
    """Return what a single change sets: two of the same are no pair."""
    if words in ("interleaved, twice the stages", "zero bubble"):
        return "schedule"
    return words.partition("=")[0].rstrip("0123456789")


def find_fitting_change(*, model: Model, machine: Machine, job: Job, layout: Layout) -> Change | None:
    """Return the single change with which ``layout`` fits at the least step time; None if there is none.

    Changes that alter the numerics of training come last.
    """
    fitting = [change for change in list_changes(model=model, machine=machine, job=job, layout=layout) if change.fits]
    return min(fitting, key=get_change_sort_key, default=None)


def get_change_sort_key(change: Change) -> tuple[bool, float, int]:
    """Return the sort key of changes that fit: those that keep the numerics first, then the fastest."""
    return change.change in NUMERICS_CHANGES, change.step_seconds, change.memory_bytes


def _list_single_changes(model: Model, job: Job, layout: Layout) -> Iterator[tuple[str, Job, Layout]]:
    """Yield single changes: a description, the job and the layout."""
    software = job.stack.runs
    is_sharded = layout.dp * layout.cp > 1
    for zero in sorted({layout.zero - 1, *range(layout.zero + 1, 4)} & {0, 1, 2, 3}) if is_sharded else ():
        if other := with_zero(layout, zero):
            yield f"zero{zero}", job, other
    for ac in ("none", "norm+act", "selective", *software.list_joint_recomputes(), "full"):
        if software.can_express(ac, experts=model.moe is not None):
            yield f"ac={ac}", job, layout.replace(ac=ac)
    if layout.mbs % 2 == 0:
        yield f"mbs{layout.mbs // 2}", job, layout.replace(mbs=layout.mbs // 2)
    if 2 * layout.mbs <= job.global_batch:
        yield f"mbs{2 * layout.mbs}", job, layout.replace(mbs=2 * layout.mbs)
    if layout.tp > 1 and not layout.sp:
        yield "sequence parallel", job, layout.replace(sp=True)
    if layout.pp > 1:
        if other := with_virtual_stages(layout, 2 * layout.v):
            yield "interleaved, twice the stages", job, other
        yield "zero bubble", job, layout.replace(schedule="zb1p", v=1, stages=layout.stages if layout.v == 1 else ())
    for offloading in list_offloadings(layout, job, model=model):
        if offloading.job is job:  # another software is no single change
            yield offloading.words, job, offloading.layout
    for job_change in list_job_changes(model, job, layout):
        if job_change.goal != "memory":
            yield job_change.words, job_change.job, layout


def _list_degree_changes(job: Job, layout: Layout) -> Iterator[tuple[str, Job, Layout]]:
    """Yield single changes of degrees: an axis gives half its ranks to another, or ep is halved or doubled."""
    for moved in rank_moves(layout):
        if moved is not None and any(2 * getattr(moved, axis) == getattr(layout, axis) for axis in RANKED):
            yield list_changed_keywords(layout, moved), job, moved
    for degree in (layout.ep // 2, 2 * layout.ep) if layout.ep > 1 else ():
        if other := change(layout, ep=degree):
            yield f"ep{degree}", job, other


def _find_largest(fits: Callable[[int], bool], *, limit: int, start: int = 1) -> int:
    """Return the largest number up to ``limit`` that fits, or 0, by bisection from ``start``.

    Every smaller number must fit too.
    """
    low, high = 0, start
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _find_largest_by_bytes(count_spare_bytes: Callable[[int], int], *, limit: int, start: int) -> int:
    """Return the largest number up to ``limit`` of which no bytes are missing, or 0.

    Bytes grow nearly in proportion, so that the number where none are spare is near the line through two known ones;
    every third step halves what is left. Every smaller number must fit too.
    """
    spare_bytes = {1: count_spare_bytes(1)}
    if spare_bytes[1] < 0:
        return 0
    low, high = 1, limit + 1
    tried = min(max(2, start), limit)
    while high - low > 1:
        spare_bytes[tried] = count_spare_bytes(tried)
        if spare_bytes[tried] >= 0:
            low = tried
        else:
            high = tried
        other = high if high in spare_bytes else max(number for number in spare_bytes if number != low)
        slope = (spare_bytes[low] - spare_bytes[other]) / (other - low)
        guess = low + int(spare_bytes[low] / slope) if slope > 0 else high
        if high > limit:
            tried = max(low + 1, min(guess, MAX_GROWTH * low, limit))
        elif len(spare_bytes) % 3 == 0:
            tried = (low + high) // 2
        else:
            tried = max(low + 1, min(guess, high - 1))
    return low


def _answer(question: str, line: str, value: float, planner: Planner, layout: Layout) -> QuestionAnswer:
    """Return the answer to a question with the peak memory and step time of its layout."""
    estimate = planner.estimate(layout)
    return QuestionAnswer(
        question=question,
        line=line,
        value=value,
        layout=str(layout),
        memory_bytes=estimate.peak_bytes,
        step_seconds=estimate.step_time.seconds,
    )


def _describe_shortage(planner: Planner, layout: Layout, *, smallest: str = "") -> str:
    """Return why a layout does not fit, and what does; ``smallest``: words for the least case of the question."""
    risk = planner.out_of_memory_risk(layout)
    shorten = "use more GPUs" if smallest else "shorten the sequence, or use more GPUs"
    mend = shorten if layout.world == 1 else "raise zero, tp or pp"
    recomputed = layout.replace(ac="full")
    is_full_legal = is_legal(recomputed, model=planner.model, job=planner.job, machine=planner.machine)
    if recomputed != layout and is_full_legal and planner.fits(recomputed):
        mend += f", or use ac=full, which needs {show_bytes(planner.peak_bytes(recomputed))}"
    for words, offloaded, job in list_offloadings(layout, planner.job, model=planner.model):
        other = Planner(model=planner.model, machine=planner.machine, job=job, risk=planner.risk)
        is_run = is_legal(offloaded, model=planner.model, job=job, machine=planner.machine)
        if is_run and other.fits(offloaded):
            host = count_host_bytes(other.counts, offloaded, planner.machine)
            mend += f", or add {words}, which takes {show_bytes(host)} of host memory per node"
            break
    if risk <= TIGHT_RISK:
        mend += f", or accept the risk with --risk {show_risk_option(risk)}"
    need, have = show_bytes(planner.peak_bytes(layout)), show_bytes(planner.machine.chip.memory_bytes)
    return (
        f"layout {str(layout)!r} needs at least {need} per GPU, which has {have}{smallest}; "
        f"its risk of running out of memory is {show_risk(risk)}, more than --risk {planner.risk:g}; {mend}"
    )
