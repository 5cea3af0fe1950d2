"""Remarks on a plan: what is valid but perhaps not intended, or is not counted, one line each.

Every command that answers for a model, machine and job shows the remarks of ``list_remarks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from fivefold.adapter import ALL_LINEAR, BASES, Adapter
from fivefold.base_format import BITSANDBYTES_BASES
from fivefold.job import Job, Recipe
from fivefold.layout.schedule.pipeline_schedule import DEFAULT_SCHEDULE
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.mixers.chunk_groups import CPU_TEMPORARY_BYTES, GPU_TEMPORARY_BYTES
from fivefold.model.spec import Model
from fivefold.model.vision_weights import count_vision
from fivefold.stack.spec import CHUNKED_SCANS, FUSED_SCANS
from fivefold.units import show_flops


def list_remarks(
    model: Model,
    machine: Machine,
    job: Job,
    layout: Layout | None,
    *,
    is_searched: bool = False,
    recipes: Iterable[Recipe] = (),
) -> tuple[str, ...]:
    """Return the remarks on a job under a layout; None: a search that found none.

    ``is_searched``: a search chose the layout, so that the best one depends on the batch and may use fewer ranks.
    ``recipes``: precisions that are tried in addition to the job's.
    """
    remarks = (
        _describe_idle(layout, machine) if layout and not is_searched else (),
        _describe_calibration(machine),
        _describe_number_formats(machine, (job.precision, *recipes)),
        _describe_attention(machine, job),
        describe_positions(model) if _is_beyond_positions(model, job) else (),
        _describe_uncounted(model, job),
        _describe_quantized_weights(model, job.adapter),
        _describe_unused_window(model, job),
        _describe_deferred_recompute(layout) if layout else (),
        _describe_padded_adapters(job, layout) if layout else (),
        _describe_unused_pairs(model, job, layout) if layout else (),
        describe_unused_fused_scans(model, job),
        _describe_unused_temporary_limit(model, job),
    )
    return tuple(chain.from_iterable(remarks))


def _describe_idle(layout: Layout, machine: Machine) -> Iterator[str]:
    """Yield a warning if a layout uses fewer ranks than the machine has."""
    used, have = layout.world, machine.ranks
    if used < have:
        chip, *words = machine.name.split()
        smaller = " ".join([f"{chip}:{used}", *words])
        larger = "" if have % used else f", such as {str(layout.replace(dp=layout.dp * have // used))!r}"
        yield (
            f"layout {str(layout)!r} uses {used:,} of the {have:,} ranks of {machine.name}; {have - used:,} stay idle, "
            f"and all figures are for the other {used:,}, at the pace of the slowest chip of all {have:,}. "
            f"Use {smaller!r}, or degrees that multiply to {have:,}"
            f"{larger}."
        )


def _describe_calibration(machine: Machine) -> Iterator[str]:
    """Yield a warning if other programs disturbed the measurement of the machine, or if it is older than its parts."""
    calibration = machine.calibration
    if calibration is not None and (warning := calibration.describe_disturbance()):
        yield warning
    if calibration is not None and calibration.steps and not (calibration.overheads or machine.has_gpus):
        yield (
            "this computer was calibrated by an older Fivefold, without the waits and the host's seconds of a step: "
            "predicted steps are too short by about a tenth; repeat `fivefold calibrate`"
        )


def _describe_number_formats(machine: Machine, recipes: Iterable[Recipe]) -> Iterator[str]:
    """Yield a warning for each recipe for whose operands the chip has no matrix units, or slow instructions."""
    chip = machine.chip
    for recipe in dict.fromkeys(recipes):
        used = chip.find_format(recipe.compute)
        lacks_bf16 = recipe.compute == "bf16" and used == "fp32"
        if not machine.has_gpus and chip.peak(recipe.compute) < chip.peak("fp32"):
            rate, fp32_rate = (show_flops(chip.peak(dtype)) for dtype in (recipe.compute, "fp32"))
            yield (
                f"matmuls in {recipe.compute} reach {rate}FLOP/s on a rank of this computer, those in fp32 "
                f"{fp32_rate}FLOP/s: precision fp32 is faster here"
            )
        if not machine.has_gpus or not (recipe.is_low_precision or lacks_bf16):
            continue
        if used != recipe.compute:
            other = "; it has fp16 (--precision fp16)" if lacks_bf16 and "fp16" in chip.peak_flops else ""
            yield (
                f"{chip.name} has no {recipe.compute} matrix units: matmuls of {recipe.name} are predicted at the rate "
                f"of {used}, and software may not run it{other}"
            )
        elif recipe.scaling.startswith("blocks") and not chip.block_scales:
            yield (
                f"the matrix units of {chip.name} do not support the block scales of {recipe.name} (those of B200 and "
                f"MI355X do): matmuls are predicted at the rate of {used}, and software may not run it"
            )


def _describe_attention(machine: Machine, job: Job) -> Iterator[str]:
    """Yield a warning if attention is FlashAttention's on a chip that does not run it, or in fp8 next to 16 bits."""
    generation, kind = machine.chip.generation, job.stack.attention
    if job.stack.attention_facts.materializes_scores or (generation, kind) == ("turing", "flash1"):
        return
    if generation in ("volta", "turing"):
        kernels = "FlashAttention, which needs Turing or" if generation == "volta" else "FlashAttention-2, which needs"
        yield (
            f"{machine.chip.name} runs no {kernels} Ampere; attention is predicted as if it ran, and PyTorch's "
            "memory-efficient attention, which keeps as little, may be slower"
        )
    if job.stack.fp8_attention and not job.precision.is_low_precision:
        yield (
            f"fp8_attention=true changes nothing: precision {job.precision.name} multiplies in 16 bits or more; it "
            "takes effect with matmuls in fp8 or fp4, such as --precision fp8"
        )


def _is_beyond_positions(model: Model, job: Job) -> bool:
    """Tell whether sequences are longer than those for which a model was published. One's own has any number."""
    return model.has_published_weights and model.position == "rope" and job.sequence > model.positions


def describe_positions(model: Model) -> Iterator[str]:
    """Yield what sequences need that are longer than the model's positions."""
    yield (
        f"sequences longer than {model.positions:,} tokens are beyond the model's positions: scale its rotary "
        "embedding, train on longer text"
    )


def _describe_deferred_recompute(layout: Layout) -> Iterator[str]:
    """Yield a remark if weight gradients of recomputed layers run later than their backward."""
    if layout.pipeline.splits_backward and layout.recomputation != "none":
        yield (
            f"{layout.schedule} defers weight gradients (W), which keep recomputed activations until then: "
            f"the memory of ac={layout.ac} is not that of {DEFAULT_SCHEDULE}"
        )


def _describe_padded_adapters(job: Job, layout: Layout) -> Iterator[str]:
    """Yield a remark if ZeRO has more shards than the first factor of an adapter has rows.

    A shard is one row then, which exists or is padding, as in PyTorch's FSDP2 (``FSDPParam._init_sharded_param``).
    """
    shards = layout.shards
    if job.adapter is None or shards <= job.adapter.rank or not (layout.zero == 3 or job.stack.is_own_trainer):
        return
    yield (
        f"the {job.adapter.rank} rows of an adapter's first factor are counted as one for each of {shards} ZeRO "
        f"shards, as FSDP2 pads them, in {shards / job.adapter.rank:.3g} times the bytes; fewer shards, such as "
        f"zero{layout.zero}/{min(8, job.adapter.rank)}, need no padding"
    )


def _describe_unused_pairs(model: Model, job: Job, layout: Layout) -> Iterator[str]:
    """Yield a remark if ``pairs`` is set where it overlaps no messages of experts."""
    if not job.stack.pairs:
        return
    if model.moe is None or layout.ep == 1:
        yield "pairs=true changes nothing: it overlaps messages of expert parallelism, and the layout has ep=1"
    elif "ep" not in job.stack.overlap:
        axes = ",".join((*job.stack.overlap, "ep"))
        yield (
            f"pairs=true changes nothing: messages of ep overlap only if overlap contains ep; add --set overlap={axes}"
        )


def describe_unused_fused_scans(model: Model, job: Job) -> Iterator[str]:
    """Yield a remark if ``fused_scans`` is set where no scan runs other kernels for it."""
    if not job.stack.fused_scans:
        return
    if set(model.non_attention_mixers).isdisjoint(FUSED_SCANS):
        yield f"fused_scans=true changes nothing: model {model.name!r} has no layers of {', '.join(FUSED_SCANS)}"
    elif not job.stack.kernel_facts.separate_adds:
        yield f"fused_scans=true changes nothing: scans of {job.stack.name} are fused anyway"


def _describe_unused_temporary_limit(model: Model, job: Job) -> Iterator[str]:
    """Yield a remark if ``scan_temporary_bytes`` is set to other than a default where no scan has such temporaries."""
    limit = job.stack.scan_temporary_bytes
    if limit in (None, CPU_TEMPORARY_BYTES, GPU_TEMPORARY_BYTES):
        return
    if set(model.non_attention_mixers).isdisjoint(CHUNKED_SCANS):
        yield f"scan_temporary_bytes={limit} changes nothing: model {model.name!r} has no scans"
    elif not any(job.stack.launches_scan(mixer) for mixer in CHUNKED_SCANS if mixer in model.non_attention_mixers):
        yield f"scan_temporary_bytes={limit} changes nothing: the scans of this job are fused kernels"


def _describe_uncounted(model: Model, job: Job) -> Iterator[str]:
    """Yield a warning about each part of training that is not counted."""
    if model.vision is not None and not job.images:
        size = count_vision(model.vision)
        given = "images=1" if model.vision.patches else "images=1 image_tokens=1024"
        yield (
            f"model {model.name!r}: its vision tower ({size / 1e9:.2f} B parameters) is not counted, as the job has no "
            f"images; {given} counts it"
        )
    if model.moe is not None and model.moe.hashed_layers:
        yield (
            f"model {model.name!r}: token ids name the experts of its first {model.moe.hashed_layers} layers, which "
            "count as chosen as evenly as others"
        )
    if model.moe is not None and model.moe.identity_experts:
        moe = model.moe
        yield (
            f"model {model.name!r}: {moe.computed_per_token} of the {moe.topk} experts of a token are counted as "
            f"computed, as if chosen evenly among {moe.experts} and {moe.identity_experts} that give it back; "
            "FLOPs and messages of a run depend on its router"
        )
    if model.moe is not None and job.adapter is not None:
        yield from _describe_frozen_experts(model, job, job.adapter)
    sparse = model.compressed_sparse_attention
    if any(map(model.has_indexer, range(model.layers))) or (sparse is not None and sparse.indexer is not None):
        yield (
            f"model {model.name!r}: the indexer's own loss is not counted (arXiv:2512.02556 §2.1.1, a pass over the "
            "scores of attention); its weights, gradients, optimizer states and choice of keys are counted."
        )


def _describe_quantized_weights(model: Model, adapter: Adapter | None) -> Iterator[str]:
    """Yield a remark if the repository's weights are quantized otherwise than they are counted."""
    quantization, base = model.quantization, adapter and adapter.base
    if not quantization or base == quantization:
        if model.repository.lower().endswith("-unsloth-bnb-4bit") and not model.unquantized:
            yield (
                f"model {model.name!r}: {model.repository} keeps some linear layers in 16 bits, which are counted in "
                "4, as its name does not say which"
            )
        return
    holder = model.repository or "the checkpoint"
    counted = f"as a base in {base}" if base else "in the precision of the job"
    start = f"model {model.name!r}: the weights of {holder} are quantized ({quantization}), and are counted {counted}"
    if quantization not in BASES:
        yield f"{start}, as no base is counted in {quantization}: name a repository in bf16"
    elif adapter is None:
        method = f"lora:16 with adapter.base={quantization}"
        yield f"{start}: convert them to bf16 before training, or train an adapter over them (adapter {method})"
    else:
        yield f"{start}: add adapter.base={quantization} to train over them as they are, or name a repository in bf16"


def _describe_unused_window(model: Model, job: Job) -> Iterator[str]:
    """Yield a remark if no sequence is longer than the model's window."""
    slides = any(map(model.has_window, range(model.layers)))
    if slides and model.window is not None and model.window >= job.sequence:
        yield f"model {model.name!r}: its window of {model.window} tokens does nothing in sequences of {job.sequence}"


def _describe_frozen_experts(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield warnings where adapters of a mixture may be fewer, or its base larger, than a reader expects."""
    names_mlps = not {ALL_LINEAR, "gate_proj", "up_proj", "down_proj"}.isdisjoint(adapter.targets)
    if names_mlps and not adapter.adapts_experts:
        targets = ",".join(adapter.targets)
        others = "peft adds routed experts in most mixtures"
        if job.stack.merges_adapters:
            others = "Megatron-Bridge's linear_fc1 and linear_fc2 are those of routed experts too"
        yield (
            f"model {model.name!r}: adapter.targets={targets} leaves routed experts and their router frozen; adapters "
            f"are only on attention, MLPs and shared experts. {others}; targets of attention mean the same in both"
        )
    if adapter.base in BITSANDBYTES_BASES:
        yield (
            f"model {model.name!r}: routed experts stay in the dtype of activations next to a base in {adapter.base}, "
            "as bitsandbytes quantizes linear layers and transformers stacks experts in one tensor"
        )
