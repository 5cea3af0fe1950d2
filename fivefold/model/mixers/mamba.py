"""Mamba (arXiv:2312.00752): a state of each channel whose numbers each decay by a rate that depends on the token.

    x, z = project(h)        x ← silu(conv(x))        dt, B, C = select(x)        Δ = softplus(step(dt) + bias)
    S ← exp(−e^a_log · Δ) S + Δ B x        y = C · S + d x        out(y · silu(z))        S, a_log: [inner, state]

Source: transformers 5.23, ``models/mamba/modeling_mamba.py``, ``MambaMixer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from fivefold.bounded_types import HeadDim, Latent, Positive, Width
from fivefold.model.mixers.chunk_groups import count_chunks_of_group, split_into_groups
from fivefold.model.mixers.geometry import MixerGeometry, ShardedUnits, scale_number
from fivefold.model.mixers.short_conv import Taps
from fivefold.model.weight import Weight

CHUNK_TOKENS = 16  # tokens that are computed at once; the state is handed on between chunks


class Mamba(MixerGeometry):
    """The geometry of a Mamba layer: a state [inner, state]."""

    context_parallel = "heads"
    chunk: ClassVar[int] = CHUNK_TOKENS

    inner: Width  # channels, of which each has a state
    state: HeadDim = 16  # numbers of the state of a channel
    rank: Latent  # rank of the projection to the steps of the channels
    taps: Taps = 4  # tokens that the convolution of x reads
    conv_bias: bool = True  # the convolution has a bias
    bias: bool = False  # the projections of the stream have biases
    norms: Literal["none", "unit", "weighted"] = "none"  # RMSNorms of dt, B and C; unit: without weights
    norm_epsilon: Positive | None = None  # epsilon of these norms; None: that of the model

    @property
    def selected_widths(self) -> tuple[int, int, int]:
        """Return the widths of dt, B and C."""
        return self.rank, self.state, self.state

    def get_sharded_units(self, width: int) -> ShardedUnits:
        """Return the channels, each of which has a state."""
        return ShardedUnits("channels", self.inner)

    def shard(self, ranks: int) -> Self:
        """Return the channels of one of ``ranks`` ranks."""
        return self if ranks == 1 else self.replace(inner=self.inner // ranks)

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the channels; the rank of their steps is in proportion to them."""
        return self.replace(inner=scale_number(self.inner, share, multiple=8), rank=scale_number(self.rank, share))

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
        largest = 4 * sequences * CHUNK_TOKENS * self.inner * self.state
        return split_into_groups(tokens, CHUNK_TOKENS, count_chunks_of_group(largest, temporary_bytes))

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        inner = (self.inner,)
        yield Weight("mixer.project.weight", (2 * self.inner, width), "column", parts=inner * 2)
        if self.bias:
            yield Weight("mixer.project.bias", (2 * self.inner,), "bias", parts=inner * 2)
        yield Weight("mixer.conv.weight", (self.inner, self.taps), "conv", parts=inner)
        if self.conv_bias:
            yield Weight("mixer.conv.bias", inner, "bias", parts=inner)
        yield Weight("mixer.select.weight", (sum(self.selected_widths), self.inner), "column")
        if self.norms == "weighted":
            for name, size in zip(("dt", "b", "c"), self.selected_widths, strict=True):
                yield Weight(f"mixer.{name}_norm.weight", (size,), "norm", initial="ones")
        yield Weight("mixer.step.weight", (self.inner, self.rank), "column", parts=inner)
        yield Weight("mixer.step.bias", inner, "bias", initial="steps", parts=inner)
        yield Weight("mixer.a_log", (self.inner, self.state), "vector", initial="log numbers", parts=inner)
        yield Weight("mixer.d", inner, "vector", initial="ones", parts=inner)
        yield Weight("mixer.out.weight", (width, self.inner), "row")
        if self.bias:
            yield Weight("mixer.out.bias", (width,), "bias")
