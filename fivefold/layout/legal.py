"""Whether a layout fits a model, job, machine and stack: one line per reason, with numbers and the nearest fixes.

This is the one gate: ``Planner`` refuses a layout before it counts it, the engine before it builds it, and both raise
the first reason. Whoever tries changes of a layout or of a job asks ``is_legal`` first, and ``planner/search/space.py``
yields only layouts that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations
from typing import Any, get_args

from fivefold.bounded_types import PLAYED
from fivefold.job import Job
from fivefold.layout.names import DEFAULT_ORDER, Axis, MeshAxis
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, ScheduleName
from fivefold.layout.spec import Layout, divisor_below, divisors, stages_word
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.optimizers.cost import find_cost
from fivefold.record import Mistake
from fivefold.stack.spec import Runs, Stack
from fivefold.units import ceil_div


def refuse(layout: Layout, *, model: Model, job: Job, machine: Machine | None = None) -> None:
    """Raise a one-line ``Mistake`` if the layout does not fit this model, job or machine."""
    reason = next(reasons(layout, model=model, job=job, machine=machine), None)
    if reason is not None:
        raise Mistake(f"layout {str(layout)!r}: {reason}")


def describe_idle(layout: Layout, machine: Machine) -> tuple[str, ...]:
    """Return the remark on a layout that uses fewer ranks than the machine has, or nothing."""
    used, have = layout.world, machine.ranks
    if used >= have:
        return ()
    chip, *words = machine.name.split()
    smaller = " ".join([f"{chip}:{used}", *words])
    return (
        f"layout {str(layout)!r} uses {used:,} of the {have:,} ranks of {machine.name}; {have - used:,} stay idle, and "
        f"all figures are of the {used:,}. Take {smaller!r}, or degrees that multiply to {have:,}.",
    )


def reasons(layout: Layout, *, model: Model, job: Job, machine: Machine | None) -> Iterator[str]:
    """Every reason why the layout does not fit, one line each."""
    if machine is not None and layout.world > machine.ranks:
        world = layout.world
        yield f"needs {world} ranks, but {machine.name} has {machine.ranks}; lower a degree or take {world}"
    yield from unfit(model, job)
    yield from _stack(layout, job.stack)
    yield from _batch(layout, job)
    yield from _tensor(layout, model)
    if (reason := uncounted(layout, model=model, job=job)) is not None:
        yield reason
    yield from _context(layout, model=model, job=job)
    yield from _rows(layout, model=model, job=job)
    yield from _order(layout, model)
    yield from _pipeline(layout, model=model, job=job)
    yield from _ramp(layout, model=model, job=job)


def is_legal(layout: Layout, *, model: Model, job: Job, machine: Machine | None = None) -> bool:
    """Whether the layout fits this model, job and machine."""
    return next(reasons(layout, model=model, job=job, machine=machine), None) is None


def told(layout: Layout, *, model: Model, job: Job) -> bool:
    """Whether the config of the job's stack has words for the layout's axes, ZeRO stage, recomputation, experts."""
    runs, moe = job.stack.runs, model.moe is not None
    cut = layout.tp if layout.ep == 1 else 1
    axes = all(getattr(layout, axis) == 1 for axis in get_args(Axis) if axis not in (runs.told_axes or runs.axes))
    zero = layout.dp * layout.cp == 1 or (
        layout.zero in runs.zero_told(layout.pp, layout.cp) and runs.shards_told(layout.shards, layout.cp)
    )
    return (
        axes and zero and runs.told(layout.ac, experts=moe) and (not (moe and runs.experts_as_mlp) or layout.etp == cut)
    )


def validate_job(model: Model, job: Job) -> None:
    """Raise a one-line ``Mistake`` if model and job do not fit each other, whatever the layout."""
    if (reason := next(unfit(model, job), None)) is not None:
        raise Mistake(reason)


def unfit(model: Model, job: Job) -> Iterator[str]:
    """Reasons why model and job do not fit each other, whatever the layout."""
    if model.position == "learned" and job.sequence > model.positions:
        most = model.positions
        yield f"sequence {job.sequence} is longer than the {most} learned positions of {model.name}; try seq {most}"
    if job.precision.autocasts and not job.stack.kernel_facts.supports_autocast:
        yield (
            f"precision {job.precision.name} is PyTorch's autocast, which {job.stack.name} does not use; "
            f"take {job.precision.compute}, or a stack that does, such as ddp"
        )


def neighbours(order: Sequence[MeshAxis], *, spread: bool, partly: bool) -> bool:
    """Whether axes that share a process group are adjacent in ``order``, which lists the axes with more than one rank.

    dp and cp share ZeRO's group. If experts are ``spread`` over tp, tp must be adjacent to both, and nearest if experts
    are sharded ``partly``, over a part of tp.
    """
    states = [place for place, axis in enumerate(order) if axis in ("dp", "cp")]
    experts = [place for place, axis in enumerate(order) if axis in ("tp", "dp", "cp")] if spread else []
    in_a_row = all(places[-1] - places[0] < len(places) for places in (states, experts) if places)
    return in_a_row and not (partly and order[experts[0]] != "tp")


def _stack(layout: Layout, stack: Stack) -> Iterator[str]:
    """Reasons why the stack (the training software) cannot run the layout."""
    runs = stack.runs
    for axis in (axis for axis in get_args(Axis) if axis not in runs.axes and getattr(layout, axis) > 1):
        yield f"{stack.name} has no {axis}; take {axis}1 or another stack"
    if layout.pp > 1 and layout.schedule not in runs.schedules:
        yield f"{stack.name} has no {layout.schedule}; take {' or '.join(runs.schedules)}, or another stack"
    stages = runs.zero_with(layout.pp)
    if layout.dp * layout.cp > 1 and layout.zero not in stages:
        beside, mend = " with pipelines" if layout.pp > 1 else "", " or ".join(f"zero{n}" for n in stages)
        yield f"{stack.name} has no zero{layout.zero}{beside}; take {mend}, or another stack"
    if layout.cp > 1 and layout.cp_kind not in runs.cp_kinds:
        yield f"{stack.name} has no cp={layout.cp_kind}; take cp={runs.cp_kinds[0]} or another stack"
    for lacks, what, mend in (
        (layout.shard_group and not runs.shard_groups, "shard groups", f"zero{layout.zero}"),
        (layout.etp > 1 and not runs.expert_tensor, "tensor parallelism of experts", "etp1"),
        (not layout.sp and not runs.no_sp, "tensor parallelism without sequence parallelism", "it without nosp"),
        (bool(layout.stages) and not runs.uneven_stages, "stages of other sizes", "it without stages="),
        (not runs.orders_like(layout.order), "other orders of the ranks", _orders(runs)),
    ):
        if lacks:
            yield f"{stack.name} has no {what}; take {mend} or another stack"


def _orders(runs: Runs) -> str:
    """What order a layout may have instead."""
    others = () if isinstance(runs.orders, bool) else runs.orders
    return " or ".join(["it without order=", *(f"order={order}" for order in others)])


def _batch(layout: Layout, job: Job) -> Iterator[str]:
    chunk = layout.dp * layout.mbs
    if job.global_batch % chunk == 0:
        return
    near = ceil_div(job.global_batch, chunk) * chunk
    if job.global_batch % layout.dp:
        other = f"dp{divisor_below(job.global_batch, layout.dp)} mbs1"
    else:
        other = f"mbs{divisor_below(job.global_batch // layout.dp, layout.mbs)}"
    yield (
        f"global batch {job.global_batch} is not divisible by dp·mbs={layout.dp}·{layout.mbs}={chunk}; "
        f"try gbs {near} or {other}"
    )


def _tensor(layout: Layout, model: Model) -> Iterator[str]:
    experts, expert_ffn = (model.moe.experts, model.moe.ffn) if model.moe else (1, 1)
    room = layout.dp * layout.cp * layout.tp // layout.etp
    tp = _near("tp", layout.tp, lambda n: takes_tp(model, n), most=model.heads)
    for axis, name, size, mend in (
        ("tp", "heads", model.heads, tp),
        ("tp", "ffn", model.ffn, tp),
        ("tp", "ffn of shared experts", _shared_ffn(model), tp),
        ("ep", "experts", experts, _near("ep", layout.ep, lambda n: experts % n == 0 == room % n, most=experts)),
        ("etp", "expert ffn", expert_ffn,
         _near("etp", layout.etp, lambda n: expert_ffn % n == 0 == layout.tp % n, most=layout.tp)),
    ):  # fmt: skip
        degree = getattr(layout, axis)
        if size % degree:
            yield f"{name}={size} is not divisible by {axis}={degree}; {mend}"
    if not takes_tp(model, layout.tp):
        yield f"kv_heads={model.kv_heads} and tp={layout.tp}: one must divide the other; {tp}"
    if model.moe and not layout.sp:
        yield f"nosp: each of tp={layout.tp} ranks would send the same tokens to the experts; drop nosp"


def takes_tp(model: Model, tp: int) -> bool:
    """Whether tp divides heads, ffn and shared experts, and one of tp and kv heads divides the other."""
    small, large = sorted((model.kv_heads, tp))
    return not (model.heads % tp or model.ffn % tp or _shared_ffn(model) % tp or large % small)


def uncounted(layout: Layout, *, model: Model, job: Job) -> str | None:
    """Why 2D tensor parallelism of this layout is not counted, in one line; None: it is, or tp has one dimension."""
    if layout.tp_inner == 1:
        return None
    x, y, plain = layout.tp // layout.tp_inner, layout.tp_inner, layout.replace(tp_inner=1)
    for lacks, what in (
        (model.moe is not None, "experts"),
        (model.mla is not None, "latent attention"),
        (not layout.sp, "nosp"),
        (model.qk_norm == "full", "norms over all heads"),
        (model.qk_norm == "heads", "norms of heads by weights of their own"),
        (not job.stack.kernel_facts.two_dimensional_tp, f"the stack {job.stack.name}"),
        (job.stack.loss == "chunked", "a loss in chunks"),
        (not find_cost(job.optimizer.kind).counts_2d_tp, f"optimizer {job.optimizer.kind}"),
    ):
        if lacks:
            return f"2D tensor parallelism is not counted with {what}; try {str(plain)!r}"
    if model.width % y:
        return f"width={model.width} is not divisible by the inner {y} of tp{x}x{y}; try {str(plain)!r}"
    if model.kv_heads % layout.tp and model.kv_heads != x:
        return f"kv_heads={model.kv_heads} are neither a multiple of tp={layout.tp} nor {x}, its outer degree; try " + (
            f"tp{model.kv_heads}x{layout.tp // model.kv_heads}" if layout.tp % model.kv_heads == 0 else str(plain)
        )
    return None


def _shared_ffn(model: Model) -> int:
    moe = model.moe
    return moe.shared_experts * (moe.shared_ffn or moe.ffn) if moe else 0


def _context(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    parts = 2 * layout.cp if layout.cp_kind == "ring" else layout.cp
    if layout.cp > 1 and job.sequence % parts:
        near = ceil_div(job.sequence, parts) * parts
        yield f"sequence {job.sequence} is not divisible by {parts} (cp={layout.cp}, {layout.cp_kind}); try seq {near}"
    heads = model.heads // layout.tp
    if layout.cp_kind == "ulysses" and heads % layout.cp:
        fewer = divisor_below(heads, layout.cp)
        mend = f"cp{fewer}" if fewer > 1 else "cp=ring"
        yield f"heads/tp={heads} is not divisible by cp={layout.cp}; try {mend}"


def _rows(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Reasons why sequence parallelism cannot divide the rows of a micro-batch over tp."""
    rows = layout.mbs * job.sequence // layout.cp
    if not layout.sp or rows % layout.tp == 0:
        return
    mend = _near("tp", layout.tp, lambda n: rows % n == 0 and takes_tp(model, n), most=model.heads)
    if model.moe is None:
        mend = mend.replace("try ", "try nosp or ")
    cut = f"/cp={job.sequence}/{layout.cp}" if layout.cp > 1 else f"={job.sequence}"
    yield f"mbs·sequence{cut}: {rows} rows are not divisible by tp={layout.tp}; {mend}"


def _order(layout: Layout, model: Model) -> Iterator[str]:
    spread = model.moe is not None and layout.etp < layout.tp
    partly = spread and layout.etp > 1

    def legal(order: Sequence[MeshAxis]) -> bool:
        in_use = [axis for axis in order if getattr(layout, axis) > 1]
        return neighbours(in_use, spread=spread, partly=partly)

    if not legal(layout.order):
        moves: Iterable[tuple[MeshAxis, ...]] = filter(legal, permutations(DEFAULT_ORDER))
        near = sorted(moves, key=lambda order: sum(a != b for a, b in zip(order, layout.order, strict=True)))[:2]
        beside = ", dp beside cp" if layout.dp > 1 < layout.cp else ""
        axes, way = ("tp, dp and cp", ", tp first" if partly else beside) if spread else ("dp and cp", "")
        mend = " or ".join(f"order={'-'.join(order)}" for order in near)
        yield f"order={'-'.join(layout.order)}: {axes} must be neighbours{way}; try {mend}"


def _pipeline(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    pp, v, layers = layout.pp, layout.v, model.layers
    if pp * v > layers:
        step = 2 if layout.pipeline.enters_both_ends else 1
        mends = [f"pp{n}" for n in range(min(pp - step, layers // v // step * step), 1, -step)][:1]
        mends += [f"v{n}" for n in range(min(v - 1, layers // pp), 1, -1) if layout.pipeline.interleaves][:1]
        mend = f"try {' or '.join(mends)}" if mends else "lower pp or v"
        yield f"pp·v={pp * v} stages are more than layers={layers}; {mend}"
    if pp > 1 and not playable(layout.schedule, pp=pp, v=v, micro_batches=layout.micro_batches(job)):
        micro = layout.micro_batches(job)
        yield f"{micro} micro-batches of pp·v={pp * v} stages are too many to play; raise dp or mbs, or lower pp or gbs"
    if layout.stages and sum(layout.stages) != layers:
        yield f"{stages_word(layout.stages)} hold {sum(layout.stages)} layers, not layers={layers}"
    micro, needed = layout.micro_batches(job), layout.pipeline.min_rounds * pp
    even = 2 if layout.pipeline.enters_both_ends else 1
    chunk = layout.dp * layout.mbs
    if micro % even:
        mend = _more(layout, job, lambda n: n % even == 0, gbs=(micro + 1) * chunk)
        yield f"{layout.schedule} sends half of the micro-batches from each end, but {micro} is odd; {mend}"
    if micro < needed:
        mend = _more(layout, job, lambda n: n >= needed and n % even == 0, gbs=needed * chunk)
        yield f"{layout.schedule} needs {needed} micro-batches or more, but the batch gives {micro}; {mend}"


def playable(schedule: ScheduleName, *, pp: int, v: int, micro_batches: Any) -> Any:
    """Whether a schedule, or its period, is short enough to play; ``micro_batches``: an int or an array."""
    most, pipeline = PLAYED // (pp * v), PIPELINE_SCHEDULES[schedule]
    period = 4 * pp <= most and not pipeline.forwards_first
    return (micro_batches <= most) | (period & (micro_batches % pp == 0 if pipeline.interleaves else True))


def _ramp(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Reasons why a batch size of the ramp-up does not fit."""
    ramp, whole, chunk = job.ramp, job.global_batch, layout.dp * layout.mbs
    if ramp is None:
        return
    if ramp.first >= whole or (whole - ramp.first) % ramp.step:
        yield f"ramp: from first={ramp.first} by step={ramp.step} no batch becomes the global batch {whole}; change one"
        return
    for size in ramp.sizes(whole):
        if size % chunk:
            mend = f"let first and step be multiples of {chunk}"
            yield f"ramp: batch {size} is not divisible by dp·mbs={layout.dp}·{layout.mbs}={chunk}; {mend}"
            return
        for reason in _pipeline(layout, model=model, job=job.replace(global_batch=size, ramp=None)):
            yield f"ramp: batch {size}: {reason.rpartition('; ')[0]}; begin with a larger one, or lower mbs or pp"
            return


def _more(layout: Layout, job: Job, legal: Callable[[int], bool], *, gbs: int) -> str:
    """Fixes for too few micro-batches: a larger batch, or micro-batches so small that their number is ``legal``."""
    each = job.global_batch // layout.dp
    smaller = [f"mbs{n}" for n in divisors(each)[::-1] if n < layout.mbs and legal(each // n)][:1]
    return f"try {' or '.join([f'gbs {gbs}', *smaller])}"


def _near(axis: str, degree: int, legal: Callable[[int], bool], *, most: int) -> str:
    """The fix "try …": the nearest legal degrees below and above."""
    below = next(n for n in range(min(degree, most), 0, -1) if n == 1 or legal(n))
    above = next((n for n in range(degree + 1, most + 1) if legal(n)), None)
    return f"try {' or '.join(f'{axis}{n}' for n in (below, above) if n is not None)}"
