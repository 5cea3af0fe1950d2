"""The share of a micro-batch on one rank: sequences, tokens, heads, weights and experts.

rows         = B · T/cp             tokens of attention and matmuls
stream_rows  = rows/tp under sp     tokens of the residual stream, its norms and residual additions; under 2D tensor
               parallelism rows/x, and D/y of the width
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.freeze import ALL, is_frozen
from fivefold.job import SCALED_ELEMENTS, Job
from fivefold.layout.local_weight import pad_vocab
from fivefold.layout.spec import Layout
from fivefold.model.attention import AttentionShape
from fivefold.model.norms import NORMS
from fivefold.model.spec import Model
from fivefold.model.weights import resolve_freeze
from fivefold.planner.counts.operations.op import NormKind
from fivefold.units import ceil_div


class LocalDegrees(NamedTuple):
    """The degrees that shard a layer on a rank; ``recomputed``: operations, as in ``Layout.recomputed_operations``."""

    sequences: int
    cp: int = 1
    ulysses: bool = False
    tp: int = 1
    tp_inner: int = 1  # the y of tp = x·y
    sp: bool = False
    ep: int = 1
    etp: int = 1
    recomputed: frozenset[str] = frozenset()
    piped: bool = False  # a stage of a pipeline
    keeps_linear_inputs: bool = False  # linear layers keep their input even if their weight has no gradient


def get_local_degrees(layout: Layout) -> LocalDegrees:
    """Return the degrees of one rank under ``layout``."""
    return LocalDegrees(
        layout.mbs,
        layout.cp,
        layout.context_parallelism.exchanges_heads,
        layout.tp,
        layout.tp_inner,
        layout.sp and layout.tp > 1,
        layout.ep,
        layout.etp,
        layout.recomputed_operations,
        layout.pp > 1,
    )


class Local:
    """The sizes of a model and a job on one rank; the lists of operations are made from it.

    ``frozen``: modules of the unit whose weights are not trained (``freeze.py``); next to adapters they are all.
    ``unquantized``: linear layers of the unit that a base in few bits has in 16.
    """

    def __init__(
        self,
        model: Model,
        job: Job,
        part: LocalDegrees,
        frozen: frozenset[str] = frozenset(),
        unquantized: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.job, self.part = model, job, part
        self.unquantized = unquantized
        self.frozen = frozen if job.adapter is None else frozenset({ALL})
        self.width, self.facts = get_activation_width(job), job.stack.kernel_facts
        self.norm = NormKind(
            norm=NORMS[model.norm],
            bias=model.norm_bias,
            weight=model.norm_weight,
            fused=self.facts.fused_norms,
            plain=job.stack.kernels == "plain" and not job.stack.is_compiled,  # PyTorch's separate kernels
        )
        self.rows = part.sequences * ceil_div(job.sequence, part.cp)
        self.outer = part.tp // part.tp_inner  # ranks that shard the rows of the stream; tp_inner shards its columns
        self.stream_rows = ceil_div(self.rows, self.outer) if part.sp else self.rows
        self.stream_width = model.width // part.tp_inner
        self.stream_bytes = self.stream_rows * self.stream_width * self.width
        self.autocast_loss = job.precision.autocasts and self.facts.supports_autocast
        # frozen weights, and so the stream, are in the dtype of the activations; only adapters and the loss are cast
        self.autocast = self.autocast_loss and job.adapter is None
        self.has_fp32_stream = self.autocast and has_fp32_stream(model, job)
        several = model.hyper_connections or model.altup
        streams = several.streams if several else 1
        # bytes of a stage's input
        self.entry_bytes = streams * (2 * self.stream_bytes if self.has_fp32_stream else self.stream_bytes)
        # Bytes of a row dispatched to an expert: its elements, and in fp8 an fp32 scale per tile.
        dispatches_fp8 = job.precision.dispatches == "fp8"
        self.row_bytes = model.expert_width * (1 if dispatches_fp8 else self.width)
        self.row_scales_bytes = 4 * ceil_div(model.expert_width, SCALED_ELEMENTS["tiles"]) if dispatches_fp8 else 0
        # Token ids are a view of the step's batch if they are contiguous in it.
        self.ids_bytes = 8 * self.rows if part.sequences > 1 or part.cp > 1 else 0
        self.heads = model.heads // part.tp
        self.vocab = pad_vocab(model, job, tp=part.tp) // part.tp

    def trains(self, name: str) -> bool:
        """Tell whether the weights of an operation of the unit are trained."""
        if self.job.adapter is not None:
            return self.job.adapter.is_saved(name)
        return not is_frozen(name, self.frozen)

    def attention(self, layer: int) -> AttentionShape:
        """Return the geometry of a layer's attention on this rank; fewer key heads than tp are replicated."""
        shape, tp = self.model.attention(layer), self.part.tp
        return shape._replace(heads=shape.heads // tp, kv_heads=max(1, shape.kv_heads // tp))

    def has_16bit_stream(self, layer: int) -> bool:
        """Return True if a layer's stream is in 16 bits under autocast.

        That holds in multi-token prediction modules, where a projection makes the stream.
        """
        return self.autocast and layer >= self.model.layers


def has_fp32_stream(model: Model, job: Job) -> bool:
    """Tell whether autocast leaves the residual stream in fp32: a frozen embedding makes one in 16 bits."""
    freezes_embedding = bool(job.freeze) and not resolve_freeze(model, job.freeze).trains_embedding
    return job.precision.autocasts and job.adapter is None and not freezes_embedding


def get_activation_width(job: Job) -> int:
    """Return the bytes per element of an activation: 4 in fp32, else 2, as fp8 and fp4 exist only inside matmuls."""
    return job.activation_bytes
