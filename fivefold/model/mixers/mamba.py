"""Mamba (arXiv:2312.00752): a state of each channel whose numbers each decay by a rate that depends on the token.

    x, z = project(h)        x ← silu(conv(x))        dt, B, C = select(x)        Δ = softplus(step(dt) + bias)
    S ← exp(−e^a_log · Δ) S + Δ B x        y = C · S + d x        out(y · silu(z))        S, a_log: [inner, state]

Source: transformers 5.23, ``models/mamba/modeling_mamba.py``, ``MambaMixer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from fivefold.bounded_types import HeadDim, Latent, Positive, Width
from fivefold.model.mixers.geometry import MixerGeometry
from fivefold.model.mixers.short_conv import Taps
from fivefold.model.weight import Weight

CHUNK = 16  # tokens that are computed at once; the state is handed on between chunks


class Mamba(MixerGeometry):
    """The geometry of a Mamba layer: a state [inner, state]."""

    inner: Width  # channels, of which each has a state
    state: HeadDim = 16  # numbers of the state of a channel
    rank: Latent  # rank of the projection to the steps of the channels
    taps: Taps = 4  # tokens that the convolution of x reads
    conv_bias: bool = True  # the convolution has a bias
    bias: bool = False  # the projections of the stream have biases
    norms: Literal["none", "unit", "weighted"] = "none"  # RMSNorms of dt, B and C; unit: without weights
    norm_epsilon: Positive | None = None  # of these norms; None: that of the model

    @property
    def selected_widths(self) -> tuple[int, int, int]:
        """Return the widths of dt, B and C."""
        return self.rank, self.state, self.state

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        yield Weight("mixer.project.weight", (2 * self.inner, width), "column")
        if self.bias:
            yield Weight("mixer.project.bias", (2 * self.inner,), "bias")
        yield Weight("mixer.conv.weight", (self.inner, self.taps), "conv")
        if self.conv_bias:
            yield Weight("mixer.conv.bias", (self.inner,), "bias")
        yield Weight("mixer.select.weight", (sum(self.selected_widths), self.inner), "column")
        if self.norms == "weighted":
            for name, size in zip(("dt", "b", "c"), self.selected_widths, strict=True):
                yield Weight(f"mixer.{name}_norm.weight", (size,), "norm", initial="ones")
        yield Weight("mixer.step.weight", (self.inner, self.rank), "column")
        yield Weight("mixer.step.bias", (self.inner,), "bias", initial="steps")
        yield Weight("mixer.a_log", (self.inner, self.state), "vector", initial="log numbers")
        yield Weight("mixer.d", (self.inner,), "vector", initial="ones")
        yield Weight("mixer.out.weight", (width, self.inner), "row")
        if self.bias:
            yield Weight("mixer.out.bias", (width,), "bias")
