"""How a layer makes attention scores, which keys a query sees, and how many pairs of a query and a key that are.

scores = cap · tanh(q·kᵀ·scale / cap)        query i sees keys i − window < j ≤ i
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.model.spec import Model


class Heads(NamedTuple):
    """Which heads of all a core has: of ``part`` (tp) the ``rank``-th of ``ranks`` (Ulysses)."""

    part: int = 0
    rank: int = 0
    ranks: int = 1

    def first(self, held: int) -> int:
        """The number of the first of the ``held`` heads, among all of the model."""
        return (self.part * self.ranks + self.rank) * held


class ScoreRule(NamedTuple):
    """Scale of q·kᵀ; a token sees itself and the ``window`` − 1 tokens before it (None: all); ``softcap``: Gemma 2.

    ``dropout``: rate for the probabilities, in training; ``layer``: whose masks they are.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    layer: int = 0

    @classmethod
    def of(cls, model: Model, *, layer: int, head_dim: int) -> ScoreRule:
        """The rule of one layer; ``head_dim``: dims of q and k."""
        window = model.window if model.slides(layer) and model.window_kind == "sliding" else None
        scale, dropout = model.attention_scale or head_dim**-0.5, model.dropout_rates.attention
        return cls(scale, window, model.attention_softcap, dropout, layer)

    def over(self, tokens: int) -> ScoreRule:
        """The rule for sequences of ``tokens``: a window that is not shorter does nothing."""
        return self._replace(window=None) if self.window is not None and self.window >= tokens else self

    @property
    def plain(self) -> bool:
        """Whether PyTorch's flash kernels have it: no window, no softcap, no dropout."""
        return self.window is None and self.softcap is None and not self.dropout

    def drawn(self, tokens: int, *, training: bool) -> ScoreRule:
        """``over(tokens)``, with dropout or without. The kernel that has it is that for windows, here of all tokens."""
        if not (training and self.dropout):
            return self.over(tokens)._replace(dropout=0.0)
        return self._replace(window=min(self.window or tokens, tokens))


def visible_pairs(queries: int, keys: int, *, offset: int, window: int) -> int:
    """Pairs (t, s) of a block with 0 ≤ t + offset − s < window; ``offset``: first query's position − first key's."""
    seen = offset + 1

    def clamped(first: int) -> int:
        """Σ over t of ``first`` + t, clamped to 0 … keys."""
        return _sum_to(first + queries - 1, keys) - _sum_to(first - 1, keys)

    return clamped(seen) - clamped(seen - window)


def _sum_to(last: int, most: int) -> int:
    """Σ of min(m, most) over 1 ≤ m ≤ last."""
    if last <= 0:
        return 0
    below = min(last, most)
    return below * (below + 1) // 2 + (last - below) * most
