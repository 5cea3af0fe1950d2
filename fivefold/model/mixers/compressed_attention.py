"""Attention to compressed keys (DeepSeek-V4): a window of single keys, and keys that each stand for several tokens.

    q = norm(W_q norm(down(h)))        kv = norm(W_kv h)        one head of keys, which are the values too
    c = norm(Σ softmax(gate(h) + bias) · project(h)) over the tokens of a compressed key
    o = attention of q to the last keys of ``window`` tokens and to compressed keys, with sinks
    out(out_down(o))                                            out_down: of each group of heads

Three kinds of layers have it. shared_key_attention: only the window. heavily_compressed_attention: and all compressed
keys. compressed_sparse_attention: and those that an indexer chooses; each is made of the tokens of two windows.

Source: transformers 5.23, ``models/deepseek_v4/modeling_deepseek_v4.py``, ``DeepseekV4Attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import model_validator

from fivefold.bounded_types import HeadDim, Heads, Latent, Positive, Tokens
from fivefold.model.indexer import Indexer
from fivefold.model.mixers.geometry import MixerGeometry, scale_number
from fivefold.model.rope import RopeScaling, RotaryTable
from fivefold.model.weight import Weight


class CompressedAttention(MixerGeometry):
    """DeepSeek-V4's attention: one shared key/value head; queries attend to a window and to compressed keys."""

    heads: Heads  # heads of queries
    head_dim: HeadDim  # size of a query head and of the shared head of keys, which are the values too
    rope_dim: HeadDim  # the last dims of a head, which are rotated; those of the output are rotated back
    q_rank: Latent  # rank of the compressed queries
    window: Tokens  # the last tokens, uncompressed, that a query attends to
    out_groups: Heads = 1  # groups of heads that are projected separately
    out_rank: Latent  # what each group is projected to, before all are projected together
    rate: Tokens | None = None  # tokens that a compressed key stands for; None: there are none
    overlaps: bool = False  # a compressed key is made of the tokens before its own too, by projections of their own
    indexer: Indexer | None = None  # chooses the compressed keys that a query attends to; None: all
    rope_theta: Positive = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # scaling for sequences longer than in pre-training

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        if self.heads % self.out_groups:
            raise ValueError(f"heads={self.heads} is not divisible by out_groups={self.out_groups}: change one")
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim={self.rope_dim} must be even and at most head_dim={self.head_dim}: change it")
        if self.rate is None and (self.overlaps or self.indexer is not None):
            raise ValueError("overlaps and indexer need compressed keys: give rate, or leave them out")
        if self.indexer is not None and self.indexer.pattern:
            raise ValueError("compressed attention has its indexer in every layer; remove indexer.pattern")
        if self.indexer is not None and self.indexer.head_dim < self.rope_dim:
            raise ValueError(
                f"indexer.head_dim={self.indexer.head_dim} is less than rope_dim={self.rope_dim} rotated dims: make "
                "it larger"
            )
        return self

    @property
    def query_width(self) -> int:
        """Return the width of all heads."""
        return self.heads * self.head_dim

    @property
    def projected_width(self) -> int:
        """Return the width of the projected groups of heads."""
        return self.out_groups * self.out_rank

    @property
    def series(self) -> int:
        """Return the projections that a compressed key is made of: of its own tokens, and of those before."""
        return 2 if self.overlaps else 1

    @property
    def rotary_table(self) -> RotaryTable:
        """Return the table by which queries and keys are rotated."""
        return RotaryTable(self.rope_dim, self.rope_theta, self.rope_scaling)

    def scale(self, share: float) -> Self:
        """Return the geometry with ``share`` times the heads, in as many groups; those of the indexer stay."""
        return self.replace(heads=scale_number(self.heads, share, multiple=self.out_groups))

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights of a layer of ``width``, with names relative to the block."""
        yield Weight("mixer.q_down.weight", (self.q_rank, width), "column")
        yield Weight("mixer.q_norm.weight", (self.q_rank,), "norm")
        yield Weight("mixer.q_up.weight", (self.query_width, self.q_rank), "column")
        yield Weight("mixer.kv.weight", (self.head_dim, width), "column")
        yield Weight("mixer.kv_norm.weight", (self.head_dim,), "norm")
        if self.rate is not None:
            yield from self._list_compressor_weights("mixer.compress", self.head_dim, width, rate=self.rate)
        if self.indexer is not None and self.rate is not None:
            heads, dim = self.indexer.heads, self.indexer.head_dim
            # the choice of keys is not differentiable
            yield Weight("mixer.indexer.q.weight", (heads * dim, self.q_rank), "router", has_gradient=False)
            for weight in self._list_compressor_weights("mixer.indexer.compress", dim, width, rate=self.rate):
                yield weight._replace(has_gradient=False)
            yield Weight("mixer.indexer.w.weight", (heads, width), "router", has_gradient=False)
        yield Weight("mixer.sinks", (self.heads,), "vector")
        yield Weight("mixer.out_down.weight", (self.projected_width, self.query_width // self.out_groups), "router")
        yield Weight("mixer.out.weight", (width, self.projected_width), "row")

    def _list_compressor_weights(self, name: str, dim: int, width: int, *, rate: int) -> Iterator[Weight]:
        """Yield the weights that make compressed keys of ``dim``: projections, gates, their biases, the norm."""
        yield Weight(f"{name}.kv.weight", (self.series * dim, width), "router")
        yield Weight(f"{name}.gate.weight", (self.series * dim, width), "router")
        yield Weight(f"{name}.position_bias", (rate, self.series * dim), "router")
        yield Weight(f"{name}.norm.weight", (dim,), "norm")


def count_complete(tokens: int, rate: int, *, most: int | None = None) -> int:
    """Count the pairs of a query and a compressed key that is complete at its token, at most ``most`` of a query."""
    if most is not None and tokens >= most * rate:
        before = most * rate - 1
        return count_complete(before, rate) + (tokens - before) * most
    keys, rest = divmod(tokens, rate)
    return rate * keys * (keys - 1) // 2 + keys * (rest + 1)


def count_pairs(tokens: int, *, window: int, rate: int | None, most: int | None = None) -> int:
    """Count the pairs of a query and a key that it sees in a sequence: of the window, and compressed ones."""
    window = min(window, tokens)
    pairs = window * (window + 1) // 2 + (tokens - window) * window
    return pairs if rate is None else pairs + count_complete(tokens, rate, most=most)
