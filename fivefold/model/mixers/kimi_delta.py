"""Kimi delta attention (Kimi Linear, arXiv:2510.26692): a Gated DeltaNet that decays each key dim by its own rate.

    q, k, v = silu(conv(project(h)))        f, z = decay(h), gate(h)        β = σ(b)
    ln γ = −e^a_log · softplus(f + dt_bias)        or bounded: bound · σ(e^a_log · (f + dt_bias))        γ: [dim]
    S ← diag(γ) S        S ← S + β k (v − k S)        o = q S        out(norm(o) · σ(z))        q and k of unit length

Source: transformers 5.23, ``models/kimi_linear/modeling_kimi_linear.py``, ``KimiLinearDeltaAttention``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field

from fivefold.bounded_types import HeadDim, Heads, Latent
from fivefold.model.mixers.chunk_groups import count_chunks_of_group, split_into_groups
from fivefold.model.mixers.gated_delta_net import DELTA_CHUNK
from fivefold.model.mixers.geometry import MixerGeometry, ShardedUnits, scale_number
from fivefold.model.mixers.short_conv import Taps
from fivefold.model.weight import Weight


class KimiDelta(MixerGeometry):
    """The geometry of Kimi delta attention: a state [dim, dim] for each head."""

    context_parallel = "heads"
    chunk: ClassVar[int] = DELTA_CHUNK

    heads: Heads  # heads of queries, keys and values
    dim: HeadDim  # dims of a head
    taps: Taps = 4  # tokens that the convolution of q, k and v reads
    rank: Latent | None = None  # rank of the projections to decays and to gates; None: one matrix each
    # lower bound of ln γ; None: unbounded, by softplus
    lower_bound: Annotated[float, Field(ge=-1e6, lt=0)] | None = None

    @property
    def inner_width(self) -> int:
        """Return the width of all heads."""
        return self.heads * self.dim

    @property
    def linears(self) -> Mapping[str, int]:
        """Return the projections of the stream, and the width of each."""
        ends = {"decay": self.inner_width, "gate": self.inner_width}
        if self.rank is not None:
            ends = {"decay_down": self.rank, "gate_down": self.rank}
        return {"q": self.inner_width, "k": self.inner_width, "v": self.inner_width, "b": self.heads, **ends}

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of linear layers by the module that they are in transformers."""
        ends = {"f_proj": ("decay",), "g_proj": ("gate",)}
        if self.rank is not None:
            ends = {"f_a_proj": ("decay_down",), "f_b_proj": ("decay_up",)}
            ends |= {"g_a_proj": ("gate_down",), "g_b_proj": ("gate_up",)}
        return {f"{name}_proj": (name,) for name in "qkvb"} | ends | {"o_proj": ("out",)}

    def get_sharded_units(self, width: int) -> ShardedUnits:
        """Return the heads."""
        return ShardedUnits("heads", self.heads)

    def shard(self, ranks: int) -> Self:
        """Return the heads of one of ``ranks`` ranks; every rank has the latents of decays and gates."""
        return self if ranks == 1 else self.replace(heads=self.heads // ranks)

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the heads."""
        return self.replace(heads=scale_number(self.heads, share))

    def split_tokens(self, tokens: int, *, sequences: int, temporary_bytes: int) -> list[int]:
        """Return the tokens of each group of chunks that the trainer computes at once, of a sequence of ``tokens``."""
        largest = 4 * sequences * self.heads * max(self.chunk, self.dim) ** 2
        return split_into_groups(tokens, self.chunk, count_chunks_of_group(largest, temporary_bytes))

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        inner, heads = (self.inner_width,), (self.heads,)
        for name, outputs in self.linears.items():
            parts = () if name.endswith("_down") else (outputs,)
            yield Weight(f"mixer.{name}.weight", (outputs, width), "column", parts=parts)
        if self.rank is not None:
            for name in ("decay_up", "gate_up"):
                yield Weight(f"mixer.{name}.weight", (self.inner_width, self.rank), "column", parts=inner)
        yield Weight("mixer.conv.weight", (3 * self.inner_width, self.taps), "conv", parts=inner * 3)
        yield Weight("mixer.a_log", heads, "vector", initial="log rates", parts=heads)
        yield Weight("mixer.dt_bias", inner, "vector", initial="steps", parts=inner)
        yield Weight("mixer.norm.weight", (self.dim,), "norm", initial="ones")
        yield Weight("mixer.out.weight", (width, self.inner_width), "row")
