"""What the micro-batches, tp, ep, etp and cp must divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from fivefold.job import Job
from fivefold.layout.spec import Layout, find_divisor_below
from fivefold.layout.validity.fixes import suggest_degrees
from fivefold.machine.spec import Machine
from fivefold.model.mixers.geometry import ShardedUnits
from fivefold.model.spec import Model
from fivefold.units import ceil_div


def check_batch(layout: Layout, job: Job, machine: Machine | None) -> Iterator[str]:
    """Yield an error if the global batch cannot be divided into micro-batches, with the nearest batches that can."""
    chunk = layout.dp * layout.mbs
    if job.global_batch % chunk == 0:
        return
    nearest_batch = ceil_div(job.global_batch, chunk) * chunk
    is_default = job.global_batch == Job.model_fields["global_batch"].default
    batch = f"global batch {job.global_batch}{' (the default)' if is_default else ''}"
    fix = f"gbs {nearest_batch - chunk} or gbs {nearest_batch}" if nearest_batch > chunk else f"gbs {nearest_batch}"
    if job.global_batch % layout.dp == 0:
        fix = f"gbs {nearest_batch} or mbs{find_divisor_below(job.global_batch // layout.dp, layout.mbs)}"
    elif machine is not None:
        dp = find_divisor_below(job.global_batch, max(layout.dp, machine.ranks * layout.dp // layout.world))
        if dp >= layout.dp:  # else GPUs would be idle
            fix = f"gbs {nearest_batch} or dp{dp} mbs1"
    yield f"{batch} is not divisible by dp·mbs={layout.dp}·{layout.mbs}={chunk}; try {fix}"


def check_sharding(layout: Layout, model: Model, machine: Machine | None) -> Iterator[str]:
    """Yield the reasons why tp, ep or etp does not divide the model."""
    experts, expert_ffn = (model.moe.experts, model.moe.ffn) if model.moe else (1, 1)
    ranks = layout.dp * layout.cp * layout.tp // layout.etp
    largest = min(model.heads, machine.ranks) if machine else model.heads
    legal_degrees: dict[str, tuple[Callable[[int], bool], int]] = {
        "tp": (lambda n: is_divisible_by_tp(model, n) and (machine is None or machine.ranks % n == 0), largest),
        "ep": (lambda n: experts % n == 0 and ranks % n == 0, experts),
        "etp": (lambda n: expert_ffn % n == 0 == layout.tp % n, layout.tp),
    }

    def suggest(axis: str) -> str:
        is_legal_degree, most = legal_degrees[axis]
        return suggest_degrees(axis, getattr(layout, axis), is_legal_degree, most=most)

    for axis, name, size in (
        ("tp", "heads", model.heads),
        ("tp", "ffn", model.ffn),
        ("tp", "ffn of shared experts", model.shared_experts_width),
        ("tp", "ffn of layers that share keys", model.shared_kv_ffn or model.ffn),
        ("ep", "experts", experts),
        ("etp", "expert ffn", expert_ffn),
    ):
        degree = getattr(layout, axis)
        if degree > 1 and axis in ("ep", "etp") and model.moe is None:
            yield f"{axis}={degree} needs a model with experts, and {model.name} has none; use {axis}1"
        elif size % degree:
            yield f"{name}={size} is not divisible by {axis}={degree}; {suggest(axis)}"
    for shape in model.attention_shapes[1:]:
        if shape.heads % layout.tp or shape.kv_heads % layout.tp:
            sizes = f"{shape.heads} heads and {shape.kv_heads} kv heads"
            yield f"sliding layers have {sizes}, which are not both divisible by tp={layout.tp}; {suggest('tp')}"
    if not _divides_attention(model, layout.tp):
        rule = "tp must divide them, as sliding layers have others" if model.sliding else "one must divide the other"
        yield f"kv_heads={model.kv_heads} and tp={layout.tp}: {rule}; {suggest('tp')}"
    if model.moe and not layout.sp:
        yield f"nosp: each of tp={layout.tp} ranks would send the same tokens to the experts; drop nosp"


def is_divisible_by_tp(model: Model, tp: int) -> bool:
    """Tell whether tp divides what it shards: of attention, feed-forwards and other token mixers."""
    return _divides_attention(model, tp) and not any(list_unsharded_mixers(model, tp))


def _divides_attention(model: Model, tp: int) -> bool:
    """Tell whether tp divides heads, ffn and shared experts, and one of tp and kv heads divides the other."""
    shapes = model.attention_shapes
    heads_fit = not any(shape.heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp) for shape in shapes)
    replicates = tp > min(shape.kv_heads for shape in shapes)  # of unlike layers each has its own groups of replicas
    ffns = (model.ffn, model.shared_kv_ffn or model.ffn, model.shared_experts_width)
    return heads_fit and not ((len(shapes) > 1 and replicates) or any(ffn % tp for ffn in ffns))


def check_context(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield why the sequence or the heads cannot be divided over cp, with a fix."""
    parts = layout.context_parallelism.parts_per_rank * layout.cp
    if layout.cp > 1 and job.sequence % parts:
        multiples = (job.sequence // parts * parts, ceil_div(job.sequence, parts) * parts)
        near = " or ".join(f"seq {multiple}" for multiple in multiples if multiple)
        yield f"sequence {job.sequence} is not divisible by {parts} (cp={layout.cp}, {layout.cp_kind}); try {near}"
    heads = gcd(*(shape.heads for shape in model.attention_shapes)) // layout.tp
    if layout.context_parallelism.exchanges_heads and heads % layout.cp:
        cp = find_divisor_below(heads, layout.cp)
        fix = f"cp{cp}" if cp > 1 else "cp=ring"
        yield f"heads/tp={heads} is not divisible by cp={layout.cp}; try {fix}"


def list_unsharded_mixers(model: Model, tp: int) -> list[tuple[str, ShardedUnits | None]]:
    """List the token mixers other than attention that tp does not divide, with what it would divide."""
    units = {kind: getattr(model, kind).get_sharded_units(model.width) for kind in model.non_attention_mixers}
    return [(kind, unit) for kind, unit in units.items() if tp > 1 and (unit is None or unit.number % tp)]


def check_rows(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why sequence parallelism cannot divide the rows of a micro-batch over tp."""
    rows = layout.mbs * job.sequence // layout.cp
    if not layout.sp or rows % layout.tp == 0:
        return
    fix = suggest_degrees("tp", layout.tp, lambda n: rows % n == 0 and is_divisible_by_tp(model, n), most=model.heads)
    if model.moe is None:
        fix = fix.replace("try ", "try nosp or ")
    sequence_text = f"/cp={job.sequence}/{layout.cp}" if layout.cp > 1 else f"={job.sequence}"
    yield f"mbs·sequence{sequence_text}: {rows} rows are not divisible by tp={layout.tp}; {fix}"
