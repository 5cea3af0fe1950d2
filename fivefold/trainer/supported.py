"""Checks if the trainer can run a planned job; if not, an error of one line is raised before a process starts."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.base_format import BaseFormat
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.schedule.pipeline_schedule import list_pairing_names
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weight import is_quantized
from fivefold.model.weights import list_block_weights
from fivefold.optimizers.cost import find_cost
from fivefold.stack.kernel_facts import ATTENTIONS, LOSSES, AttentionFacts, LossFacts
from fivefold.trainer.model.precision import check_trainable
from fivefold.trainer.supported_models import list_unsupported

# Fields of the stack that the planner can vary, as other software does, and the one value that the trainer supports.
ENGINE_BEHAVIOUR = {
    "merged_projections": False, "merged_adapters": "none", "wgrad_accumulation": "separate",
    "recv_buffers": "freed", "flat_copies": (), "zero2_shards": "view", "zero3_gather": "units", "reduce_bucket": 0,
    "reduced_gradients": "summed", "ddp_bucket_size": (0, 0), "comm_buffers": "freed", "tp_buffers": "in_place",
    "deferred_wgrad": "operands", "dispatcher": "all_to_all", "scatter_gather_tensors": False,
    "token_permutation": "fused", "transposes_attention": False, "input_grad_all_reduces": (1, 1),
    "rope": "fused", "low_precision_saved": (), "fp8_attention": False, "extra_kernels": (0, 0),
    "update_kernels": 0, "flat_shards": False, "update_group_size": 0, "linears": "fused_backward",
    "reduce_dtype": "summed", "backward_all_gather": "needed", "replicated_grad_reduce": "unit",
    "stage_outputs": "freed", "param_all_gather": "overlapped", "early_stop": True, "async_tp": False,
    "run_ahead": False, "cuda_graphs": "none", "p2p_overlap": "any", "second_communicators": (),
}  # fmt: skip

KERNELS = ("fused", "triton", "compiled", "eager")


def check_supported(layout: Layout, job: Job, *, model: Model) -> None:
    """Raise a ``UserError`` of one line for an axis, a kernel or an operation that the trainer does not support."""
    if layout.tp_inner > 1:
        flat = layout.replace(tp_inner=1)
        raise UserError(
            f"layout {str(layout)!r}: the trainer shards tensors over one axis, as a second one saves 10 to 13 % of "
            f"tp's communication and 3 % of a step; `predict` counts both; try {str(flat)!r}"
        )
    if job.images:
        raise UserError(
            f"images={job.images}: the trainer trains only the text model; leave images out; `predict` estimates the "
            "tower"
        )
    _check_frozen(layout, job, model=model)
    if job.objective == "dpo" and job.stack.is_compiled:
        raise UserError("objective=dpo: the trainer does not run compiled blocks with it; use compile=false")
    if not job.stack.is_own_trainer:
        raise UserError(
            f"job: the trainer is fivefold's own and does not run as {job.stack.name}; use stack fivefold "
            "(--stack fivefold); `predict` estimates it as it is"
        )
    for field, ours in ENGINE_BEHAVIOUR.items():
        if getattr(job.stack, field) != ours:
            raise UserError(
                f"job: the trainer supports {field}={ours}, not {getattr(job.stack, field)}; use that (`predict` "
                "estimates both)"
            )
    if job.stack.kernels not in KERNELS:
        raise UserError(
            f"job: the trainer supports kernels={', '.join(KERNELS)}, not {job.stack.kernels}; use one of them"
        )
    _check_offload(layout, job)
    _check_trained("loss", job.stack.loss, LOSSES)
    _check_attention(layout, job, model=model)
    if job.stack.pairs and not layout.pipeline.pairs_passes:
        raise UserError(
            f"layout {str(layout)!r}: pairs=true overlaps a forward with a backward, for which it needs the schedule "
            f"{list_pairing_names()}; use it, or leave pairs out"
        )
    normed_head = model.final_norm and model.norm_weight
    if model.tied_embeddings and not normed_head and not model.head_bias and layout.zero == 3 and layout.shards > 1:
        raise UserError(
            f"layout {str(layout)!r}: the trainer does not shard a tied head without weights of its own; use zero2; "
            "`predict` estimates it"
        )
    if model.embedding_norm == "weighted" and model.norm_weight and layout.zero == 3 and layout.shards > 1:
        raise UserError(
            f"layout {str(layout)!r}: the trainer does not shard the weights of a norm after the embedding, because "
            "its backward reads them; use zero2; `predict` estimates it"
        )
    if model.per_layer_inputs is not None and layout.zero == 3 and layout.shards > 1:
        raise UserError(
            f"layout {str(layout)!r}: the trainer does not shard the matrices of an embedding that makes per-layer "
            "inputs, because its backward reads them; use zero2; `predict` estimates it"
        )
    check_trainable(job.precision)
    _check_moments(job)
    _check_model(model)
    _check_chosen_keys(job, model=model)


def _check_offload(layout: Layout, job: Job) -> None:
    """Raise a ``UserError`` for what the trainer does not keep in host memory."""
    offloaded = layout.list_offloaded(job)
    if offloaded - {"optimizer"}:
        raise UserError(
            f"offload={'+'.join(sorted(offloaded, reverse=True))}: the trainer keeps only the optimizer in host "
            "memory; use offload=optimizer, or train with DeepSpeed or FSDP2; `predict` estimates both"
        )
    if not offloaded:
        return
    if not find_cost(job.optimizer.kind).elementwise:
        raise UserError(
            f"offload=optimizer: {job.optimizer.kind} sends messages in its update, of which tensors in host "
            "memory cannot be part; use adamw, adamw8bit or sgd, or drop offload"
        )
    if job.precision.gathers == "fp8":
        raise UserError(
            f"offload=optimizer: precision {job.precision.name!r} gathers weights in fp8, which the trainer casts from "
            "what the optimizer updates on the device; use bf16, or fp8 with gathers in 16 bits, or drop offload"
        )


FROZEN_RECOMPUTES = frozenset({"layer", "core", "norm", "act"})  # what may be recomputed with frozen weights


def _check_frozen(layout: Layout, job: Job, *, model: Model) -> None:
    """Raise a ``UserError`` for an adapter or frozen parts that are planned and not trained."""
    adapter = job.adapter
    recomputed = layout.recomputed_operations - FROZEN_RECOMPUTES
    if not job.freezes_text:
        return
    base = job.base_format
    for is_present, feature, fix in (
        (
            base is not None and base.bits == 4 and _has_odd_rows(model, base),
            f"a base in {base.name if base else ''} of {model.name}, which has a matrix with an odd number of "
            "columns, two in a byte",
            "a base in 16 bits",
        ),
        (
            adapter is not None and bool(adapter.adapted_ends) and model.tied_embeddings,
            f"adapters of embedding or head of {model.name}, which are one weight, and would be two once merged",
            "targets of the blocks",
        ),
        (
            adapter is not None and adapter.has_magnitudes and adapter.dropout > 0,
            "DoRA with dropout, which drops the input of the frozen product too",
            "adapter.dropout=0",
        ),
        (
            bool(job.freeze) and job.stack.reshard == "backward",
            "frozen layers whose weights stay gathered until the backward (reshard=backward)",
            "reshard=forward",
        ),
        (
            model.moe is not None and model.moe.joins_mlp,
            f"experts next to an MLP of {model.name}",
            "a model without them",
        ),
        (
            model.moe is not None and model.moe.hashed_layers > 0,
            f"experts that token ids name, which {model.name} has",
            "a model without them",
        ),
        (
            model.dynamic_mask is not None or model.residual_weights,
            f"masks from values or factors of the stream, which {model.name} has",
            "a model without them",
        ),
        (model.differential, f"differential attention of {model.name}", "a model without it"),
        (job.stack.is_compiled, "compiled blocks", "compile=false"),
        (job.precision.number_format.rounds_operands, f"precision {job.precision.compute}", "fp32 or bf16"),
        (bool(recomputed), f"ac={'+'.join(sorted(recomputed))}", "ac=full, selective, norm or act"),
    ):
        if is_present:
            what = "freeze" if adapter is None else "adapter"
            raise UserError(f"{what}: the trainer does not train {feature} yet; use {fix}; `predict` estimates both")


def _has_odd_rows(model: Model, base: BaseFormat) -> bool:
    """Tell whether a weight of a block that a base quantizes has an odd number of columns."""
    weights = {weight for layer in range(model.layers) for weight in list_block_weights(model, layer)}
    return any(weight.shape[-1] % 2 for weight in weights if is_quantized(weight, base))


def _check_trained(field: str, kind: str, facts_by_kind: Mapping[str, LossFacts | AttentionFacts]) -> None:
    """Raise ``UserError`` for a kind of loss or attention that the trainer does not have."""
    if not facts_by_kind[kind].trains:
        trained = " or ".join(name for name, facts in facts_by_kind.items() if facts.trains)
        raise UserError(f"job: the trainer supports {field}={trained}, not {kind}; use one of them")


def _check_attention(layout: Layout, job: Job, *, model: Model) -> None:
    """Raise ``UserError`` for an attention kernel that the trainer does not have for this model or layout."""
    _check_trained("attention", job.stack.attention, ATTENTIONS)
    _check_chunks(layout, job, model=model)
    if layout.uses_ring and model.position == "alibi":
        raise UserError(f"layout {str(layout)!r}: ring attention does not support position='alibi'; use cp=ulysses")
    if not job.stack.attention_facts.materializes_scores:
        return
    if layout.uses_ring:
        raise UserError(
            f"layout {str(layout)!r}: ring attention needs flash attention; with attention='unfused' use cp=ulysses"
        )
    has_sinks = any(shape.sinks for shape in model.attention_shapes)
    for field, is_given in (
        ("attention_softcap", bool(model.attention_softcap)),
        ("attention_sinks", has_sinks),
        ("position='alibi'", model.position == "alibi"),
    ):
        if is_given:
            raise UserError(f"model {model.name!r}: unfused attention does not support {field}; use attention='flash'")


def _check_chunks(layout: Layout, job: Job, *, model: Model) -> None:
    """Raise a ``UserError`` if attention in chunks, shorter than the sequences, cannot be computed."""
    chunk = model.window or job.sequence
    slides = any(model.has_window(layer) for layer in range(model.layers + model.mtp_depth))
    if model.window_kind != "chunks" or not slides or chunk >= job.sequence:
        return
    if job.sequence % chunk:
        raise UserError(
            f"job: sequences of {job.sequence} tokens are not a multiple of the {chunk}-token attention chunks of "
            "model "
            f"{model.name!r}; use --seq {job.sequence // chunk * chunk} or {-(-job.sequence // chunk) * chunk}"
        )
    if layout.uses_ring:
        raise UserError(
            f"layout {str(layout)!r}: ring attention does not support chunks of {chunk} tokens; use cp=ulysses"
        )
    if job.stack.attention_facts.materializes_scores:
        raise UserError(f"model {model.name!r}: unfused attention does not support chunks; use attention='flash'")


def _check_chosen_keys(job: Job, *, model: Model) -> None:
    """Raise a ``UserError`` for what is not trained with an indexer."""
    if model.mla is None or model.mla.indexer is None:
        return
    if job.precision.holds_casts:
        raise UserError(
            f"precision {job.precision.name!r}: the trainer does not absorb weights that are stored in fp8 into the "
            f"queries of {model.name}, whose indexer chooses keys; use bf16 or fp8; `predict` estimates both"
        )
    if not model.mla.indexer.pattern:
        return
    if model.mtp is not None:
        raise UserError(
            f"model {model.name!r}: the trainer does not support mla.indexer.pattern with mtp yet; leave one out; "
            "`predict` estimates both"
        )


def _check_moments(job: Job) -> None:
    """Raise ``UserError`` for an optimizer that keeps its states in fp32 under a recipe with moments of fewer bytes."""
    sizes = job.precision.moments_bytes
    if sizes != (4, 4) and find_cost(job.optimizer.kind).fp32_states:
        raise UserError(
            f"precision {job.precision.name!r}: its moments of {sizes[0]} + {sizes[1]} bytes are AdamW's, and "
            f"{job.optimizer.kind} keeps fp32; use optimizer adamw, or another recipe"
        )


def _check_model(model: Model) -> None:
    """Raise a ``UserError`` for a model with an operation that the trainer does not support."""
    for unsupported, advice in list_unsupported(model):
        raise UserError(f"model {model.name!r}: the trainer does not support {unsupported}; {advice}")
