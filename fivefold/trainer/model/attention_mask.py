"""Score scaling of a layer, the keys that a query sees, and the number of visible pairs of a query and a key.

scores = cap · tanh(q·kᵀ·scale / cap)        query i sees keys i − window < j ≤ i        ALiBi: − slope · (i − j)
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.model.attention import list_alibi_slopes
from fivefold.model.spec import Model


class Heads(NamedTuple):
    """Position of a core's heads among all heads: within slice ``part`` (tp) the ``rank``-th of ``ranks`` (Ulysses)."""

    part: int = 0
    rank: int = 0
    ranks: int = 1

    def first_index(self, held: int) -> int:
        """Return the index, among all heads of the model, of the first of the ``held`` heads of this rank."""
        return (self.part * self.ranks + self.rank) * held


class AttentionMask(NamedTuple):
    """Scale of q·kᵀ, and the mask: a token sees itself and the ``window`` − 1 tokens before it (None: all).

    ``softcap``: as in Gemma 2; ``dropout``: rate for the probabilities, in training; ``layer``: index of the layer,
    which selects the dropout masks; ``slopes``: slope of the bias by distance, one for each head (ALiBi).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    layer: int = 0
    slopes: tuple[float, ...] = ()

    @classmethod
    def from_layer(cls, model: Model, *, layer: int) -> AttentionMask:
        """Return the rule of one layer."""
        window = model.window if model.has_window(layer) and model.window_kind == "sliding" else None
        scale = model.attention_scale or model.attention(layer).head_dim ** -0.5
        slopes = list_alibi_slopes(model.attention(layer).heads) if model.position == "alibi" else ()
        return cls(scale, window, model.attention_softcap, model.dropout_rates.attention, layer, slopes)

    def select_heads(self, first: int, held: int) -> AttentionMask:
        """Return the rule of ``held`` heads, of all heads those from ``first`` on."""
        return self._replace(slopes=self.slopes[first : first + held])

    def limit_to(self, tokens: int) -> AttentionMask:
        """Return the rule for sequences of ``tokens``: without the window if it is not shorter than the sequence."""
        return self._replace(window=None) if self.window is not None and self.window >= tokens else self

    @property
    def is_plain(self) -> bool:
        """Return whether PyTorch's flash kernels support the rule: no window, no softcap, no bias, no dropout."""
        return self.window is None and self.softcap is None and not self.slopes and not self.dropout

    def apply_dropout(self, tokens: int, *, training: bool) -> AttentionMask:
        """Return ``limit_to(tokens)``, with dropout only in training.

        The kernel with dropout is the sliding-window kernel, so the window is set to all tokens.
        """
        if not (training and self.dropout):
            return self.limit_to(tokens)._replace(dropout=0.0)
        return self._replace(window=min(self.window or tokens, tokens))


def count_visible_pairs(queries: int, keys: int, *, offset: int, window: int) -> int:
    """Count the pairs (t, s) of a block with 0 ≤ t + offset − s < window.

    ``offset``: position of the first query − position of the first key.
    """
    first_seen = offset + 1

    def sum_clamped(first: int) -> int:
        """Return Σ over t of ``first_index`` + t, clamped to 0 … keys."""
        return _sum_to(first + queries - 1, keys) - _sum_to(first - 1, keys)

    return sum_clamped(first_seen) - sum_clamped(first_seen - window)


def _sum_to(last: int, most: int) -> int:
    """Return the sum of min(m, most) over 1 ≤ m ≤ last."""
    if last <= 0:
        return 0
    below = min(last, most)
    return below * (below + 1) // 2 + (last - below) * most
