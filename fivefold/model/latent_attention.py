"""Multi-head latent attention."""

from typing import Literal, Self

from pydantic import model_validator

from fivefold.bounded_types import HeadDim, Latent, Positive
from fivefold.model.indexer import Indexer
from fivefold.record import Record


class MLA(Record):
    """Multi-head latent attention (DeepSeek-V2): low-rank queries and a compressed key-value latent."""

    q_rank: Latent | None = None  # rank of the compressed queries; None: queries are not compressed
    kv_rank: Latent  # rank of the compressed keys and values
    nope_dim: HeadDim  # dims of a head that are not rotated
    rope_dim: HeadDim  # dims of a head that are rotated
    v_dim: HeadDim  # dims of a value head
    norm_epsilon: Positive = 1e-6  # epsilon of the norms of both latents
    key_norm: bool = False  # the rotary key, which all heads share, is normed before its rotation (Dots 3)
    # queries and the output gate are made from their latent both before and after its norm (A.X K2)
    gates_queries: bool = False
    # what √(width / rank) multiplies after the norms: both latents (Dots 3), or that of keys and the queries (LongCat)
    scaled: Literal["none", "latents", "queries"] = "none"
    indexer: Indexer | None = None  # chooses the keys that a query attends to; None: all

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if self.indexer is not None and self.q_rank is None:
            raise ValueError("an indexer needs compressed queries: give q_rank, or no indexer")
        if self.indexer is not None and not self.indexer.has_own(0):
            raise ValueError("layer 0 must have an indexer of its own: begin indexer.pattern with true")
        if self.scaled == "queries" and self.indexer is not None:
            raise ValueError("mla.scaled='queries' is not supported with mla.indexer: leave one out")
        if self.gates_queries and self.q_rank is None:
            raise ValueError("gates_queries needs compressed queries: give q_rank")
        if self.gates_queries and self.scaled != "none":
            raise ValueError(f"gates_queries is not supported with scaled={self.scaled!r}: leave one out")
        if self.scaled != "none" and self.q_rank is None:
            raise ValueError(f"scaled={self.scaled!r} needs compressed queries: give q_rank, or leave it out")
        return self
