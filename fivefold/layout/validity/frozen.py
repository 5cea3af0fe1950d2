"""Frozen parts and bases of adapters: with which models, jobs and layouts they are modelled."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.adapter import EMBEDDING, HEAD
from fivefold.base_format import BITSANDBYTES_BASES
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.quantized_base import explain_cut_block, explain_cut_experts
from fivefold.layout.schedule.pipeline_schedule import PIPELINE_SCHEDULES, ScheduleName
from fivefold.layout.spec import Layout
from fivefold.layout.stages import find_first_backward_stage
from fivefold.layout.validity.adapters import check_adapters
from fivefold.layout.validity.fixes import list_present
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights, mark_frozen, resolve_freeze
from fivefold.optimizers.cost import find_cost


def check_stored_weights(model: Model, job: Job) -> Iterator[str]:
    """Yield the reason why weights are not trained themselves, as their repository stores them as bitsandbytes does."""
    if model.quantization in BITSANDBYTES_BASES and job.adapter is None:
        adapter = "qlora:16" if model.quantization == "nf4" else "lora:16"
        yield (
            f"model {model.name!r}: {model.repository or 'the checkpoint'} stores its weights in {model.quantization}, "
            f"over which transformers trains adapters alone; add --adapter {adapter}, or name a repository in bf16"
        )


def check_frozen_job(model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why adapters or frozen parts are not modelled with this model or job, under any layout."""
    adapter, recipe, stack = job.adapter, job.precision, job.stack
    if not job.freezes_text:
        return
    what = "freeze is" if adapter is None else "adapters are"
    merges_adapters = adapter is not None and stack.merges_adapters
    of_stack = f" and the stack {stack.name}" if merges_adapters else ""
    yield from list_present(
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
    yield from _freeze_mismatches(model, job) if adapter is None else check_adapters(model, job, adapter)


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
    yield from list_present(
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


def check_frozen_layout(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why the job's adapters or frozen parts are not modelled with this layout."""
    is_resolved = not job.freezes_text or next(check_frozen_job(model, job), None) is None
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
