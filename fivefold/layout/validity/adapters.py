"""Adapters: with which models, bases and training software they are modelled."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.adapter import ALL_LINEAR, EMBEDDING, EXPERT_TARGETS, HEAD, MERGED_LINEARS, TARGETS, Adapter
from fivefold.job import Job
from fivefold.layout.validity.fixes import list_present
from fivefold.model.spec import Model
from fivefold.model.weights import (
    find_first_adapted,
    list_adapter_weights,
    list_block_weights,
    list_targets,
    with_adapters,
)


def check_adapters(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
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
    yield from list_present(
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
    yield from list_present(
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
    yield from list_present(
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
    yield from list_present(
        f"adapter.targets={targets} is not modelled with",
        (bool(in_full), f"modules_to_save={','.join(in_full)}, which trains them in full", "one of both"),
        (adapts_embedding and adapter.has_magnitudes, "DoRA of an embedding", "kind=lora, or other targets"),
        (adapts_embedding and job.images > 0, f"images={job.images}", "no images, or other targets"),
        (adapts_head and job.stack.loss_facts.chunked, f"loss={job.stack.loss}", "loss=fused"),
    )


def _check_saved_modules(model: Model, job: Job, adapter: Adapter) -> Iterator[str]:
    """Yield the reasons why modules that are trained in full next to the adapter are not modelled."""
    saved = f"adapter.modules_to_save={','.join(adapter.modules_to_save)}"
    yield from list_present(
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
