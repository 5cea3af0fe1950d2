"""Whether model, job and machine fit one another, under any layout."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity.fixes import list_present
from fivefold.layout.validity.frozen import check_frozen_job, check_stored_weights
from fivefold.layout.validity.vision import list_vision_mismatches
from fivefold.machine.spec import Machine
from fivefold.model.mixers.compressed_attention import CompressedAttention
from fivefold.model.spec import Model


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
    yield from list_vision_mismatches(model, job)
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
    yield from check_stored_weights(model, job)
    yield from check_frozen_job(model, job)
    if job.objective == "dpo":
        yield from list_present(
            "objective=dpo is not modelled with",
            (model.moe is not None, f"experts of {model.name}", "a dense model"),
            (job.precision.is_low_precision, f"precision {job.precision.name}", "bf16"),
            (job.stack.loss_facts.chunked, "a loss in chunks", "loss=fused"),
        )


def check_preferences(layout: Layout, *, model: Model, job: Job) -> Iterator[str]:
    """Yield the reasons why preference optimization (DPO) is not modelled with this layout, model or job."""
    if job.objective != "dpo":
        return
    if layout.mbs % job.min_micro_batch:
        yield f"mbs={layout.mbs} splits a pair of objective=dpo, which is two sequences; try mbs{layout.mbs + 1}"
