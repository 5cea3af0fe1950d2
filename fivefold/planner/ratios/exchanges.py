"""FLOPs of one rank and the bytes it sends at the same time: one function for each message of an axis.

    FLOPs per byte = FLOPs ÷ bytes sent        balance = peak FLOP/s · Σ bytes/bandwidth ÷ Σ bytes

The message overlaps completely if FLOPs per byte ≥ balance. Formulas, letters, sources and worked numbers:
docs/explanation/how-a-step-costs/ratios.md.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod
from typing import NamedTuple

from fivefold.job import SCALED_ELEMENTS, Job
from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model
from fivefold.model.weights import list_block_weights
from fivefold.planner.counts.operations.attention.windows import count_attended_pairs
from fivefold.planner.counts.operations.local_shapes import get_activation_width
from fivefold.units import Dtype


class Transfer(NamedTuple):
    """Bytes that one rank sends within a group whose ranks span ``span`` consecutive ranks."""

    bytes: float
    span: int


class Exchange(NamedTuple):
    """FLOPs that one rank computes in ``dtype`` while it sends ``transfers`` one after the other."""

    flops: float
    transfers: tuple[Transfer, ...]
    dtype: Dtype

    @property
    def flops_per_byte(self) -> float:
        """Return the FLOPs per byte sent."""
        return self.flops / sum(transfer.bytes for transfer in self.transfers)

    def balance(self, machine: Machine) -> float:
        """Return the FLOPs that the machine computes at its peak rate while it sends one byte."""
        seconds = sum(transfer.bytes / machine.link(transfer.span).bandwidth for transfer in self.transfers)
        return machine.chip.peak(self.dtype) * seconds / sum(transfer.bytes for transfer in self.transfers)


class Layer(NamedTuple):
    """The most common kind of layer of a model, unsharded: forward FLOPs per sequence, and elements of weights."""

    flops: int
    attention_flops: int  # scores and values
    expert_flops: int  # of the routed experts
    dense_weights: int
    expert_weights: int


@lru_cache(maxsize=64)
def find_most_common_layer(model: Model, job: Job, *, routed: bool = False) -> Layer:
    """Return the most common layer: 2 FLOPs per token and active matmul weight. Flash attention skips masked pairs.

    ``routed``: the most common one with experts; the model must have some.
    """
    kinds = [
        (model.has_window(layer), model.is_moe(layer), model.mixer_name(layer) == "attention")
        for layer in range(model.layers)
    ]
    layer = kinds.index(Counter(kind for kind in kinds if kind[1] or not routed).most_common(1)[0][0])
    share = model.moe.topk / model.moe.experts if model.moe else 1
    weights = list(list_block_weights(model, layer))
    experts = [weight.shape for weight in weights if weight.kind.startswith("expert")]
    dense = [weight.shape for weight in weights if not weight.kind.startswith("expert")]
    expert_flops = round(2 * job.sequence * share * sum(prod(shape) for shape in experts if len(shape) == 3))
    dense_flops = 2 * job.sequence * sum(prod(shape) for shape in dense if len(shape) == 2)
    causal = not job.stack.attention_facts.materializes_scores
    attends = model.has_attention(layer)
    pairs = count_attended_pairs(model, job, layer=layer, causal=causal) if attends else 0
    shape = model.attention(layer)
    attention = 2 * shape.heads * (shape.head_dim + shape.value_dim) * pairs
    return Layer(
        flops=dense_flops + expert_flops + attention,
        attention_flops=attention,
        expert_flops=expert_flops,
        dense_weights=sum(map(prod, dense)),
        expert_weights=sum(map(prod, experts)),
    )


def build_tensor_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Return the exchange of attention's output projection under tp = x·y.

    Its input is gathered over y, its output scattered over x.
    """
    y, x = layout.tp_inner, layout.tp // layout.tp_inner
    into = model.attention_shapes[0].output_dims
    tokens = _count_tokens(job, layout) / layout.tp
    near = group(layout, "tp").stride
    gathered = Transfer(tokens * into * (y - 1) * get_gathered_width(job), span=near * y)
    scattered = Transfer(tokens * model.width * (x - 1) * get_activation_width(job), span=near * layout.tp)
    return Exchange(tokens * 2 * into * model.width, (gathered, scattered), job.precision.compute)


def build_context_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Return the exchange of context parallelism.

    Ring: one hop of K and V, overlapped with the attention of a chunk. Ulysses: q, k, v and the output, overlapped with
    all of attention.
    """
    n = layout.cp
    shape = model.attention_shapes[0]
    heads, kv_heads = (max(1.0, N / layout.tp) for N in (shape.heads, shape.kv_heads))
    head_bytes = _count_tokens(job, layout) * (shape.head_dim + shape.value_dim) * get_activation_width(job)
    flops = layout.mbs * find_most_common_layer(model, job).attention_flops / (layout.tp * n)
    dtype: Dtype = "bf16" if job.precision.is_low_precision else job.precision.compute  # attention stays in 16 bits
    if layout.context_parallelism.exchanges_heads:
        return Exchange(flops, (_build_transfer(head_bytes * (heads + kv_heads) * (n - 1) / n, layout, "cp"),), dtype)
    return Exchange(flops / n, (_build_transfer(head_bytes * kv_heads, layout, "cp"),), dtype)


def build_zero3_forward_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Gather the next layer's weights while this one runs."""
    return _exchange_weights(model, job, layout, forwards=1, width=get_weight_width(job))


def build_zero3_backward_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Gather the weights again and reduce-scatter the gradients behind a backward, twice the forward's FLOPs."""
    return _exchange_weights(model, job, layout, forwards=2, width=get_weight_width(job) + job.precision.summed_bytes)


def build_last_gradient_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Return the reduction overlapped with the last micro-batch's backward: gradients are complete only then."""
    return _exchange_weights(
        model, job, layout, forwards=2, width=job.precision.summed_bytes * (1 if layout.zero else 2)
    )


def build_step_gradient_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Return all that dp sends in a step against all compute of the step: the most that could ever overlap."""
    second = get_weight_width(job) if layout.zero else job.precision.summed_bytes
    forwards = 3 * layout.micro_batches(job)
    return _exchange_weights(model, job, layout, forwards=forwards, width=job.precision.summed_bytes + second)


def build_expert_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Return both all-to-alls of a layer overlapped with its routed experts; top-k cancels."""
    return _dispatch(model, job, layout, flops=find_most_common_layer(model, job, routed=True).expert_flops)


def build_expert_layer_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Return both all-to-alls overlapped with a full layer of another micro-batch, as DualPipe arranges it."""
    return _dispatch(model, job, layout, flops=find_most_common_layer(model, job, routed=True).flops)


def build_pipeline_exchange(model: Model, job: Job, layout: Layout) -> Exchange:
    """Return the activations of one stage boundary, overlapped with the forward of the layers of one stage."""
    layers = model.layers / (layout.pp * layout.v)
    flops = layout.mbs * find_most_common_layer(model, job).flops * layers / (layout.cp * layout.tp)
    sent = _count_tokens(job, layout) * model.width * get_activation_width(job) / (layout.tp if layout.sp else 1)
    return Exchange(flops, (_build_transfer(sent, layout, "pp"),), job.precision.compute)


def get_gathered_width(job: Job) -> float:
    """Return the bytes per element of a matmul's input in a message, without scales.

    Outputs always have 16 bits or more. torchao sends inputs that have a scale for each row in 16 bits.
    """
    if job.precision.scaling == "rowwise" and not job.stack.kernel_facts.fuses_linears:
        return get_activation_width(job)
    return job.precision.number_format.operand_bits / 8 if job.precision.is_low_precision else get_activation_width(job)


def get_weight_width(job: Job) -> int:
    """Return the bytes per element of a weight in ZeRO's gather."""
    return 1 if job.precision.gathers == "fp8" else job.precision.weights_bytes


def get_row_width(job: Job) -> float:
    """Return the bytes per element of a row dispatched to an expert, in fp8 with its share of a tile's scale."""
    return 1 + 4 / SCALED_ELEMENTS["tiles"] if job.precision.dispatches == "fp8" else get_activation_width(job)


def _count_tokens(job: Job, layout: Layout) -> float:
    """Return the tokens of one micro-batch on one cp rank (msl)."""
    return layout.mbs * job.sequence / layout.cp


def _build_transfer(sent: float, layout: Layout, *axes: str) -> Transfer:
    groups = [group(layout, axis) for axis in axes]
    return Transfer(sent, max(members.ranks * members.stride for members in groups))


def _exchange_weights(model: Model, job: Job, layout: Layout, *, forwards: int, width: int) -> Exchange:
    """Return the messages that gather or reduce a layer's weights, and the FLOPs of the compute that overlaps them.

    The compute is as much as ``forwards`` forward passes of the layer.

    ``width``: bytes per element of a weight.
    """
    layer = find_most_common_layer(model, job)
    expert_degree = layout.ep * layout.etp
    dense = layer.dense_weights / layout.tp * width * (1 - 1 / (layout.dp * layout.cp))
    experts = layer.expert_weights / expert_degree * width * (1 - 1 / layout.expert_replicas)
    transfers = (
        _build_transfer(dense, layout, "shard", "replica"),
        _build_transfer(experts, layout, "expert_shard", "expert_replica"),
    )
    flops = forwards * layout.mbs * layer.flops / (layout.cp * layout.tp)
    return Exchange(flops, transfers, job.precision.compute)


def _dispatch(model: Model, job: Job, layout: Layout, *, flops: int) -> Exchange:
    """Return dispatch and combine of a layer, overlapped with ``flops`` per sequence."""
    assert model.moe is not None
    tokens = _count_tokens(job, layout) / layout.tp
    row = model.moe.topk * model.expert_width * (get_row_width(job) + get_activation_width(job))
    transfer = _build_transfer(tokens * row * (layout.ep - 1) / layout.ep, layout, "ep")
    return Exchange(layout.mbs * flops / (layout.cp * layout.tp), (transfer,), job.precision.compute)
