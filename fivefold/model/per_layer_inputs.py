"""Per-layer inputs: numbers that a token's id and embedding make for each layer, added to the stream at its end.

    p = (RMSNorm(W x / √D) + √P table[id]) / √2        x: the embedding of a token; L parts of P, one for each layer
    z ← z + RMSNorm(U (act(G z) · p_layer))            after the feed-forward of a layer

Source: transformers 5.23, ``Gemma4TextModel.project_per_layer_inputs`` and ``Gemma4TextDecoderLayer.forward``.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from fivefold.bounded_types import Vocab
from fivefold.model.weight import Weight
from fivefold.record import Record


class PerLayerInputs(Record):
    """The size of the inputs of a layer (P), and of the table of token ids that makes a part of them."""

    width: Annotated[int, Field(ge=1, le=2**16)] = 256  # numbers of a token for each layer (P)
    vocab: Vocab = 262_144  # rows of the table; its columns are L · P

    def embedding_weights(self, layers: int, width: int) -> Iterator[Weight]:
        """Yield the table and the projection of embeddings, without the norm of a layer's part of it.

        The projection is replicated over tensor parallel ranks, as a router is.
        """
        yield Weight("embed.per_layer.weight", (self.vocab, layers * self.width), "embedding")
        yield Weight("embed.per_layer_project.weight", (layers * self.width, width), "router")

    def block_weights(self, width: int) -> Iterator[Weight]:
        """Yield the gate on the inputs of a layer and the projection of their product, without its norm."""
        yield Weight("per_layer.gate.weight", (self.width, width), "router")
        yield Weight("per_layer.project.weight", (width, self.width), "router")
