"""Validate a layout for a model, job, machine and stack: one line per reason, with numbers and the nearest fixes.

All validation is here: ``Planner`` validates a layout before it counts it, the trainer before it builds it, and both
raise the first reason. Code that tries changed layouts or jobs calls ``is_legal`` first, and
``planner/search/space.py`` yields only valid layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, permutations
from math import gcd
from typing import Any, get_args

from fivefold.adapter import (
    ALL_LINEAR,
    EMBEDDING,
    EXPERT_TARGETS,
    HEAD,
    MERGED_LINEARS,
    TARGETS,
    Adapter,
)
from fivefold.base_format import BITSANDBYTES_BASES
from fivefold.bounded_types import MAX_SIMULATED_ACTIONS
from fivefold.job import Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.names import DEFAULT_ORDER, Axis, MeshAxis, Offloaded
from fivefold.layout.quantized_base import explain_cut_block, explain_cut_experts
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, ScheduleName
from fivefold.layout.spec import Layout, find_divisor_below, list_divisors
from fivefold.layout.stages import find_first_backward_stage, list_stage_layers
from fivefold.layout.text import format_stages
from fivefold.machine.spec import Machine
from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.mixers.geometry import ShardedUnits
from fivefold.model.spec import Model
from fivefold.model.weights import (
    find_first_adapted,
    list_adapter_weights,
    list_block_weights,
    list_targets,
    mark_frozen,
    resolve_freeze,
    with_adapters,
)
from fivefold.optimizers.cost import find_cost
from fivefold.record import UserError
from fivefold.stack.spec import Stack, SupportedLayouts
from fivefold.units import ceil_div


def refuse(layout: Layout, *, model: Model, job: Job, machine: Machine | None = None) -> None:
    """Raise a one-line ``UserError`` if the layout does not fit this model, job or machine."""
    reason = next(list_reasons(layout, model=model, job=job, machine=machine), None)
    if reason is not None:
        raise UserError(f"layout {str(layout)!r}: {reason}")


def list_reasons(layout: Layout, *, model: Model, job: Job, machine: Machine | None) -> Iterator[str]:
    """Yield every reason why the layout is not valid, one line each."""
    if machine is not None and layout.world > machine.ranks:
        world = layout.world
        yield f"needs {world} ranks, but {machine.name} has {machine.ranks}; lower a degree or use {world} ranks"
    yield from list_mismatches(model, job, machine)
    yield from _check_stack(layout, model, job.stack)
    yield from _check_batch(layout, job, machine)
    yield from _check_sharding(layout, model, machine)
    if (reason := explain_unsupported_2d(layout, model=model, job=job)) is not None:
        yield reason
    yield from _check_vision(layout, model=model, job=job)
    yield from _check_mixers(layout, model, sequence=job.sequence)
    yield from _check_indexer(layout, model)
    yield from _check_shared_keys(layout, model)
    yield from _explain_unsharded(layout, model)
    yield from _check_context(layout, model=model, job=job)
    yield from _check_rows(layout, model=model, job=job)
    yield from _order(layout, model, job.stack.runs)
    yield from _check_pipeline(layout, model=model, job=job)
    yield from _check_ramp(layout, model=model, job=job)
    yield from _check_frozen_layout(layout, model=model, job=job)
    if (offload := explain_unsupported_offload(layout.list_offloaded(job), zero=layout.zero, job=job)) is not None:
        yield offload
    yield from _check_preferences(layout, model=model, job=job)


def is_legal(layout: Layout, *, model: Model, job: Job, machine: Machine | None = None) -> bool:
    """Tell whether the layout is valid for this model, job and machine."""
    return next(list_reasons(layout, model=model, job=job, machine=machine), None) is None


def can_express(layout: Layout, *, model: Model, job: Job) -> bool:
    """Tell whether the config of the job's stack can express axes, ZeRO stage, recomputation and experts."""
    runs = job.stack.runs
    axes = all(getattr(layout, axis) == 1 for axis in get_args(Axis) if axis not in (runs.config_axes or runs.axes))
    return axes and next(list_inexpressible(layout, model=model, job=job), None) is None


def list_inexpressible(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield what the config of the job's stack cannot express of a layout with these axes, one line each.

    Such a layout is predicted all the same, as some configs are read as the nearest one, but it is neither searched nor
    written.
    """
    runs, moe = job.stack.runs, model.moe is not None
    config = f"a config of {job.stack.name} cannot express"
    if layout.dp * layout.cp > 1:
        stages = runs.expressible_zero(layout.pp, layout.cp)
        if layout.zero not in stages:
            fix = " or ".join(f"zero{stage}" for stage in stages)
            yield f"{config} zero{layout.zero}; use {f'{fix} or another stack' if fix else 'another stack'}"
        elif not runs.can_express_shards(layout.shards, layout.cp):
            yield f"{config} shard groups that are not whole groups of cp={layout.cp}; use a multiple of it"
    if not runs.can_express(layout.ac, experts=moe):
        known = [f"ac={ac}" for ac in ("none", *runs.recomputes, *(runs.expert_recomputes if moe else ()))]
        yield f"{config} ac={layout.ac}; use {', '.join(known[:-1])} or {known[-1]}, or another stack"
    default_etp = layout.tp if layout.ep == 1 else 1
    if moe and runs.experts_as_mlp and layout.etp != default_etp:
        yield f"{config} etp{layout.etp} with tp{layout.tp} and ep{layout.ep}; use etp{default_etp}"


def list_unwritten(model: Model, job: Job, fields: Sequence[str] = ("optimizer", "precision")) -> Iterator[str]:
    """Yield which optimizer or precision of a job its stack, or a config of it, does not have: one line for each field.

    Such a job is predicted all the same: some software has more than what is recorded of it.
    """
    runs = job.stack.runs
    unwritten = f"no config of {job.stack.name} is written"
    untrained = f"{job.stack.name} is not known to train"
    precisions = runs.list_precisions(experts=model.moe is not None)
    facts = {
        "optimizer": (job.optimizer.kind, runs.config_optimizers, unwritten),
        "precision": (job.precision.name, precisions, untrained if runs.precisions else unwritten),
    }
    for field in fields:
        value, known, reason = facts[field]
        if known and value not in known:
            *others, last = known
            fix = f"{', '.join(others)} or {last}" if others else last
            yield f"{reason} with {field} {value}; use {fix}, or another stack"


def validate_job(model: Model, job: Job, machine: Machine | None = None) -> None:
    """Raise a one-line ``UserError`` if model, job and machine do not fit one another under any layout."""
    if (reason := next(list_mismatches(model, job, machine), None)) is not None:
        raise UserError(reason)


def list_mismatches(model: Model, job: Job, machine: Machine | None = None) -> Iterator[str]:
    """Yield the reasons why model, job and machine do not fit one another under any layout."""
    if machine is not None and job.stack.fused_scans and not machine.has_gpus:
        yield f"fused_scans=true needs GPUs, for which its kernels are compiled, and {machine.name} has none; drop it"
    if model.position == "learned" and job.sequence > model.positions:
        limit = model.positions
        yield f"sequence {job.sequence} is longer than the {limit} learned positions of {model.name}; try seq {limit}"
    if model.dynamic_mask is not None and (
        job.stack.attention_facts.materializes_scores or job.documents == "separate"
    ):
        yield f"masks from values of {model.name} are counted with attention='flash' and joined documents; use these"
    if model.mla is not None and model.mla.indexer is not None:
        if job.precision.autocasts:
            yield f"an indexer is not counted under autocast ({job.precision.name}); use {job.precision.compute}"
        if job.stack.attention_facts.materializes_scores:
            yield f"unfused attention does not know the keys that the indexer of {model.name} chooses; use 'flash'"
    if model.per_layer_inputs is not None and job.precision.autocasts:
        yield f"per-layer inputs are not counted under autocast ({job.precision.name}); use {job.precision.compute}"
    if model.hyper_connections is not None and job.precision.autocasts:
        yield f"hyper-connections are not counted under autocast ({job.precision.name}); use {job.precision.compute}"
    yield from _list_vision_mismatches(model, job)
    if job.has_targets and model.mtp is not None:
        what = f"objective={job.objective} does not train multi-token prediction"
        yield f"{what} ({model.name}); use a model without mtp"
    for kind in model.non_attention_mixers:
        if job.documents == "separate":
            yield f"{kind} mixes tokens across documents; use documents='joined', or a model that only attends"
        if job.stack.attention_facts.materializes_scores and isinstance(getattr(model, kind), CompressedAttention):
            yield f"unfused attention does not know the compressed keys of {kind}; use 'flash'"
        if job.precision.autocasts and job.adapter is None:  # next to adapters only factors and the loss are cast
            yield f"{kind} is not counted under autocast ({job.precision.name}); use {job.precision.compute}"
    if job.precision.autocasts and not job.stack.kernel_facts.supports_autocast:
        is_named = job.precision.name.endswith("-autocast")
        what = (
            f"precision {job.precision.name}" if is_named else f"fp32 weights with matmuls in {job.precision.compute}"
        )
        yield (
            f"{what} {'is' if is_named else 'are'} PyTorch's autocast, which {job.stack.name} does not use; "
            f"use {job.precision.compute}, or a stack that does, such as ddp"
        )
    yield from _check_stored_weights(model, job)
    yield from _check_frozen_job(model, job)
    if job.objective == "dpo":
        yield from _list_present(
            "objective=dpo is not modelled with",
            (model.moe is not None, f"experts of {model.name}", "a dense model"),
            (job.precision.is_low_precision, f"precision {job.precision.name}", "bf16"),
            (job.stack.loss_facts.chunked, "a loss in chunks", "loss=fused"),
        )


def _list_present(what: str, *features: tuple[object, str, str]) -> Iterator[str]:
    """Yield that ``what`` does not go together with each feature that is present, and what to use instead."""
    return (f"{what} {feature}; use {fix}" for is_present, feature, fix in features if is_present)


def _list_vision_mismatches(model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why the job's images do not fit the model's vision tower."""
    tower = model.vision
    if not job.images:
        return
    if tower is None:
        yield f"images={job.images}: {model.name} has no vision tower that is read; leave images out"
        return
    if tower.patches is None and job.image_tokens is None:
        pixels = tower.patch * tower.patches_per_token**0.5
        yield (
            f"images={job.images}: images of {model.name} may have any size; give image_tokens, one for "
            f"{pixels:.0f} x {pixels:.0f} pixels"
        )
        return
    if tower.patches is not None and job.image_tokens not in (None, tower.count_tokens(None)):
        fixed = tower.count_tokens(None)
        yield (
            f"image_tokens={job.image_tokens}: {model.name} makes {fixed} tokens of every image (or of every "
            f"tile of one); use image_tokens={fixed}, or more images"
        )
    if (tokens := count_image_tokens(model, job)) > job.sequence:
        yield f"images={job.images} have {tokens} tokens, more than the sequence of {job.sequence}; try seq {tokens}"
    yield from _list_present(
        f"images={job.images} are not counted with",
        (model.hyper_connections is not None, "hyper-connections", "a model with one residual stream"),
        (model.per_layer_inputs is not None, "per-layer inputs", "a model without them"),
        (job.objective == "dpo", "objective=dpo", "sft"),
        (
            job.precision.gathers == "fp8",
            f"precision {job.precision.name}, which gathers weights in fp8",
            "bf16, or fp8 without it",
        ),
        (
            job.adapter is not None and not job.freeze_projector,
            "an adapter next to a trained projector",
            "freeze_vision_tower and freeze_projector",
        ),
        (
            job.base_format is not None,
            f"a base in {job.adapter.base if job.adapter else ''}",
            "a base in 16 bits",
        ),
    )


def count_image_tokens(model: Model, job: Job) -> int:
    """Return how many tokens of a sequence stand for images; 0 if unknown, as in a job that is not valid."""
    tower = model.vision
    if tower is None or (tower.patches is None and job.image_tokens is None):
        return 0
    return job.images * tower.count_tokens(job.image_tokens)


def _check_vision(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why the vision tower cannot be sharded."""
    if not can_shard_tower(model, job, layout.tp) and model.vision is not None:
        fix = _suggest_degrees("tp", layout.tp, lambda n: can_shard_tower(model, job, n), most=model.vision.heads)
        yield f"tp={layout.tp} does not divide heads={model.vision.heads} and MLPs of the vision tower; {fix}"


def can_shard_tower(model: Model, job: Job, tp: int) -> bool:
    """Tell whether tp divides the heads and MLPs of the vision tower; always, if the job has no images."""
    tower = model.vision
    if not job.images or tower is None:
        return True
    mlps = [layer.ffn for layer in (*tower.projector, *tower.deepstack_projector) if layer.kind.endswith("mlp")]
    return gcd(tower.heads, tower.ffn, *mlps) % tp == 0


def are_neighbours(order: Sequence[MeshAxis], *, spread: bool, partly: bool) -> bool:
    """Tell whether axes that share a process group are adjacent in ``order``, which lists axes with more than one rank.

    dp and cp share ZeRO's group. If experts are ``spread`` over tp, tp must be adjacent to both, and it must be the
    nearest axis if experts are sharded ``partly``, over a part of tp.
    """
    state_places = [place for place, axis in enumerate(order) if axis in ("dp", "cp")]
    expert_places = [place for place, axis in enumerate(order) if axis in ("tp", "dp", "cp")] if spread else []
    are_adjacent = all(places[-1] - places[0] < len(places) for places in (state_places, expert_places) if places)
    return are_adjacent and not (partly and order[expert_places[0]] != "tp")


def _check_stack(layout: Layout, model: Model, stack: Stack) -> Iterator[str]:
    """Yield the reasons why the stack (the training software) cannot run the layout."""
    runs = stack.runs
    for axis in (axis for axis in get_args(Axis) if axis not in runs.axes and getattr(layout, axis) > 1):
        yield f"{stack.name} does not support {axis}; use {axis}1 or another stack"
    if layout.pp > 1 and layout.schedule not in runs.schedules:
        yield f"{stack.name} does not support {layout.schedule}; use {' or '.join(runs.schedules)}, or another stack"
    stages = runs.zero_with(layout.pp)
    if layout.dp * layout.cp > 1 and layout.zero not in stages:
        context = " with pipelines" if layout.pp > 1 else ""
        fix = " or ".join(f"zero{n}" for n in stages) or "pp1"
        yield f"{stack.name} does not support zero{layout.zero}{context}; use {fix}, or another stack"
    if layout.cp > 1 and layout.cp_kind not in runs.cp_kinds:
        yield f"{stack.name} does not support cp={layout.cp_kind}; use cp={runs.cp_kinds[0]} or another stack"
    for is_missing, feature, fix in (
        (layout.shard_group and not runs.shard_groups, "shard groups", f"zero{layout.zero}"),
        (
            layout.etp > 1 and not (runs.expert_tensor and "ep" in runs.axes),
            "tensor parallelism of experts",
            "etp1",
        ),
        (not layout.sp and not runs.no_sp, "tensor parallelism without sequence parallelism", "it without nosp"),
        (bool(layout.stages) and not runs.uneven_stages, "stages of other sizes", "it without stages="),
    ):
        if is_missing:
            yield f"{stack.name} does not support {feature}; use {fix} or another stack"
    if not runs.supports_order(layout.order):
        orders = _format_orders(layout, model, runs)
        yield f"{stack.name} does not support other orders of the ranks; use {orders} or another stack"


def _format_orders(layout: Layout, model: Model, runs: SupportedLayouts) -> str:
    """Return the orders of ranks that the stack supports and the layout allows, for a message."""
    others = (order for order in permutations(DEFAULT_ORDER) if order != DEFAULT_ORDER and runs.supports_order(order))
    allowed = (order for order in others if _has_legal_order(layout, model, order))
    return " or ".join(["it without order=", *(f"order={'-'.join(order)}" for order in allowed)])


def _check_batch(layout: Layout, job: Job, machine: Machine | None) -> Iterator[str]:
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


def _check_sharding(layout: Layout, model: Model, machine: Machine | None) -> Iterator[str]:
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
        return _suggest_degrees(axis, getattr(layout, axis), is_legal_degree, most=most)

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
    return _divides_attention(model, tp) and not any(_list_unsharded_mixers(model, tp))


def _divides_attention(model: Model, tp: int) -> bool:
    """Tell whether tp divides heads, ffn and shared experts, and one of tp and kv heads divides the other."""
    shapes = model.attention_shapes
    heads_fit = not any(shape.heads % tp or max(shape.kv_heads, tp) % min(shape.kv_heads, tp) for shape in shapes)
    replicates = tp > min(shape.kv_heads for shape in shapes)  # of unlike layers each has its own groups of replicas
    ffns = (model.ffn, model.shared_kv_ffn or model.ffn, model.shared_experts_width)
    return heads_fit and not ((len(shapes) > 1 and replicates) or any(ffn % tp for ffn in ffns))


def explain_unsupported_2d(layout: Layout, *, model: Model, job: Job) -> str | None:
    """Return why 2D tensor parallelism of this layout is not supported, in one line; None if it is, or tp is 1D."""
    if layout.tp_inner == 1:
        return None
    outer = layout.tp // layout.tp_inner
    inner = layout.tp_inner
    flat = layout.replace(tp_inner=1)
    for is_present, feature in (
        (job.images > 0, "images"),
        (model.moe is not None, "experts"),
        (bool(model.non_attention_mixers), "token mixers other than attention"),
        (model.mla is not None, "latent attention"),
        (model.output_gate, "output gates of attention"),
        (model.head_transform is not None, "a matrix before the head"),
        (model.hyper_connections is not None, "hyper-connections"),
        (model.sliding is not None, "sliding layers of another geometry"),
        (not layout.sp, "nosp"),
        (model.qk_norm == "full", "norms over all heads"),
        (model.sub_norm, "norms before the last matrices of attention and MLP"),
        (model.qk_norm == "heads", "norms of heads by weights of their own"),
        (not job.stack.kernel_facts.two_dimensional_tp, f"the stack {job.stack.name}"),
        (job.stack.loss_facts.chunked, "a loss in chunks"),
        (job.freezes_text, "adapters" if job.adapter else "freeze"),
        (job.objective == "dpo", "objective=dpo"),
        (not find_cost(job.optimizer.kind).counts_2d_tp, f"optimizer {job.optimizer.kind}"),
    ):
        if is_present:
            return f"2D tensor parallelism is not supported with {feature}; try {str(flat)!r}"
    if model.width % inner:
        return f"width={model.width} is not divisible by the inner {inner} of tp{outer}x{inner}; try {str(flat)!r}"
    if model.kv_heads % layout.tp and model.kv_heads != outer:
        return (
            f"kv_heads={model.kv_heads} are neither a multiple of tp={layout.tp} nor {outer}, its outer degree; try "
            + (f"tp{model.kv_heads}x{layout.tp // model.kv_heads}" if layout.tp % model.kv_heads == 0 else str(flat))
        )
    return None


def _check_context(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
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


def _check_mixers(layout: Layout, model: Model, *, sequence: int) -> Iterator[str]:
    """Yield the reasons why the token mixers other than attention cannot be sharded."""
    tp, kinds = layout.tp, model.non_attention_mixers
    for kind, units in _list_unsharded_mixers(model, tp):
        if units is None:
            yield f"tp={tp} would shard the channels of {kind}, which is not supported; use tp1"
        else:
            fix = _suggest_degrees("tp", tp, lambda n: is_divisible_by_tp(model, n), most=units.number)
            yield f"the {units.number} {units.name} of {kind} are not divisible by tp={tp}; {fix}"
    if layout.cp == 1:
        return
    for kind in kinds:
        geometry = getattr(model, kind)
        units = geometry.get_sharded_units(model.width)
        if geometry.context_parallel == "none":
            yield f"cp={layout.cp} would shard the tokens of {kind}, which is not supported; use cp1"
        elif layout.uses_ring:
            yield f"cp={layout.cp} as a ring would cut the chain of states of {kind}; use cp=ulysses"
        elif geometry.context_parallel == "halo":
            if (tokens := sequence // layout.cp) < geometry.taps - 1:
                yield (
                    f"{tokens} tokens of a sequence on each rank of cp={layout.cp} are fewer than the "
                    f"{geometry.taps - 1} before a token that {kind} reads; lower cp, or use longer sequences"
                )
        elif units.number // tp % layout.cp:
            number = units.number // tp
            fix = f"cp{find_divisor_below(number, layout.cp)}"
            yield f"{number} {units.name} of {kind} on each rank of tp are not divisible by cp={layout.cp}; try {fix}"


def _list_unsharded_mixers(model: Model, tp: int) -> list[tuple[str, ShardedUnits | None]]:
    """List the token mixers other than attention that tp does not divide, with what it would divide."""
    units = {kind: getattr(model, kind).get_sharded_units(model.width) for kind in model.non_attention_mixers}
    return [(kind, unit) for kind, unit in units.items() if tp > 1 and (unit is None or unit.number % tp)]


def list_unsharded(model: Model) -> list[tuple[str, tuple[Axis, ...]]]:
    """List what a model has that is counted only on one rank of some axes, with these axes."""
    features: tuple[tuple[bool, str, tuple[Axis, ...]], ...] = (
        (model.attention_experts, "experts of attention", ("tp", "cp")),
        (model.differential, "differential attention", ("tp", "cp")),
        (model.dynamic_mask is not None, "masks from values", ("tp", "cp")),
        (model.per_layer_inputs is not None, "inputs of each layer", ("tp", "pp")),  # each layer reads its part
        (any(model.gate_sparsity), "sparse gates", ("tp",)),  # chosen by all gates of a token
    )
    return [(feature, axes) for is_present, feature, axes in features if is_present]


def _explain_unsharded(layout: Layout, model: Model) -> Iterator[str]:
    """Yield the reasons why what is counted only on one rank cannot be sharded."""
    for feature, axes in list_unsharded(model):
        if any(getattr(layout, axis) > 1 for axis in axes):
            degrees = " and ".join(f"{axis}={getattr(layout, axis)}" for axis in axes)
            verb = "are" if len(axes) > 1 else "is"
            fix = " and ".join(f"{axis}1" for axis in axes)
            yield f"{degrees} {verb} not counted with {feature} of {model.name}; use {fix}"


def _check_indexer(layout: Layout, model: Model) -> Iterator[str]:
    """Yield the reasons why attention to keys that an indexer chooses cannot be sharded."""
    if model.mla is not None and model.mla.indexer is not None and layout.cp > 1:
        yield (
            f"cp={layout.cp} would shard the keys that the indexer of {model.name} selects, which is not supported; "
            "use cp1"
        )


def _check_shared_keys(layout: Layout, model: Model) -> Iterator[str]:
    """Yield why Ulysses cannot exchange keys that layers share where only some of these layers are recomputed."""
    exchanges_keys = layout.cp > 1 and layout.context_parallelism.exchanges_heads
    if model.shared_kv_layers and exchanges_keys and layout.recompute_every > 1:
        yield (
            f"ac={layout.ac} is not counted with cp=ulysses and keys that layers share of {model.name}; "
            "use ac=full or cp=ring"
        )


def _check_rows(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why sequence parallelism cannot divide the rows of a micro-batch over tp."""
    rows = layout.mbs * job.sequence // layout.cp
    if not layout.sp or rows % layout.tp == 0:
        return
    fix = _suggest_degrees("tp", layout.tp, lambda n: rows % n == 0 and is_divisible_by_tp(model, n), most=model.heads)
    if model.moe is None:
        fix = fix.replace("try ", "try nosp or ")
    sequence_text = f"/cp={job.sequence}/{layout.cp}" if layout.cp > 1 else f"={job.sequence}"
    yield f"mbs·sequence{sequence_text}: {rows} rows are not divisible by tp={layout.tp}; {fix}"


def _has_legal_order(layout: Layout, model: Model, order: Sequence[MeshAxis]) -> bool:
    """Tell whether axes of the layout that share messages would be neighbours in ``order``."""
    spread = model.moe is not None and layout.etp < layout.tp
    in_use = [axis for axis in order if getattr(layout, axis) > 1]
    return are_neighbours(in_use, spread=spread, partly=spread and layout.etp > 1)


def _order(layout: Layout, model: Model, runs: SupportedLayouts) -> Iterator[str]:
    """Yield an error for an order of the mesh in which axes that share messages are not neighbours."""
    if _has_legal_order(layout, model, layout.order):
        return
    spread = model.moe is not None and layout.etp < layout.tp
    orders = (order for order in permutations(DEFAULT_ORDER) if runs.supports_order(order))
    nearest_orders = sorted(
        (order for order in orders if _has_legal_order(layout, model, order)),
        key=lambda order: sum(a != b for a, b in zip(order, layout.order, strict=True)),
    )
    dp_cp_hint = ", dp next to cp" if layout.dp > 1 < layout.cp else ""
    axes, hint = ("tp, dp and cp", ", tp first" if layout.etp > 1 else dp_cp_hint) if spread else ("dp and cp", "")
    fix = " or ".join(f"order={'-'.join(order)}" for order in nearest_orders[:2])
    yield f"order={'-'.join(layout.order)}: {axes} must be neighbours{hint}; try {fix}"


def count_max_stages(model: Model, job: Job) -> int:
    """Return the most stages; embedding and head may be stages of their own (Llama 3 405B, arXiv:2407.21783 §3.3.2)."""
    return len(model.stage_parts) + 2 * job.stack.runs.uneven_stages


def _check_pipeline(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield an error for each rule of pipelines that the layout breaks: number of stages, layers and micro-batches."""
    pp, v, layers = layout.pp, layout.v, model.layers
    most = count_max_stages(model, job)
    if pp * v > most:
        step = 2 if layout.pipeline.enters_both_ends else 1
        fewer = range(min(pp - step, most // v // step * step), 1, -step)
        fixes = [f"pp{n}" for n in fewer if layout.world % n == 0][:1]
        fixes += [f"v{n}" for n in range(min(v - 1, most // pp), 1, -1) if layout.pipeline.is_interleaved][:1]
        fix = f"try {' or '.join(fixes)}" if fixes else "lower pp or v"
        parts = len(model.stage_parts)
        limit = f"layers={layers}" + (f" in {parts} parts" if parts < layers else "")
        limit += ", embedding and head" if job.stack.runs.uneven_stages else ""
        yield f"pp·v={pp * v} stages are more than {limit}; {fix}"
    if pp > 1 and not can_simulate(layout.schedule, pp=pp, v=v, micro_batches=layout.micro_batches(job)):
        micro = layout.micro_batches(job)
        fix = "raise dp or mbs, or lower pp or gbs"
        yield f"{micro} micro-batches of pp·v={pp * v} stages are too many to simulate; {fix}"
    if layout.stages and sum(layout.stages) != layers:
        yield f"{format_stages(layout.stages)} hold {sum(layout.stages)} layers, not layers={layers}"
    elif layout.stages:
        yield from _check_stage_starts(layout, model)
    micro, needed = layout.micro_batches(job), layout.pipeline.min_rounds * pp
    multiple = 2 if layout.pipeline.enters_both_ends else 1
    chunk = layout.dp * layout.mbs
    if micro % multiple:
        fix = _suggest_more_micro_batches(layout, job, lambda n: n % multiple == 0, gbs=(micro + 1) * chunk)
        yield f"{layout.schedule} sends half of the micro-batches from each end, but {micro} is odd; {fix}"
    if micro < needed:
        fix = _suggest_more_micro_batches(layout, job, lambda n: n >= needed and n % multiple == 0, gbs=needed * chunk)
        yield f"{layout.schedule} needs {needed} micro-batches or more, but the batch gives {micro}; {fix}"


def _check_stage_starts(layout: Layout, model: Model) -> Iterator[str]:
    """Yield an error if a stage begins after a layer of which it reads more than the stream."""
    starts = {0, *accumulate(model.stage_parts)}
    for start in (layers.start for layers in list_stage_layers(model, layout) if layers.start not in starts):
        lenders = ((layer, model.find_lender(layer)) for layer in range(start, model.layers))
        layer, reads = next((layer, lender[1]) for layer, lender in lenders if lender and lender[0] < start)
        reader = "which" if layer == start else f"but layer {layer}"
        nearest = (max(other for other in starts if other < start), min(other for other in starts if other > start))
        fix = " or ".join(str(other) for other in nearest if 0 < other < model.layers)
        yield (
            f"{format_stages(layout.stages)}: a stage begins with layer {start} of {model.name}, {reader} {reads}; "
            f"{f'begin it with layer {fix}, or ' if fix else ''}leave stages= out"
        )
        return


def can_simulate(schedule: ScheduleName, *, pp: int, v: int, micro_batches: Any) -> Any:
    """Tell whether a schedule, or one period of it, has few enough actions to simulate.

    ``micro_batches``: an int or an array of them; the answer is a bool or an array.
    """
    max_micro_batches = MAX_SIMULATED_ACTIONS // (pp * v)
    pipeline = PIPELINE_SCHEDULES[schedule]
    has_short_period = 4 * pp <= max_micro_batches and not pipeline.forwards_first
    return (micro_batches <= max_micro_batches) | (
        has_short_period & (micro_batches % pp == 0 if pipeline.is_interleaved else True)
    )


def _check_ramp(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reason why a batch size of the ramp-up is not valid."""
    ramp, final, chunk = job.ramp, job.global_batch, layout.dp * layout.mbs
    if ramp is None:
        return
    if ramp.first >= final or (final - ramp.first) % ramp.step:
        yield f"ramp: from first={ramp.first} by step={ramp.step} no batch becomes the global batch {final}; change one"
        return
    for size in ramp.sizes(final):
        if size % chunk:
            fix = f"let first and step be multiples of {chunk}"
            yield f"ramp: batch {size} is not divisible by dp·mbs={layout.dp}·{layout.mbs}={chunk}; {fix}"
            return
        for reason in _check_pipeline(layout, model=model, job=job.replace(global_batch=size, ramp=None)):
            yield f"ramp: batch {size}: {reason.rpartition('; ')[0]}; begin with a larger one, or lower mbs or pp"
            return


def _check_stored_weights(model: Model, job: Job) -> Iterator[str]:
    """Yield the reason why weights are not trained themselves, as their repository stores them as bitsandbytes does."""
    if model.quantization in BITSANDBYTES_BASES and job.adapter is None:
        adapter = "qlora:16" if model.quantization == "nf4" else "lora:16"
        yield (
            f"model {model.name!r}: {model.repository or 'the checkpoint'} stores its weights in {model.quantization}, "
            f"over which transformers trains adapters alone; add --adapter {adapter}, or name a repository in bf16"
        )


def _check_frozen_job(model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why adapters or frozen parts are not modelled with this model or job, under any layout."""
    adapter, recipe, stack = job.adapter, job.precision, job.stack
    if not job.freezes_text:
        return
    what = "freeze is" if adapter is None else "adapters are"
    merges_adapters = adapter is not None and stack.merges_adapters
    of_stack = f" and the stack {stack.name}" if merges_adapters else ""
    yield from _list_present(
        f"{what} not modelled with",
        (model.attention_experts, f"experts of attention of {model.name}", "a model without them"),
        (
            model.mla is not None and model.mla.indexer is not None,
            f"the indexer of {model.name}",
            "a model that attends to all keys",
        ),
        (
            model.mtp is not None,
            f"multi-token prediction of {model.name}, which transformers and peft do not load",
            "a config with num_nextn_predict_layers=0",
        ),
        (
            bool(mixers := _list_frozen_mixers(model, job)),
            f"{', '.join(mixers)} layers{of_stack}",
            "a model that only attends",
        ),
        (
            adapter is None and bool(model.feed_forwards),
            f"layers of {model.name} without a feed-forward",
            "a model whose layers have both",
        ),
        (model.head_transform is not None, f"the matrix before the head of {model.name}", "a model without it"),
        (
            model.mla is not None and model.mla.gates_queries,
            f"queries and gates of {model.name} that read a joined latent",
            "a model without them",
        ),
        (model.norm_gate_rank is not None, f"gates of norms of {model.name}", "a model without them"),
        (
            model.moe is not None and model.moe.latent_width is not None,
            f"latent experts of {model.name}",
            "a model whose experts have its width",
        ),
        (model.hyper_connections is not None, f"hyper-connections of {model.name}", "a model with one residual stream"),
        (model.per_layer_inputs is not None, f"per-layer inputs of {model.name}", "a model without them"),
        (model.shared_kv_layers > 0, f"keys that layers of {model.name} share", "a model without them"),
        (recipe.is_low_precision and not _freezes_low_precision(model, job), f"precision {recipe.name}", "bf16"),
        (not find_cost(job.optimizer.kind).elementwise, f"optimizer {job.optimizer.kind}", "adamw"),
        (
            stack.merged_projections and not merges_adapters,
            f"merged projections of the stack {stack.name}",
            "merged_projections=false",
        ),
        (
            stack.wgrad_accumulation in ("fused", "fused_dummy") and not merges_adapters,
            f"wgrad_accumulation={stack.wgrad_accumulation} of the stack {stack.name}",
            "wgrad_accumulation=separate",
        ),
    )
    yield from _freeze_mismatches(model, job) if adapter is None else _check_adapters(model, job, adapter)


def _list_frozen_mixers(model: Model, job: Job) -> list[str]:
    """Return the kinds of token mixers whose frozen weights, or adapters of whose layers, are not modelled.

    Those of two kinds whose layers have the same names here, but not in transformers, are not.
    """
    if job.adapter is None or job.stack.merges_adapters:
        return list(model.non_attention_mixers)
    modules = [mixer.targets for mixer in model.mixer_geometries]
    named = [{part: parts for parts in targets.values() for part in parts} for targets in modules]
    return [
        kind
        for kind, targets, of_kind in zip(model.non_attention_mixers, modules, named, strict=True)
        if not targets or any(of_kind[part] != other[part] for other in named for part in of_kind.keys() & other.keys())
    ]


def _freezes_low_precision(model: Model, job: Job) -> bool:
    """Tell whether frozen weights are modelled in fp8 or fp4: under LoRA, where casts are kept (Transformer Engine)."""
    adapter, keeps_casts = job.adapter, job.stack.kernel_facts.keeps_casts and job.precision.scaling != "rowwise"
    if adapter is None or adapter.base not in (None, "bf16", "fp32") or adapter.has_magnitudes:
        return False
    return keeps_casts and model.moe is None


def _freeze_mismatches(model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why the parts that the job freezes are not modelled, or leave nothing to train."""
    yield from _list_present(
        "freeze is not modelled with",
        (job.objective == "dpo", "objective=dpo", "sft, or an adapter"),
        (job.images > 0, f"images={job.images}", "freeze_vision_tower, or no images"),
    )
    try:
        frozen = resolve_freeze(model, job.freeze)
    except UserError as error:
        yield str(error)
        return
    if frozen.first_backward == model.layers:
        left = "only the head" if frozen.trains_head else "nothing"
        yield f"freeze={','.join(job.freeze)} leaves {left} of {model.name} to train; leave a layer out"
    elif not frozen.trains_embedding and model.is_moe(first := frozen.first_backward):
        below = (weight for weight in list_block_weights(model, first) if not weight.name.startswith(("moe.", "mlp.")))
        if all(weight.frozen for weight in mark_frozen(below, frozen.blocks[first])):
            feature = f"experts of layer {first}, below which nothing is trained"
            yield f"freeze is not modelled with {feature}; train the attention of that layer too"


def _check_adapters(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield the reasons why the job's adapters do not fit the model, or its base the precision."""
    if job.base_format is not None and not job.base_format.is_four_bit:
        yield from _check_published_base(model, job, adapter)
    if job.stack.merges_adapters:
        yield from _check_merged_adapters(model, job, adapter)
    if not any(weight.name.startswith("blocks.") for weight in list_adapter_weights(model, adapter)):
        targets, fix = ",".join(adapter.targets), f"up_proj, down_proj or {ALL_LINEAR}"
        yield f"adapter.targets={targets}: no such layer in a block of {model.name}; use {fix}"
    if adapter.modules_to_save:
        yield from _check_saved_modules(model, job, adapter)
    if adapter.adapts_experts:
        yield from _check_expert_adapters(model, job, adapter)
    if adapter.adapted_ends:
        yield from _check_end_adapters(job, adapter)
    in_fp32 = job.activation_bytes == 4
    if adapter.base in ("bf16", "fp32") and (adapter.base == "fp32") != in_fp32:
        feature, fix = f"{job.precision.name} activations", "fp32" if in_fp32 else "bf16"
        yield f"adapter.base={adapter.base} is not modelled with {feature}; use base={fix} or nf4"


def _check_merged_adapters(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield the reasons why adapters are not modelled with a stack whose merged projections share factors."""
    stack, what = job.stack, f"the stack {job.stack.name}"
    yield from _list_present(
        "adapters are not modelled with",
        (stack.kernel_facts.fuses_linears, f"merged_adapters={stack.merged_adapters} and {what}", "linears=separate"),
        (adapter.has_magnitudes, f"DoRA and {what}", "kind=lora"),
        (adapter.base not in (None, "bf16", "fp32"), f"a base in {adapter.base} and {what}", "base=bf16"),
        (bool(adapter.modules_to_save), f"modules_to_save and {what}", "adapters alone"),
        (bool(adapter.adapted_ends), f"targets {','.join(adapter.adapted_ends)} and {what}", ALL_LINEAR),
        (adapter.adapts_experts, f"adapters of routed experts and {what}", ALL_LINEAR),
    )
    targets = list_targets(model, adapter.replace(targets=(ALL_LINEAR,), rank_pattern=(), alpha_pattern=()))
    for linears in MERGED_LINEARS.values():
        merged = [target for target in targets if not set(TARGETS.get(target, ())).isdisjoint(linears)]
        adapted = [target for target in merged if adapter.has_target(target)]
        if model.mla is not None and "q_proj" in merged:
            continue
        if adapted and adapted != merged:
            yield (
                f"adapter.targets={','.join(adapter.targets)}: {what} gives {', '.join(merged)} one pair of factors; "
                f"target all of them or none"
            )
        elif len({(adapter.ranks.get(target), adapter.alphas.get(target)) for target in adapted}) > 1:
            yield f"{', '.join(merged)} have one pair of factors in {what}; give them one rank and alpha"


def _check_published_base(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield the reasons why a base in int8 or as published is not modelled with this model or job."""
    base = adapter.base
    is_dequantized = job.stack.kernel_facts.fuses_linears
    if base == "mxfp4" and model.moe is None:
        yield f"adapter.base=mxfp4: {model.name} has no routed experts, which alone are in MXFP4; use base=nf4"
    yield from _list_present(
        "adapters are not modelled with",
        (
            adapter.has_magnitudes and not is_dequantized,
            f"DoRA over a base in {base} and the stack {job.stack.name}",
            "base=nf4 or a base in 16 bits",
        ),
        (
            base == "mxfp4" and not job.stack.kernel_facts.fuses_linears,
            f"a base in mxfp4 and the stack {job.stack.name}, as transformers does not train over it",
            "base=bf16 (dequantize=True)",
        ),
        (
            base != "int8" and adapter.adapts_experts and not is_dequantized,
            f"adapters of routed experts in {base} and the stack {job.stack.name}",
            "base=bf16, or all-linear",
        ),
        (base == "fp8" and job.precision.autocasts, f"a base in fp8 under autocast ({job.precision.name})", "bf16"),
    )


def _check_expert_adapters(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield the reasons why adapters of routed experts are not modelled with this model or job."""
    targets = ",".join(target for target in adapter.targets if target in EXPERT_TARGETS)
    if model.moe is None:
        yield f"adapter.targets={targets}: {model.name} has no routed experts; use {ALL_LINEAR}"
        return
    first = find_first_adapted(model, adapter)
    below = () if first == model.layers else with_adapters(model, list_block_weights(model, first), adapter)
    yield from _list_present(
        f"adapter.targets={targets} is not modelled with",
        (model.mlp != "gated", f"{model.name}, whose experts have no gate", ALL_LINEAR),
        (model.moe.identity_experts > 0, f"{model.name}, whose experts may give tokens back", ALL_LINEAR),
        (adapter.has_magnitudes, "DoRA, as in PEFT", "kind=lora"),
        (adapter.dropout > 0, f"adapter.dropout={adapter.dropout:g}, as in PEFT", "adapter.dropout=0"),
        (
            not any(weight.is_adapter and weight.name.startswith(("attention.", "mixer.")) for weight in below),
            "no adapters of attention below them",
            "q_proj,v_proj too",
        ),
    )


def _check_end_adapters(job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield the reasons why adapters of the embedding or the head are not modelled with this job."""
    targets = ",".join(adapter.adapted_ends)
    in_full = [name for name in adapter.adapted_ends if name in adapter.modules_to_save]
    adapts_embedding, adapts_head = EMBEDDING in adapter.adapted_ends, HEAD in adapter.adapted_ends
    yield from _list_present(
        f"adapter.targets={targets} is not modelled with",
        (bool(in_full), f"modules_to_save={','.join(in_full)}, which trains them in full", "one of both"),
        (adapts_embedding and adapter.has_magnitudes, "DoRA of an embedding", "kind=lora, or other targets"),
        (adapts_embedding and job.images > 0, f"images={job.images}", "no images, or other targets"),
        (adapts_head and job.stack.loss_facts.chunked, f"loss={job.stack.loss}", "loss=fused"),
    )


def _check_saved_modules(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield the reasons why modules that are trained in full next to the adapter are not modelled."""
    saved = f"adapter.modules_to_save={','.join(adapter.modules_to_save)}"
    yield from _list_present(
        f"{saved} is not modelled with",
        (model.tied_embeddings, f"{model.name}, whose embedding and head are one weight", "a model with two weights"),
        (job.objective == "dpo", "objective=dpo, whose reference is the model without them", "sft"),
        (
            job.precision.autocasts and job.precision.number_format.needs_loss_scaling,
            f"precision {job.precision.name}, as its gradients of them cannot be unscaled",
            "bf16-autocast",
        ),
        (job.images > 0, f"images={job.images}", "no images"),
    )


def explain_unsupported_schedule(schedule: ScheduleName, job: Job) -> str | None:
    """Return why the schedule is not modelled with the job's adapters or frozen parts, in one line; None if it is."""
    pipeline = PIPELINE_SCHEDULES[schedule]
    if not job.freezes_text or not (pipeline.splits_backward or pipeline.enters_both_ends):
        return None
    why = f"{schedule}, whose backward is split" if pipeline.splits_backward else schedule
    return f"{'adapters are' if job.adapter else 'freeze is'} not modelled with {why}; use 1f1b"


def _find_ungathered(model: Model, job: Job) -> str:
    """Return what of the job's frozen weights is not counted where weights are gathered one by one; "" if nothing."""
    adapter, recipe = job.adapter, job.precision
    if adapter is None:
        return "freeze is"
    for is_present, what in (
        (adapter.has_magnitudes, "DoRA is"),
        (bool(adapter.modules_to_save), "modules_to_save are"),
        (adapter.adapts_experts or bool(adapter.adapted_ends), "adapters of experts, embedding and head are"),
        (job.activation_bytes != recipe.high_precision_bytes, f"adapters in precision {recipe.name} are"),
        (bool(mixers := model.non_attention_mixers), f"adapters of {', '.join(mixers)} layers are"),
    ):
        if is_present:
            return what
    return ""


def explain_unsharded_factors(model: Model, job: Job, *, tp: int, ep: int = 1, etp: int = 1) -> str | None:
    """Return why these degrees cannot shard the job's adapters, in one line; None if they can, or shard none."""
    adapter, stack = job.adapter, job.stack
    if adapter is None:
        return None
    if adapter.adapts_experts:
        degrees = {"etp": etp} if stack.kernel_facts.fuses_linears else {"etp": etp, "ep": ep, "tp": tp}
        if (axis := next((axis for axis, degree in degrees.items() if degree > 1), None)) is not None:
            software = "" if axis == "etp" else f" and the stack {stack.name}, as PEFT does not shard them"
            return f"adapters of routed experts are not modelled with {axis}{degrees[axis]}{software}; use {axis}1"
    padded = pad_vocab(model, job, tp=tp)  # with rows whose norm is 0, by which DoRA would divide
    if adapter.has_magnitudes and adapter.has_target(HEAD) and padded > model.vocab:
        feature = f"DoRA of {HEAD} and a vocabulary of {model.vocab} that is padded to {padded}"
        return f"adapters are not modelled with {feature}; use kind=lora, or tp1"
    if tp > 1 and EMBEDDING in adapter.adapted_ends:
        return f"an adapter of {EMBEDDING} is not modelled with tp{tp}; use dp, cp or pp"
    if tp == 1 or not stack.merges_adapters:
        return None
    if model.mla is not None:
        return f"adapters of latent attention are not modelled with tp{tp} and the stack {stack.name}; use tp1"
    if tp > min(shape.kv_heads for shape in model.attention_shapes):
        return f"adapters are not modelled with tp{tp}, more than key heads, and the stack {stack.name}; lower tp"
    ranks = (rank for rank in dict.fromkeys((adapter.rank, *adapter.ranks.values())) if rank % tp)
    if (undivided := next(ranks, None)) is not None:
        return f"adapter.rank={undivided} is not divisible by tp={tp}, which shards it; use a multiple of it"
    return None


def explain_unsharded_base(model: Model, job: Job, *, tp: int, zero: int, shards: int) -> str | None:
    """Return why the job's frozen weights cannot be sharded like this, in one line; None if they can be."""
    if not job.freezes_text:
        return None
    is_zero3 = zero == 3 and shards > 1
    adapter = job.adapter
    if zero == 3 and job.stack.zero3_gather == "weights" and (what := _find_ungathered(model, job)):
        feature = f"ZeRO-3 of the stack {job.stack.name}, which gathers weight by weight"
        return f"{what} not modelled with {feature}; use zero2, or another stack"
    if adapter is None or job.base_format is None or job.base_format.is_four_bit:
        return None
    if job.stack.kernel_facts.fuses_linears:
        return None
    if tp > 1 or is_zero3:
        why = ", which bitsandbytes does not shard" if adapter.base == "int8" else ""
        feature = f"a base in {adapter.base} sharded by {'tp' if tp > 1 else 'ZeRO-3'}{why}"
        return f"adapters are not modelled with {feature}; use dp with zero0 to zero2, or base=nf4"
    return None


def _check_frozen_layout(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why the job's adapters or frozen parts are not modelled with this layout."""
    is_resolved = not job.freezes_text or next(_check_frozen_job(model, job), None) is None
    if layout.pp > 1 and is_resolved and not job.stack.has_frozen_stages:
        below = find_first_backward_stage(model, layout, job)
        if below:  # what its pipelines do then is not modelled
            what = f"{'adapters are' if job.adapter else 'freeze is'} not modelled with {below} stages"
            yield f"{what} that have no backward and the stack {job.stack.name}; train a layer of stage 0"
    factors = explain_unsharded_factors(model, job, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    schedule = explain_unsupported_schedule(layout.schedule, job)
    base = explain_unsharded_base(model, job, tp=layout.tp, zero=layout.zero, shards=layout.shards)
    cut, cut_experts = explain_cut_block(model, job, tp=layout.tp), explain_cut_experts(model, job, etp=layout.etp)
    yield from filter(None, (factors, schedule, base, cut, cut_experts))


def explain_unsupported_offload(offloaded: Iterable[Offloaded], *, zero: int, job: Job) -> str | None:
    """Return why what is in host memory is not modelled with this ZeRO stage or job, in one line; None if it is."""
    stack, recipe = job.stack, job.precision
    if "parameters" in offloaded:
        if zero < 3:
            return (
                f"offload=parameters is not modelled with zero{zero}; use zero3, on one rank too, or offload=optimizer"
            )
        if recipe.gathers == "fp8":
            what = f"precision {recipe.name}, which gathers weights in fp8"
            return f"offload=parameters is not modelled with {what}; use bf16"
        if job.copies_reference:
            return "offload=parameters is not modelled with objective=dpo without an adapter; use an adapter"
    if "optimizer" in offloaded and zero not in stack.runs.optimizer_offload_zero:
        fix = " or ".join(f"zero{stage}" for stage in stack.runs.optimizer_offload_zero)
        return f"{stack.name} does not run offload=optimizer with zero{zero}; use {fix}, on one rank too"
    return None


def _check_preferences(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why preference optimization (DPO) is not modelled with this layout, model or job."""
    if job.objective != "dpo":
        return
    if layout.mbs % job.min_micro_batch:
        yield f"mbs={layout.mbs} splits a pair of objective=dpo, which is two sequences; try mbs{layout.mbs + 1}"


def _suggest_more_micro_batches(layout: Layout, job: Job, legal: Callable[[int], bool], *, gbs: int) -> str:
    """Return fixes for too few micro-batches: a larger batch, or smaller micro-batches whose number is ``legal``."""
    sequences = job.global_batch // layout.dp
    smaller = [f"mbs{n}" for n in list_divisors(sequences)[::-1] if n < layout.mbs and legal(sequences // n)][:1]
    return f"try {' or '.join([f'gbs {gbs}', *smaller])}"


def _suggest_degrees(axis: str, degree: int, legal: Callable[[int], bool], *, most: int) -> str:
    """Return the fix "try …" with the nearest legal degrees below and above."""
    below = next(n for n in range(min(degree, most), 0, -1) if n == 1 or legal(n))
    above = next((n for n in range(degree + 1, most + 1) if legal(n)), None)
    return f"try {' or '.join(f'{axis}{n}' for n in (below, above) if n is not None)}"
