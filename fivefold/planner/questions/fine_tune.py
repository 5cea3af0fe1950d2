"""What fits of full fine-tuning, LoRA and QLoRA, and how fast each is."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.adapter import Adapter
from fivefold.base_format import BASE_FORMATS, BaseFormat
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.remarks import describe_positions, list_remarks
from fivefold.layout.spec import Layout, list_divisors
from fivefold.layout.validity import is_legal, refuse
from fivefold.machine.catalog import with_ranks
from fivefold.machine.spec import Machine
from fivefold.model.catalog import find_stored_format
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.memory.host import count_host_bytes
from fivefold.planner.predict import Planner
from fivefold.planner.questions.sequence import search_longest_sequence
from fivefold.planner.search.garbage import collect_garbage_rarely
from fivefold.planner.search.layout_changes import list_offloadings
from fivefold.results.search_result import FineTune
from fivefold.step import FITS_RISK
from fivefold.units import show_bytes


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
