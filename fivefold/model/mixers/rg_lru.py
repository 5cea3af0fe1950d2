"""RG-LRU (Griffin, arXiv:2402.19427 §2.4): a state of one number for each channel, which decays by a gated rate.

    x, y = project(h)        x ← conv(x)        i = σ(x W_i + b_i)        r = σ(x W_r + b_r)        W: block-diagonal
    ln a = −8 r · softplus(rate)        S ← a S + √(1 − a²) i x        out(S · act(y))

A sequence begins with S = i x. Source: transformers 5.23, ``models/recurrent_gemma/modeling_recurrent_gemma.py``,
``RecurrentGemmaRecurrentBlock``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from pydantic import model_validator

from fivefold.bounded_types import Heads, Width
from fivefold.model.mixers.chunk_groups import count_chunks_of_group, split_into_groups
from fivefold.model.mixers.geometry import MixerGeometry, ShardedUnits, scale_number
from fivefold.model.mixers.short_conv import Taps
from fivefold.model.weight import Weight

CHUNK_TOKENS = 64  # tokens that are computed at once; the state is handed on between chunks


def split_tokens(tokens: int, *, sequences: int, channels: int, temporary_bytes: int) -> list[int]:
    """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
    chunks = count_chunks_of_group(4 * sequences * CHUNK_TOKENS * channels, temporary_bytes)
    return split_into_groups(tokens, CHUNK_TOKENS, chunks)


class RGLRU(MixerGeometry):
    """The geometry of an RG-LRU layer: a state [inner], and gates of ``blocks`` square matrices each."""

    context_parallel = "heads"
    chunk: ClassVar[int] = CHUNK_TOKENS

    inner: Width  # channels, of which each has a state
    blocks: Heads  # square matrices on the diagonal of each gate
    taps: Taps = 4  # tokens that the convolution of x reads

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.inner % self.blocks:
            raise ValueError(f"inner={self.inner} is not divisible by blocks={self.blocks}")
        return self

    @property
    def block_width(self) -> int:
        """Return the channels of a block."""
        return self.inner // self.blocks

    def get_sharded_units(self, width: int) -> ShardedUnits:
        """Return the blocks of the gates, each with its channels."""
        return ShardedUnits("blocks", self.blocks)

    def shard(self, ranks: int) -> Self:
        """Return the blocks of one of ``ranks`` ranks."""
        return self if ranks == 1 else self.replace(inner=self.inner // ranks, blocks=self.blocks // ranks)

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the blocks."""
        blocks = scale_number(self.blocks, share)
        return self.replace(blocks=blocks, inner=self.block_width * blocks)

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
        return split_tokens(tokens, sequences=sequences, channels=self.inner, temporary_bytes=temporary_bytes)

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        inner, blocks = (self.inner,), (self.blocks,)
        for name in ("x", "y"):
            yield Weight(f"mixer.{name}.weight", (self.inner, width), "column", parts=inner)
            yield Weight(f"mixer.{name}.bias", inner, "bias", parts=inner)
        yield Weight("mixer.conv.weight", (self.inner, self.taps), "conv", parts=inner)
        yield Weight("mixer.conv.bias", inner, "bias", parts=inner)
        for name in ("input_gate", "rate_gate"):
            matrices = (self.blocks, self.block_width, self.block_width)
            yield Weight(f"mixer.{name}.weight", matrices, "blocks", parts=blocks)
            yield Weight(f"mixer.{name}.bias", (self.blocks, self.block_width), "bias", parts=blocks)
        yield Weight("mixer.rate", inner, "vector", initial="decays", parts=inner)
        yield Weight("mixer.out.weight", (width, self.inner), "row")
        yield Weight("mixer.out.bias", (width,), "bias")
