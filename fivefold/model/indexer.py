"""The lightning indexer of sparse latent attention (DeepSeek-V3.2, arXiv:2512.02556 §2.1).

    I[t, s] = Σ_j w_j[t] · ReLU(q_j[t] · k[s])        a query at t attends to the ``topk`` keys s ≤ t with the largest I

The queries q_j of its heads are made from the latent of attention's queries; its one key k is normed by a LayerNorm.
"""

from collections.abc import Iterator

from fivefold.bounded_types import HeadDim, Heads, Positive, Tokens
from fivefold.model.weight import Weight
from fivefold.record import Record


class Indexer(Record):
    """The geometry of an indexer, and the layers that have one."""

    heads: Heads  # heads whose scores are summed
    head_dim: HeadDim  # dims of its queries and of its key
    topk: Tokens  # keys that a query attends to
    norm_epsilon: Positive = 1e-6  # added to the variance in the norm of its key
    pattern: tuple[bool, ...] = ()  # per layer, repeated; False: attends to the keys chosen before; empty: all have one

    def has_own(self, layer: int) -> bool:
        """Tell whether ``layer`` has an indexer, and does not attend to the keys that an earlier layer's chose."""
        return self.pattern[layer % len(self.pattern)] if self.pattern else True

    def weights(self, *, q_rank: int, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer's indexer, which every rank of tensor parallelism holds in full.

        The choice of keys is not differentiable, so that they have no gradient.
        """
        yield Weight("attention.indexer.q.weight", (self.heads * self.head_dim, q_rank), "router", has_gradient=False)
        yield Weight("attention.indexer.k.weight", (self.head_dim, width), "router", has_gradient=False)
        yield Weight("attention.indexer.k_norm.weight", (self.head_dim,), "norm", has_gradient=False)
        yield Weight("attention.indexer.k_norm.bias", (self.head_dim,), "norm", has_gradient=False)
        yield Weight("attention.indexer.w.weight", (self.heads, width), "router", has_gradient=False)
