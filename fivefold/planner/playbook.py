"""The procedure of the Ultra-Scale Playbook, step by step: make it fit, reach the batch, make it fast.

1  the batch         from the laws and published runs of ``batch.py``, unless the job gives one
2  make it fit       the first candidate that fits: data parallelism, ZeRO, tp within a node, pp, cp, recomputation
3  reach the batch   the micro-batch, and so the gradient accumulation
4  make it fast      one change at a time (``search/neighbours.py``), and the proposal of ``search``
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import is_legal, list_reasons
from fivefold.layout.validity.job import validate_job
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.planner.batch import advise_sequences, apply_scaling_laws, find_nearby_advice
from fivefold.planner.predict import Planner
from fivefold.planner.search.layout_changes import list_offload_settings
from fivefold.results.playbook import Attempt, Stage
from fivefold.results.search_result import Proposal, Walk
from fivefold.step import FITS_RISK
from fivefold.units import show_bytes, show_count, show_risk, show_seconds

AFTER = 2  # rungs of the ladder that are still shown after the first that fits


def plan_batch_stage(model: Model, job: Job, *, tokens: float, is_given: bool) -> tuple[Stage, Job]:
    """Return the batch step: the job's batch, or the power-of-two number of sequences closest to the scaling laws."""
    proposed = advise_sequences(model, sequence=job.sequence, tokens=tokens)
    chosen = job.global_batch if is_given else proposed
    sizes = sorted({chosen, max(1, proposed // 4), max(1, proposed // 2), proposed, 2 * proposed, 4 * proposed})
    tried = tuple(
        Attempt(
            layout=f"gbs {size}", chosen=size == chosen, fits=True, why=_cite_advice(model, size * job.sequence, tokens)
        )
        for size in sizes
    )
    recommended = ", ".join(f"{law.who} {show_count(law.tokens)}" for law in apply_scaling_laws(model, tokens))
    reason = f"gbs {chosen} is {show_count(chosen * job.sequence)} tokens a step" + (
        ", as the job says" if is_given else f": the power of two between the scaling laws ({recommended})"
    )
    if job.adapter is not None and not is_given:
        reason += "; laws and runs are of pretraining: state gbs and tokens of your fine-tune"
    title = "The batch"
    question = f"How many tokens a step, for {show_count(tokens)} in all?"
    return Stage(title=title, question=question, tried=tried, reason=reason), job.replace(global_batch=chosen)


def fit_stage(planner: Planner, *, world: int) -> tuple[Stage, Layout]:
    """Return the first candidate layout that fits. Raises a ``UserError`` that names the closest one if none does."""
    room, tried, chosen, after = planner.machine.chip.memory_bytes, [], None, 0
    least: tuple[int, Layout] | None = None
    for words, layout in list_candidates(planner, world):
        why = next(list_reasons(layout, model=planner.model, job=planner.job, machine=planner.machine), None)
        if why is not None:
            tried.append(Attempt(layout=str(layout), why=why, fits=False))
            continue
        candidate = _describe_attempt(planner, layout, fits=f"{words} fits", else_=f"{words} ")
        assert candidate.peak_bytes is not None
        least = min(least or (candidate.peak_bytes, layout), (candidate.peak_bytes, layout), key=lambda pair: pair[0])
        tried.append(candidate.replace(chosen=candidate.fits and chosen is None))
        chosen = layout if candidate.fits and chosen is None else chosen
        after += chosen is not None
        if after > AFTER:
            break
    if chosen is None:
        what = f"{planner.model.name} on {_count_ranks(world)} of {planner.machine.name}"
        if least is None:
            why = f": {tried[0].layout!r}: {tried[0].why}" if tried else ""
            raise UserError(
                f"none of the {len(tried)} layouts that plan tries is possible for {what}{why}; use another number of "
                "GPUs"
            )
        advice = "".join(f", or --set {words}" for words in islice(_list_fitting_offloads(planner, world), 1))
        raise UserError(
            f"none of the {len(tried)} layouts that plan tries fits {what}: the nearest, {least[1]}, needs "
            f"{show_bytes(least[0])} of {show_bytes(room)}; use more GPUs (`fivefold ask gpus`){advice}"
        )
    limit = f"with at most {show_risk(planner.risk)} risk of running out" if planner.machine.has_gpus else ""
    within = " ".join(filter(None, [show_bytes(room), limit]))
    reason = f"{chosen} is the first that fits in {within}: {_fit_words(chosen, planner)}"
    question = f"Which is the simplest layout of {_count_ranks(world)} that fits in memory?"
    return Stage(title="Make it fit", question=question, tried=tuple(tried), reason=reason), chosen


def _list_fitting_offloads(planner: Planner, world: int) -> Iterator[str]:
    """Yield the settings of the job that offload more, with which one of the candidates fits."""
    for words, job in list_offload_settings(planner.job):
        other = Planner(model=planner.model, machine=planner.machine, job=job, risk=planner.risk)
        legal = (
            layout
            for _, layout in list_candidates(other, world)
            if is_legal(layout, model=other.model, job=job, machine=other.machine)
        )
        if any(map(other.fits, legal)):
            yield words


def _count_ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def list_candidates(planner: Planner, world: int) -> Iterator[tuple[str, Layout]]:
    """Yield layouts of ``world`` ranks from simple to complex, with the smallest micro-batch, and what each adds."""
    model, node, batch = planner.model, planner.machine.ranks_per_node, planner.job.global_batch
    smallest = planner.job.min_micro_batch
    seen: set[Layout] = set()
    eps = [1]
    if model.moe:  # a node's worth of experts' ranks first
        eps = [ep for ep in (8, 16, 32, 64, 4, 2, 1) if model.moe.experts % ep == 0 and world % ep == 0]
    candidates: list[tuple[str, dict[str, object]]] = []
    for ep in eps:
        with_experts = {"ep": ep} if ep > 1 else {}
        ep_suffix = f", ep{ep}" if ep > 1 else ""
        candidates += [(f"zero{zero}{ep_suffix}", {"zero": zero, **with_experts}) for zero in range(4)]
        for tp in (tp for tp in (2, 4, 8) if tp <= node):
            candidates.append((f"tp{tp} within a node{ep_suffix}", {"tp": tp, "zero": 1, **with_experts}))
        for pp in (2, 4, 8, 16, 32):
            for tp in (1, min(8, node)):
                candidates.append((f"pp{pp}{ep_suffix}", {"tp": tp, "pp": pp, "zero": 1, **with_experts}))
        candidates += [
            (f"cp{cp}{ep_suffix}", {"tp": min(8, node), "cp": cp, "zero": 1, **with_experts}) for cp in (2, 4, 8, 16)
        ]
        candidates.append((f"zero3 and full recomputation{ep_suffix}", {"zero": 3, "ac": "full", **with_experts}))
        candidates += [
            (
                f"pp{pp} and full recomputation{ep_suffix}",
                {"tp": min(8, node), "pp": pp, "zero": 1, "ac": "full", **with_experts},
            )
            for pp in (4, 16)
        ]
    for words, fields in candidates:
        layout = _spread({"mbs": smallest, **fields}, world=world, batch=batch // smallest)
        if layout is not None and layout not in seen:
            seen.add(layout)
            yield (words if layout.zero else words.replace("zero3 and full", "full")), layout


def _spread(fields: dict[str, object], *, world: int, batch: int) -> Layout | None:
    """Return the layout with dp over the remaining ranks.

    If there are more ranks than micro-batches in ``batch``, the rest goes to cp.
    """
    degrees = {axis: int(str(fields.get(axis, 1))) for axis in ("tp", "pp", "cp")}
    taken = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if world % taken:
        return None
    dp = world // taken
    extra = 1
    while dp > batch and dp % 2 == 0:
        dp, extra = dp // 2, extra * 2
    fields = {**fields, "dp": dp, "cp": degrees["cp"] * extra}
    if dp * degrees["cp"] * extra == 1:
        fields |= {"zero": 0}
    try:
        return Layout.model_validate(fields)
    except ValueError:
        return None


def plan_micro_batch_stage(planner: Planner, layout: Layout) -> tuple[Stage, Layout]:
    """Return the micro-batch step: the fastest micro-batch that fits, and the gradient accumulation that follows."""
    job, tried = planner.job, list[Attempt]()
    fitting: list[tuple[float, Layout]] = []
    for size in (2**power for power in range(7)):
        other = layout.replace(mbs=size)
        if not is_legal(other, model=planner.model, job=job, machine=planner.machine):
            continue
        times = job.global_batch // (other.dp * size)
        count = _count_micro_batches(times)
        candidate = _describe_attempt(planner, other, fits=count, else_=f"{count}, ")
        assert candidate.step_seconds is not None
        fitting += [(candidate.step_seconds, other)] if candidate.fits else []
        tried.append(candidate)
    _, best = min(fitting, key=lambda pair: pair[0])
    rows = tuple(attempt.replace(chosen=attempt.layout == str(best)) for attempt in tried)
    times = job.global_batch // (best.dp * best.mbs)
    reason = (
        f"{job.global_batch} sequences are dp{best.dp} times mbs{best.mbs} times {_count_micro_batches(times)}; "
        f"mbs{best.mbs} is the fastest that fits"
    )
    replicas = "1 replica processes" if best.dp == 1 else f"{best.dp} replicas process"
    question = f"How many sequences at a time, so that {replicas} {job.global_batch} a step?"
    return Stage(title="Reach the batch", question=question, tried=rows, reason=reason), best


def plan_speed_stage(walk: Walk, proposal: Proposal) -> Stage:
    """Return the speed step: single changes of the current layout, and the layout that ``search`` proposes."""
    tried = [
        Attempt(
            layout=change.layout,
            why=f"{change.change}: {change.faster - 1:+.1%}",
            fits=change.fits,
            peak_bytes=change.memory_bytes,
            step_seconds=change.step_seconds,
        )
        for change in walk.path
    ]
    step = proposal.choice.step
    last = walk.path[-1] if walk.path else walk.start
    gain = last.step_seconds / step.time.step_seconds - 1
    tried.append(
        Attempt(
            layout=proposal.layout,
            fits=True,
            chosen=True,
            peak_bytes=step.memory.peak_bytes,
            step_seconds=step.time.step_seconds,
            why=f"proposal of `search`: {gain:+.1%} over {'the row above' if walk.path else 'step 3'}",
        )
    )
    before = walk.start.step_seconds / step.time.step_seconds - 1
    if proposal.layout == walk.start.layout:
        gained = "it is that of step 3"
    else:
        gained = f"{before:+.1%} faster than the layout of step 3 ({show_seconds(walk.start.step_seconds)})"
    reason = (
        f"{proposal.layout} is the simplest layout within {proposal.within:.1%} of the fastest, and {gained}; "
        f"most time in {step.time.longest_part}"
    )
    why = "; ".join(f"{reason.choice}: {reason.line}" for reason in proposal.why)
    question = "Which single change gains most, which one next, and which layout of all is best?"
    return Stage(title="Make it fast", question=question, tried=tuple(tried), reason=f"{reason}. {why}")


def _count_micro_batches(count: int) -> str:
    return f"{count} micro-batch{'es' if count != 1 else ''}"


def _describe_attempt(planner: Planner, layout: Layout, *, fits: str, else_: str) -> Attempt:
    """Return an estimated layout with the text ``fits``, or with ``else_`` and why it does not fit."""
    estimate = planner.estimate(layout)
    miss = planner.describe_miss(layout, estimate.ranks)
    return Attempt(
        layout=str(layout),
        why=f"{else_}{miss}" if miss else fits,
        fits=not miss,
        peak_bytes=estimate.peak_bytes,
        step_seconds=estimate.step_time.seconds,
    )


def _cite_advice(model: Model, size: float, tokens: float) -> str:
    who = ", ".join(
        f"{advice.who} ({advice.source})" for advice in find_nearby_advice(size, model=model, tokens=tokens)
    )
    return f"{show_count(size)} tokens" + (f": {who}" if who else "")


def _fit_words(layout: Layout, planner: Planner) -> str:
    fullest = max(planner.memory(layout), key=lambda rank: rank.peak_bytes)
    states = fullest.parameters_bytes + fullest.gradients_bytes + fullest.optimizer_bytes
    return (
        f"{show_bytes(states)} of states and {show_bytes(fullest.activations_bytes)} of activations "
        "on the rank with the highest peak"
    )


Report = Callable[[str], None]


def list_stages(
    model: Model,
    machine: Machine,
    job: Job,
    *,
    tokens: float,
    is_given: bool,
    walk: Callable[[Planner, Layout], Walk],
    propose: Callable[[Job], Proposal],
    risk: float = FITS_RISK,
) -> tuple[Sequence[Stage], Job, Proposal]:
    """Return all steps of the playbook. ``walk`` and ``propose`` are the functions of ``search``."""
    validate_job(model, job, machine)
    first, job = plan_batch_stage(model, job, tokens=tokens, is_given=is_given)
    planner = Planner(model=model, machine=machine, job=job, risk=risk)
    second, layout = fit_stage(planner, world=machine.ranks)
    third, layout = plan_micro_batch_stage(planner, layout)
    proposal = propose(job)
    return (first, second, third, plan_speed_stage(walk(planner, layout), proposal)), job, proposal
