"""The time mixing of RWKV-4 (arXiv:2305.13048 §3.1): an average of values, weighted by keys and age.

    k, v, r = key(m_k h + (1 − m_k) h₋), value(…), receptance(…)        h₋: of the token before
    o = Σ e^(k_s − (t − 1 − s) w) v_s + e^(u + k_t) v_t, over the sum of these factors        out(σ(r) · o)

Source: transformers 5.23, ``models/rwkv/modeling_rwkv.py``, ``RwkvSelfAttention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from fivefold.bounded_types import Width
from fivefold.model.mixers.chunk_groups import count_chunks_of_group, split_into_groups
from fivefold.model.mixers.geometry import MixerGeometry, scale_number
from fivefold.model.weight import Weight

MIXED = ("key", "value", "receptance")  # the projections, each of a mean of a token and the one before it
CHUNK_TOKENS = 64  # tokens that are computed at once; the sums are handed on between chunks


def split_tokens(tokens: int, *, sequences: int, channels: int, temporary_bytes: int) -> list[int]:
    """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
    chunks = count_chunks_of_group(4 * sequences * CHUNK_TOKENS * channels, temporary_bytes)
    return split_into_groups(tokens, CHUNK_TOKENS, chunks)


class RWKV(MixerGeometry):
    """The geometry of the time mixing of RWKV-4."""

    chunk: ClassVar[int] = CHUNK_TOKENS

    inner: Width  # channels, each with its own decay

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the channels."""
        return self.replace(inner=scale_number(self.inner, share, multiple=8))

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
        return split_tokens(tokens, sequences=sequences, channels=self.inner, temporary_bytes=temporary_bytes)

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        for name in MIXED:
            yield Weight(f"mixer.mix_{name}", (width,), "vector")
            yield Weight(f"mixer.{name}.weight", (self.inner, width), "column")
        yield Weight("mixer.decay", (self.inner,), "vector", initial="decays")
        yield Weight("mixer.first", (self.inner,), "vector")
        yield Weight("mixer.out.weight", (width, self.inner), "row")
