"""Gated DeltaNet (arXiv:2412.06464) with an output gate, as in Qwen3-Next.

    q, k, v = silu(conv(project(h)))        γ = exp(−e^a_log · softplus(a + dt_bias))        β = σ(b)
    S ← γ S (I − β k kᵀ) + β v kᵀ        o = S q        out(norm(o) · silu(z))        per head; q and k of unit length

Source: transformers 5.23, ``models/qwen3_next/modeling_qwen3_next.py``, ``Qwen3NextGatedDeltaNet``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from fivefold.bounded_types import HeadDim, Heads, Positive
from fivefold.model.mixers.chunk_groups import count_chunks_of_group, split_into_groups
from fivefold.model.mixers.geometry import MixerGeometry, ShardedUnits, scale_number
from fivefold.model.mixers.short_conv import Taps
from fivefold.model.weight import Weight

# Modules of transformers with the projections: those of Qwen3.5, Qwen3-Next and OLMo Hybrid
MODULES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "qkv": {
        "in_proj_qkv": ("q", "k", "v"),
        **{f"in_proj_{name}": (name,) for name in "zba"},
        "out_proj": ("out",),
    },
    "qkvz": {"in_proj_qkvz": ("q", "k", "v", "z"), "in_proj_ba": ("b", "a"), "out_proj": ("out",)},
    "separate": {f"{name}_proj": (name,) for name in "qkvba"} | {"g_proj": ("z",), "o_proj": ("out",)},
}
DELTA_CHUNK = 64  # tokens of a chunk, between which the state is handed on (flash-linear-attention and transformers)


class GatedDeltaNet(MixerGeometry):
    """The geometry of a Gated DeltaNet: a state [key_dim, value_dim] for each value head."""

    context_parallel = "heads"
    chunk: ClassVar[int] = DELTA_CHUNK

    key_heads: Heads  # query and key heads, each of which serves equally many value heads
    value_heads: Heads  # value heads
    key_dim: HeadDim  # dims of a query or key head
    value_dim: HeadDim  # dims of a value head
    taps: Taps = 4  # tokens that the convolution of q, k and v reads
    negative_eigenvalues: bool = False  # β = 2 σ(b), which lets a state turn (OLMo Hybrid, arXiv:2411.12537)
    norm_epsilon: Positive | None = None  # epsilon of the norm of the output; None: as the model's norms
    # which projections are one linear layer in transformers, so that an adapter of it has one factor A: q, k and v
    # (Qwen3.5), these with z, and b with a (Qwen3-Next), or none (OLMo Hybrid)
    fused_projections: Literal["qkv", "qkvz", "separate"] = "qkv"

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads={self.value_heads} is not divisible by key_heads={self.key_heads}; change one"
            )
        return self

    @property
    def key_width(self) -> int:
        """Return the width of all queries, or of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Return the width of all values."""
        return self.value_heads * self.value_dim

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of linear layers by the module that they are in transformers."""
        return MODULES[self.fused_projections]

    def get_sharded_units(self, width: int) -> ShardedUnits:
        """Return the key heads, each with its value heads."""
        return ShardedUnits("key heads", self.key_heads)

    def shard(self, ranks: int) -> Self:
        """Return the heads of one of ``ranks`` ranks."""
        if ranks == 1:
            return self
        return self.replace(key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the heads."""
        key_heads = scale_number(self.key_heads, share)
        return self.replace(key_heads=key_heads, value_heads=self.value_heads // self.key_heads * key_heads)

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
        largest = 4 * sequences * self.value_heads * max(self.chunk, self.key_dim) * max(self.chunk, self.value_dim)
        return split_into_groups(tokens, self.chunk, count_chunks_of_group(largest, temporary_bytes))

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        widths = {"q": self.key_width, "k": self.key_width, "v": self.value_width, "z": self.value_width}
        for name, outputs in (widths | {"b": self.value_heads, "a": self.value_heads}).items():
            yield Weight(f"mixer.{name}.weight", (outputs, width), "column", parts=(outputs,))
        convolved, heads = (self.key_width, self.key_width, self.value_width), (self.value_heads,)
        yield Weight("mixer.conv.weight", (sum(convolved), self.taps), "conv", parts=convolved)
        yield Weight("mixer.a_log", heads, "vector", initial="log rates", parts=heads)
        yield Weight("mixer.dt_bias", heads, "vector", initial="ones", parts=heads)
        yield Weight("mixer.norm.weight", (self.value_dim,), "norm", initial="ones")
        yield Weight("mixer.out.weight", (width, self.value_width), "row")
