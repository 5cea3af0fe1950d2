"""Lightning attention (MiniMax-01, arXiv:2501.08313 §2.2): linear attention whose heads decay at fixed rates.

    q, k, v = act(project(h))        S ← γ S + k vᵀ        o = q S        out(σ(gate(h)) · norm(o))

Each head has its own γ, ln γ = −2^(−8 head / heads) · (1 − layer / (layers − 1)), heads counted from 1. The
columns of q, k and v of a head lie side by side.

Source: transformers 5.23, ``models/minimax/modeling_minimax.py``, ``MiniMaxLightningAttention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from fivefold.bounded_types import HeadDim, Heads, Positive
from fivefold.model.mixers.chunk_groups import count_chunks_of_group, split_into_groups
from fivefold.model.mixers.geometry import MixerGeometry, ShardedUnits, scale_number
from fivefold.model.weight import Weight


class Lightning(MixerGeometry):
    """The geometry of lightning attention: a state [dim, dim] for each head."""

    context_parallel: ClassVar[Literal["none", "heads", "halo"]] = "heads"
    heads: Heads  # heads of queries, keys and values
    dim: HeadDim  # dims of a head
    chunk: Annotated[int, Field(ge=1, le=2**16)] = 256  # tokens of a chunk, between which the state is handed on
    norm_epsilon: Positive | None = None  # epsilon of the norm of the outputs; None: that of the model

    @property
    def inner_width(self) -> int:
        """Return the width of all heads."""
        return self.heads * self.dim

    def list_decay_rates(self, layer: int, *, layers: int) -> tuple[float, ...]:
        """Return −ln γ of each head of ``layer`` in a model of ``layers``, as MiniMax-01 sets them."""
        factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        return tuple(factor * 2 ** (-8 * head / self.heads) for head in range(1, self.heads + 1))

    def get_sharded_units(self, width: int) -> ShardedUnits:
        """Return the heads."""
        return ShardedUnits("heads", self.heads)

    def shard(self, ranks: int) -> Self:
        """Return the heads of one of ``ranks`` ranks."""
        return self if ranks == 1 else self.replace(heads=self.heads // ranks)

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the heads."""
        return self.replace(heads=scale_number(self.heads, share))

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
        largest = 4 * sequences * self.heads * max(self.chunk, self.dim) ** 2
        return split_into_groups(tokens, self.chunk, count_chunks_of_group(largest, temporary_bytes, self.chunk))

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        inner = (self.inner_width,)
        yield Weight("mixer.project.weight", (3 * self.inner_width, width), "column", parts=(3 * self.inner_width,))
        yield Weight("mixer.gate.weight", (self.inner_width, width), "column", parts=inner)
        yield Weight("mixer.norm.weight", inner, "norm", initial="ones", parts=inner)
        yield Weight("mixer.out.weight", (width, self.inner_width), "row")
