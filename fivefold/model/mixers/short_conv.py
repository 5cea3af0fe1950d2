"""Gated short convolution (LFM2): a causal depthwise convolution of a few taps between two gates.

    B, C, x = project(h)        y = C · conv(B · x)        out(y)

Source: transformers 5.23, ``models/lfm2/modeling_lfm2.py``, ``Lfm2ShortConv``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Self

from pydantic import Field

from fivefold.model.mixers.geometry import MixerGeometry, ShardedUnits
from fivefold.model.weight import Weight

Taps = Annotated[int, Field(ge=1, le=2**10)]  # 3 in LFM2, 4 in Mamba and Gated DeltaNet


class ShortConv(MixerGeometry):
    """The geometry of a gated short convolution, which is as wide as the residual stream."""

    context_parallel = "halo"

    taps: Taps = 3  # tokens that the convolution reads: the current one and those before it
    bias: bool = False  # the convolution and both projections have biases

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of linear layers by the module that they are in transformers."""
        return {"in_proj": ("project",), "out_proj": ("out",)}

    def get_sharded_units(self, width: int) -> ShardedUnits:
        """Return the channels, which do not depend on one another between the projections."""
        return ShardedUnits("channels", width)

    def shard(self, ranks: int) -> Self:
        """Return this geometry, which does not say how many channels there are."""
        return self

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        yield Weight("mixer.project.weight", (3 * width, width), "column", parts=(width,) * 3)
        if self.bias:
            yield Weight("mixer.project.bias", (3 * width,), "bias", parts=(width,) * 3)
        yield Weight("mixer.conv.weight", (width, self.taps), "conv", parts=(width,))
        if self.bias:
            yield Weight("mixer.conv.bias", (width,), "bias", parts=(width,))
        yield Weight("mixer.out.weight", (width, width), "row")
        if self.bias:
            yield Weight("mixer.out.bias", (width,), "bias")
