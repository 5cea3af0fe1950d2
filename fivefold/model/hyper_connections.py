"""Hyper-connections (arXiv:2409.19606): a residual stream of several parts, with weights that every token makes.

    m = W RMSNorm(x)        x: the streams of a token, next to one another
    u = Σ pre_j x_j                                    what attention or the feed-forward reads
    x_k ← post_k · branch(u) + Σ_j comb_jk x_j         pre, post, comb: functions of m

Manifold-constrained ones (arXiv:2512.24880) make comb doubly stochastic by iterations of Sinkhorn and Knopp.
Independent ones have no comb: x_k ← post_k · branch(u) + x_k. Before the final norm the streams are summed, with
weights of the token.

Source: transformers 5.23, ``DeepseekV4HyperConnection``, ``DeepseekV4HyperHead`` and ``HYV4HyperConnection``.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from fivefold.bounded_types import Positive, Scalar
from fivefold.model.weight import Weight
from fivefold.record import Record


class HyperConnections(Record):
    """The streams of a model and the weights that connect them with attention and feed-forwards."""

    streams: Annotated[int, Field(ge=1, le=2**6)] = 4  # residual streams, each as wide as the model
    mixes: bool = True  # streams are mixed with one another; False: independent hyper-connections
    # iterations of the Sinkhorn-Knopp normalization; 1: only columns are normalized
    iterations: Annotated[int, Field(ge=1, le=2**10)] = 20
    magnitude: Scalar = 2.0  # factor on the sigmoid that multiplies what a branch adds
    epsilon: Positive = 1e-6  # added to the weights

    @property
    def connections(self) -> int:
        """Return the numbers that a token makes for each branch: pre and post of each stream, comb of each pair."""
        return self.streams * (2 + self.streams * self.mixes)

    def weights(self, name: str, width: int) -> Iterator[Weight]:
        """Yield the weights of one branch of a layer; every rank of tensor parallelism holds them in full."""
        yield Weight(f"{name}.weight", (self.connections, self.streams * width), "router")
        yield Weight(f"{name}.bias", (self.connections,), "norm")
        yield Weight(f"{name}.scale", (2 + self.mixes,), "norm")

    def head_weights(self, name: str, width: int) -> Iterator[Weight]:
        """Yield the weights of the sum of all streams before the final norm."""
        yield Weight(f"{name}.weight", (self.streams, self.streams * width), "router")
        yield Weight(f"{name}.bias", (self.streams,), "norm")
        yield Weight(f"{name}.scale", (1,), "norm")
