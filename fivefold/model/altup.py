"""AltUp (arXiv:2301.13310): a residual stream of several parts, of which a layer computes one and predicts the others.

    p = x + W(x_0) x        y = layer(p_0)        c = p + w(y) (y − p_0)

W [n, n] and w [n] depend on the token: they are products of tanh(router(RMSNorm(·) / D)). Per-layer inputs are made
from s · c_0 and added to c_1 … c_n. Before the first layer the other parts are projections of the embedding with its
norm. Before the head all parts are projected, scaled to the norm of the first, and averaged.

Source: transformers 5.23, ``Gemma3nTextAltUp`` and ``Gemma3nTextModel.forward``.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from fivefold.bounded_types import Positive
from fivefold.model.weight import Weight
from fivefold.record import Record

MAX_STREAMS = 16


class AltUp(Record):
    """AltUp: several residual streams, of which each layer computes one and predicts the others (Gemma 3n)."""

    streams: Annotated[int, Field(ge=2, le=MAX_STREAMS)] = 4  # residual streams, each as wide as the model
    clip: Positive | None = None  # bound of the elements of the prediction and correction matrices in training
    scales: bool = True  # a trained vector scales the stream from which per-layer inputs are made

    def projections(self, name: str, width: int) -> Iterator[Weight]:
        """Yield the matrices of all parts but the first, in the embedding or in the head."""
        for index in range(self.streams - 1):
            yield Weight(f"{name}.{index}.weight", (width, width), "router")

    def block_weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of one layer, without its norm."""
        yield Weight("altup.scale", (width,), "router")
        yield Weight("altup.correct.weight", (self.streams, self.streams), "router")
        yield Weight("altup.predict.weight", (self.streams**2, self.streams), "router")
        yield Weight("altup.router.weight", (self.streams, width), "router")
