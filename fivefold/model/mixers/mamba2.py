"""Mamba-2 (arXiv:2405.21060): a state [state, head_dim] of each head that decays by one number per token.

    z, x, B, C, dt = project(h)        x, B, C ← silu(conv(·))        Δ = softplus(dt + dt_bias)
    S ← exp(−e^a_log · Δ) S + Δ B xᵀ        o = Sᵀ C + d x        out(norm(o · silu(z)))        B, C: of each group

Source: transformers 5.23, ``models/mamba2/modeling_mamba2.py``, ``Mamba2Mixer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fivefold.bounded_types import HeadDim, Heads
from fivefold.model.mixers.chunk_groups import count_chunks_of_group, split_into_groups
from fivefold.model.mixers.geometry import MixerGeometry, ShardedUnits, scale_number
from fivefold.model.mixers.short_conv import Taps
from fivefold.model.weight import Weight

Tokens = Annotated[int, Field(ge=1, le=2**16)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]


class Mamba2(MixerGeometry):
    """The geometry of a Mamba-2 layer: a state [state, head_dim] for each head."""

    context_parallel = "heads"

    heads: Heads  # heads, each with a decay of its own
    head_dim: HeadDim  # dims of a head
    state: HeadDim  # numbers of the state for each dim of a head
    groups: Heads = 1  # groups of heads with a common B and C, and of the norm
    taps: Taps = 4  # tokens that the convolution of x, B and C reads
    chunk: Tokens = 256  # tokens of a chunk, between which the state is handed on
    conv_bias: bool = True  # the convolution has a bias
    bias: bool = False  # both projections have biases
    # order of norm and gate: norm(o · silu(z)), norm(o) · silu(z), or only the gate
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    min_step: Seconds = 0.0  # smallest Δ
    max_step: Seconds | None = None  # largest Δ; None: unlimited

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"heads={self.heads} is not divisible by groups={self.groups}; change one")
        return self

    @property
    def inner_width(self) -> int:
        """Return the width of all heads."""
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Return the width of x, B and C, which the convolution reads."""
        return self.inner_width + 2 * self.groups * self.state

    @property
    def projected_width(self) -> int:
        """Return the width of z, x, B, C and dt."""
        return self.inner_width + self.conv_width + self.heads

    @property
    def convolved_parts(self) -> tuple[int, int, int]:
        """Return the widths of x, B and C."""
        return self.inner_width, self.groups * self.state, self.groups * self.state

    @property
    def projected_parts(self) -> tuple[int, ...]:
        """Return the widths of z, x, B, C and dt."""
        return self.inner_width, *self.convolved_parts, self.heads

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of linear layers by the module that they are in transformers."""
        return {"in_proj": ("project",), "out_proj": ("out",)}

    def get_sharded_units(self, width: int) -> ShardedUnits:
        """Return the groups, each with its heads."""
        return ShardedUnits("groups", self.groups)

    def shard(self, ranks: int) -> Self:
        """Return the geometry of one of ``ranks`` ranks, which has a share of the heads and groups."""
        return self if ranks == 1 else self.replace(heads=self.heads // ranks, groups=self.groups // ranks)

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the heads, in as many groups."""
        return self.replace(heads=scale_number(self.heads, share, multiple=self.groups))

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
        largest = 4 * sequences * self.heads * max(self.chunk**2, max(self.chunk, self.state) * self.head_dim)
        return split_into_groups(tokens, self.chunk, count_chunks_of_group(largest, temporary_bytes, self.chunk))

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        inner, heads = (self.inner_width,), (self.heads,)
        convolved, projected = self.convolved_parts, self.projected_parts
        yield Weight("mixer.project.weight", (self.projected_width, width), "column", parts=projected)
        if self.bias:
            yield Weight("mixer.project.bias", (self.projected_width,), "bias", parts=projected)
        yield Weight("mixer.conv.weight", (self.conv_width, self.taps), "conv", parts=convolved)
        if self.conv_bias:
            yield Weight("mixer.conv.bias", (self.conv_width,), "bias", parts=convolved)
        yield Weight("mixer.a_log", heads, "vector", initial="log rates", parts=heads)
        yield Weight("mixer.dt_bias", heads, "vector", initial="steps", parts=heads)
        yield Weight("mixer.d", heads, "vector", initial="ones", parts=heads)
        if self.norm != "none":
            yield Weight("mixer.norm.weight", inner, "norm", initial="ones", parts=inner)
        yield Weight("mixer.out.weight", (width, self.inner_width), "row")
        if self.bias:
            yield Weight("mixer.out.bias", (width,), "bias")
