"""Sharding rules: how tp, ep and etp shard each weight, how ZeRO shards the result, and what each ZeRO stage keeps.

ZeRO splits every weight along dim 0 into equal chunks of rows, one per shard; the last ones may be short or empty and
are padded in messages. Weights are gathered in *units*: the embedding, each block, the head with its norm.
Source: ZeRO, arXiv:1910.02054. The planner counts bytes by these rules, and the trainer shards tensors by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from fivefold.adapter import EMBEDDING
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.activations import ACTIVATIONS
from fivefold.model.spec import Model
from fivefold.model.vision_weights import is_connector, is_vision, shape_encoder
from fivefold.model.weight import is_gemm_weight, is_quantized
from fivefold.model.weights import (
    Weight,
    list_block_weights,
    list_embedding_factors,
    list_embedding_weights,
    list_head_factors,
    list_head_weights,
    mark_frozen,
    resolve_freeze,
    with_adapters,
)
from fivefold.units import ceil_div


class FsdpUnit(NamedTuple):
    """An FSDP unit: weights gathered and reduced in one message. ``weights`` have their full names."""

    name: str
    weights: tuple[Weight, ...]


def list_units(model: Model, job: Job) -> list[FsdpUnit]:
    """Return the units of the full model in the order of the forward pass, with the weights of the job's adapter."""
    frozen = resolve_freeze(model, job.freeze)

    def block(layer: int) -> Iterable[Weight]:
        every = mark_frozen(list_block_weights(model, layer), frozen.blocks[layer])
        merged = job.stack.merges_adapters
        return every if job.adapter is None else with_adapters(model, every, job.adapter, merged=merged)

    blocks = [
        FsdpUnit(
            f"blocks.{layer}",
            tuple(weight._replace(name=f"blocks.{layer}.{weight.name}") for weight in block(layer)),
        )
        for layer in range(model.layers)
    ]
    embedding = *mark_frozen(list_embedding_weights(model), frozen.ends), *list_embedding_factors(model, job.adapter)
    head = *mark_frozen(list_head_weights(model), frozen.ends), *list_head_factors(model, job.adapter)
    return [FsdpUnit("embed", embedding), *blocks, FsdpUnit("head", head)]


class Policy(NamedTuple):
    """The full tensors of a unit that a ZeRO stage keeps between its uses, and where its gradients go.

    Over how many ranks it shards is ``Layout.shards``.
    """

    weights_stay: bool  # gathered weights are kept from step to step, else only while the unit computes
    gradients_stay: bool  # full gradients are kept until the update, else only until the unit is reduced
    runs_alone: bool = False  # ZeRO runs on the only data-parallel rank, which is the one shard
    computes_with_shard: bool = False  # that rank's shards are the weights
    host_gradients: Literal["", "buckets", "shards"] = ""  # leave for host memory with their bucket, or as a shard


# By ZeRO stage. From stage 1 on the optimizer states are sharded.
POLICIES = {0: Policy(True, True), 1: Policy(True, True), 2: Policy(True, False), 3: Policy(False, False)}


def get_policy(layout: Layout, job: Job) -> Policy:
    """Return the policy of the layout's ZeRO stage; that of stage 0 if there is only one shard, which nothing offloads.

    Stage 2 has the policy of stage 3 where the stack keeps only shards from step to step. On one rank DeepSpeed runs
    every stage (deepspeedai/DeepSpeed@0.19.8:deepspeed/runtime/engine.py, _configure_zero_optimizer), whose stage 3
    computes with its shards (zero/partition_parameters.py, NoGatherCoalescedHandle), and FSDP2 copies weights from host
    memory one by one (pytorch/pytorch@v2.13.0:torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py,
    wait_for_unshard). With the optimizer there, gradients leave DeepSpeed's stages 1 and 2 once their bucket is reduced
    (zero/stage_1_and_2.py, copy_grads_in_partition), and are accumulated there after each reduction of stage 3
    (zero/stage3.py, grad_partitions_flat_buffer).
    """
    stack, zero, offloaded = job.stack, layout.zero, layout.list_offloaded(job)
    runs_alone = zero > 0 and layout.dp * layout.cp == 1
    if stack.offloads_with_parameters:
        runs_alone &= zero == 3 and "parameters" in offloaded
    if layout.shards == 1 and not runs_alone:
        return POLICIES[0]
    if "optimizer" in offloaded and stack.reduce_bucket > 0 and not stack.offloads_with_parameters and zero < 3:
        # stage 1 too, unless it sums gradients of several micro-batches on the device
        policy = POLICIES[2 if layout.micro_batches(job) == 1 else zero]
        return policy._replace(runs_alone=runs_alone, host_gradients="buckets")
    frees_weights = zero == 2 and layout.pp == 1 and stack.zero2_shards == "separate"
    policy = POLICIES[3 if frees_weights else zero]
    if policy.weights_stay:
        return policy._replace(runs_alone=runs_alone)
    leaves = stack.zero3_gather == "weights" and "optimizer" in offloaded
    computes_with_shard = runs_alone and "parameters" not in offloaded
    return Policy(False, False, runs_alone, computes_with_shard, "shards" if leaves else "")


def reduces_every_micro_batch(layout: Layout, job: Job) -> bool:
    """Tell whether gradients are reduced to their shards after the backward of every micro-batch, not once per step.

    False if there is one micro-batch, and under ZeRO-0 and -1, where full gradients stay until the update.
    """
    every_micro_batch = job.stack.reduce == "micro_batch" or (job.stack.reduce == "unpipelined" and layout.pp == 1)
    return every_micro_batch and layout.micro_batches(job) > 1 and not get_policy(layout, job).gradients_stay


def gathers_for_backward(layout: Layout, job: Job) -> bool:
    """Tell whether gathered weights are freed after a forward and gathered again for its backward."""
    return not get_policy(layout, job).weights_stay and layout.zero == 3 and job.stack.reshard == "forward"


def joins_ends(layout: Layout, job: Job) -> bool:
    """Tell whether embedding and head are one unit, gathered and reduced in one message."""
    return job.stack.backward_all_gather == "root" and layout.pp == 1


def needs_backward_gather(name: object, layout: Layout, job: Job) -> bool:
    """Tell whether the weights of a unit are gathered again for its backward.

    Those of the head are not, as they are still gathered.
    """
    gathers_embedding = holds_embedding(job) and not joins_ends(layout, job)
    return name != "head" and (name != "embed" or gathers_embedding) and gathers_for_backward(layout, job)


def holds_embedding(job: Job) -> bool:
    """Tell whether the embedding is gathered in its backward: that of its adapter reads B, and of some stacks each.

    That of a trained table does not need its weights.
    """
    is_read = job.adapter is not None and EMBEDDING in job.adapter.adapted_ends
    return is_read or job.stack.backward_all_gather != "needed"


def regathers_vision(layout: Layout, job: Job) -> bool:
    """Tell whether the weights of a vision tower are gathered again for its backward, which multiplies by them."""
    is_trained_part = job.images > 0 and job.adapter is None and not job.freeze_projector
    return is_trained_part and not joins_ends(layout, job) and gathers_for_backward(layout, job)


def count_chunk_rows(rows: int, *, shards: int) -> int:
    """Return the rows of one ZeRO shard, with padding."""
    return ceil_div(rows, shards)


def shard_weight(weight: Weight, *, model: Model, layout: Layout, vocab: int) -> Weight:
    """Return a weight with its shape on one rank of tp, ep and etp, before ZeRO. ``vocab``: padded vocabulary size.

    - column layers, norms before row layers and vocabulary: rows over tp (copies, if there are fewer kv heads than tp
      ranks)
    - row layers: columns over tp
    - token mixers other than attention: each of ``weight.parts`` over tp
    - experts: over ep, their ffn dim over etp
    - norms, router, latent down-projections, the projection of multi-token prediction and biases of row layers:
      replicated
    """
    name, shape, tp = weight.name, weight.shape, layout.tp
    if is_vision(weight) and model.vision is not None:
        model = shape_encoder(model.vision)
    if layout.tp_inner > 1:
        return weight._replace(shape=_shard_2d(weight, layout, vocab=vocab, heads=model.kv_heads))
    if weight.kind.startswith("expert"):
        local_experts = ceil_div(shape[0], layout.ep)
        if weight.kind == "expert_column":
            return weight._replace(shape=(local_experts, shape[1] // layout.etp, *shape[2:]))
        return weight._replace(shape=(local_experts, *shape[1:-1], shape[-1] // (layout.etp if len(shape) == 3 else 1)))
    if name.startswith(("embed.tokens", "head.out")):
        has_rows = not weight.is_adapter or weight.kind == "column"
        return weight._replace(shape=(vocab // tp, *shape[1:])) if has_rows else weight
    if weight.parts:
        return weight._replace(shape=(shape[0] // tp, *shape[1:]))
    if weight.kind == "row" or name.endswith(READS_CHANNELS):
        return weight._replace(shape=(shape[0], shape[1] // tp))
    is_full_norm = model.qk_norm in ("full", "heads") and name.endswith(HEAD_NORMS) and model.mla is None
    is_full_norm = is_full_norm or name.endswith(SUB_NORMS)
    is_sharded = weight.kind in ("column", "vector", "bias") and not any(part in name for part in WHOLE)
    if is_sharded or is_full_norm:
        if tp > model.kv_heads and any(part in name for part in ("attention.k.", "attention.v.", "k_norm")):
            return weight._replace(shape=(shape[0] // model.kv_heads, *shape[1:]))
        return weight._replace(shape=(shape[0] // tp, *shape[1:]))
    return weight


def _shard_2d(weight: Weight, layout: Layout, *, vocab: int, heads: int) -> tuple[int, ...]:
    """Return the shape of a dense weight under 2D tensor parallelism, tp = x·y; ``heads``: number of key heads.

    Outputs of column layers and inputs of row layers are sharded over x, the width of the residual stream over y (2D
    weight-stationary: arXiv:2211.05102 §3.2.2).
    """
    outer, inner, (first, *rest) = layout.tp // layout.tp_inner, layout.tp_inner, weight.shape
    if weight.name.startswith(("embed.tokens", "head.out.weight")):
        return (vocab // outer, rest[0] // inner)
    if weight.name.startswith("head.out"):
        return (vocab // layout.tp,)
    if weight.kind == "row":
        return (first // inner, rest[0] // outer)
    if weight.name.endswith(HEAD_NORMS):
        return weight.shape
    if weight.kind == "column" and rest:
        return (first // outer, rest[0] // inner)
    if weight.kind == "norm" or any(part in weight.name for part in WHOLE):
        return (*weight.shape[:-1], weight.shape[-1] // inner)
    is_replicated = layout.tp > heads and weight.name.endswith(KEYS)  # the inner ranks share one key head
    return (first // (outer if is_replicated else layout.tp),)


WHOLE = (
    "q_down",
    "kv_down",
    "moe.latent_",
    "attention.out.bias",
    "mixer.out.bias",
    "mixer.decay_down",
    "mixer.gate_down",
    "down.bias",
    "embed.positions",
    "project.weight",
)  # replicated over tp; biases of row layers are added once


def find_extra_reduce_axis(weight: Weight, *, model: Model, layout: Layout) -> Literal["", "tp", "kv", "tp_outer"]:
    """Return the axis over which gradients of a replicated weight are all_reduced, besides data parallelism; "": none.

    - tp: every tp rank holds the weight, but sees only its rows (under sp) or, for per-head norms, its heads
    - kv: the tp ranks that hold the same kv head see different queries
    - an adapter's weight that is not sharded: tp
    """
    if layout.tp == 1 or weight.kind.startswith("expert") or is_vision(weight):  # a tower has no sequence parallelism
        return ""
    if layout.tp_inner > 1:
        if weight.name.endswith(HEAD_NORMS):
            return "tp"
        return "tp_outer" if weight.kind == "norm" or any(part in weight.name for part in WHOLE) else ""
    if weight.name.endswith(SUB_NORMS):
        return ""
    if weight.parts:
        return ""
    if weight.name.endswith((READS_CHANNELS, *NORMS_OF_SELECTED)):  # their inputs or outputs are summed over tp
        return ""
    if any(module in weight.name for module in READ_BY_HEADS):
        return "tp"
    is_replicated = weight.kind in ("norm", "router") or any(part in weight.name for part in WHOLE)
    if weight.kind == "lora" and not is_replicated:  # A sees gradients of this rank's columns, B and m products of rows
        return "tp"
    if weight.name.rpartition(".")[2] in ACTIVATIONS[model.activation].parameters:  # sees this rank's columns
        return "tp"
    norms_all_heads = model.qk_norm in ("full", "heads")
    is_key = weight.name.endswith(KEYS) or (norms_all_heads and "attention.k_norm" in weight.name)
    if model.mla is None and is_key and layout.tp > model.kv_heads:
        return "kv"
    if model.mla is None and weight.name.endswith(HEAD_NORMS):
        return "" if norms_all_heads else "tp"
    return "tp" if is_replicated and layout.sp else ""


# modules of token mixers that every rank holds, with their adapters: a norm of each head, and latents from which each
# rank makes its heads
READ_BY_HEADS = ("mixer.norm.", "mixer.decay_down.", "mixer.gate_down.")
READS_CHANNELS = "mixer.select.weight"  # a matrix whose inputs are the channels of a Mamba
NORMS_OF_SELECTED = tuple(f"mixer.{part}_norm.weight" for part in ("dt", "b", "c"))
KEYS = tuple(f"attention.{part}.{leaf}" for part in "kv" for leaf in ("weight", "bias", "lora_b", "lora_magnitude"))
HEAD_NORMS = tuple(f"attention.{part}_norm.{leaf}" for part in "qk" for leaf in ("weight", "bias"))
SUB_NORMS = tuple(f"{norm}.{leaf}" for norm in ("attention.out_norm", "mlp.norm") for leaf in ("weight", "bias"))


def shard_numel(weight: Weight, *, shards: int) -> int:
    """Return the elements of one ZeRO shard, with padding: those of the first rank, the largest.

    Stacked experts are split by rows, also within one expert.
    """
    rows = weight.shape[0] * (weight.shape[1] if len(weight.shape) == 3 else 1)
    return count_chunk_rows(rows, shards=shards) * (weight.numel // rows)


def count_padded_numel(unit: FsdpUnit, *, shards: int) -> int:
    """Return the elements of a gathered unit, with padding: ``shards`` equal chunks of every weight."""
    return sum(shard_numel(weight, shards=shards) for weight in unit.weights) * shards


def select_trained(unit: FsdpUnit, job: Job) -> FsdpUnit:
    """Return the unit with its trained weights only: all but what is frozen, or those of adapters."""
    if not job.freezes_weights:
        return unit
    return unit._replace(weights=tuple(weight for weight in unit.weights if is_trained(weight, job)))


def is_trained(weight: Weight, job: Job) -> bool:
    """Tell whether a weight is trained: not one next to an adapter, nor one of a frozen part, tower or projector.

    Next to an adapter, modules may be trained in full (``Adapter.modules_to_save``).
    """
    if job.adapter is not None:
        return weight.is_adapter or job.adapter.is_saved(weight.name)
    if is_vision(weight):
        return not (job.freeze_projector if is_connector(weight) else job.freeze_vision_tower)
    return not weight.frozen


def trains_saved_modules(unit: FsdpUnit, job: Job) -> bool:
    """Tell whether the unit's trained weights are of modules that are trained in full next to an adapter."""
    return job.adapter is not None and any(job.adapter.is_saved(weight.name) for weight in unit.weights)


class FrozenBytes(NamedTuple):
    """Bytes of frozen weights on one rank: gathered, its shard of them, and what is never sharded (scales)."""

    gathered: int
    shard: int
    scales: int


def count_frozen_bytes(
    unit: FsdpUnit, *, shards: int, job: Job, full_numels: Mapping[str, int] | None = None
) -> FrozenBytes:
    """Return the bytes of a unit's frozen weights as they are stored; ``shards``: number of ZeRO-3 shards, else 1.

    ``full_numels``: the elements by name of weights of which ``unit`` has the slices of one rank of tp.
    """
    gathered = shard = scales = 0
    base = job.base_format
    if not job.freezes_weights:
        return FrozenBytes(0, 0, 0)
    # peft trains copies of the modules that are trained in full, and keeps the modules themselves
    copies_saved = job.adapter is not None and not job.stack.kernel_facts.fuses_linears
    for weight in unit.weights:
        if is_trained(weight, job) and (weight.is_adapter or not copies_saved):
            continue
        elements = shard_numel(weight, shards=shards)
        if base is not None and is_quantized(weight, base):
            elements_bytes = base.count_element_bytes(elements)
            scales += base.count_scale_bytes(*weight.shape)
            if full_numels is not None and job.stack.kernel_facts.fuses_linears:
                scales += base.count_outer_scale_bytes(full_numels[weight.name])
                scales -= base.count_outer_scale_bytes(weight.numel)  # the trainer keeps those of the full weight
            if not job.stack.kernel_facts.fused_dequantization:
                scales += base.codebook_bytes
        else:
            held_in_fp8 = job.precision.weights_bytes == 1 and is_gemm_weight(weight)  # by the recipe (fp8-param)
            elements_bytes = elements if held_in_fp8 else elements * job.activation_bytes
        gathered = gathered + shards * elements_bytes
        shard = shard + elements_bytes
    return FrozenBytes(gathered, shard, scales)
