"""Dropout with masks drawn from a counter: every layout draws the same masks, and recomputation repeats them.

    out = x · mask / (1 − rate), in training only
    key of a sequence   mix(seed, step, sample)          key of a row   mix(sequence, layer and place in it, position)
    bits of 4 columns   mix(row + ⌊column / 4⌋ · γ)      mix: SplitMix64 (Steele et al., OOPSLA 2014)

A rate is rounded to 2⁻¹⁶. The mask, a byte per element, is kept for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.trainer.model.kernels.fused.dropout import draw_mask, is_available
from fivefold.trainer.model.operation import exclude_from_graphs, take_all_rows

GAMMA, FIRST, SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64
LEVELS = 2**16
MAX_DRAWN_ELEMENTS = 2**20  # elements whose bits are computed at once
EMBEDDING = 0
PROBABILITIES, ATTENTION, FEED_FORWARD = range(3)  # places in a layer
ADAPTERS = 2**40  # the first place of adapters' inputs, beyond those of layers
ROUTERS = 2**41  # the first place of routers that draw experts


def mix(x: Tensor) -> Tensor:
    """Return SplitMix64's output for the counters ``x``, int64; overwrites ``x``."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        x.bitwise_xor_((x >> shift) & (2 ** (64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31) & (2**33 - 1))


def sequence_keys(samples: Tensor, *, seed: int, step: int) -> Tensor:
    """Return a key per sample of a step, int64 in the shape of ``samples``, the indices within the global batch."""
    start = mix(torch.tensor([seed], device=samples.device)).add_(_multiply_gamma(step))
    return mix(mix(start) + samples * GAMMA)


def _multiply_gamma(number: int) -> int:
    """Return ``number`` · γ as int64."""
    return (number * GAMMA + 2**63) % 2**64 - 2**63


def place_keys(keys_B: Tensor, place: int) -> Tensor:
    """Return the keys of the sequences at one place."""
    return mix(keys_B + _multiply_gamma(place))


def place_in(layer: int, place: int) -> int:
    """Return the global index of a ``place`` in ``layer``; ``EMBEDDING`` has index 0."""
    return 1 + 3 * layer + place


def row_keys(keys_B: Tensor, rows: Tensor, *, place: int) -> Tensor:
    """Return a key for each of ``rows`` [T] or [N, T] of every sequence: [B, …]. ``rows`` holds row indices."""
    keys = place_keys(keys_B, place).view(-1, *(1 for _ in rows.shape))
    return mix(keys + rows * GAMMA)


def score_rows(heads: range, tokens: range, *, device: torch.device) -> Tensor:
    """Return the row indices [N, T] of the scores of some heads and tokens."""
    head_rows = torch.arange(heads.start, heads.stop, device=device)[:, None] * 2**32
    return head_rows + torch.arange(tokens.start, tokens.stop, device=device)


def make_keep_mask(keys: Tensor, *, columns: range, rate: float) -> Tensor:
    """Return a mask of the kept elements of the rows with ``keys`` [...]: bool [..., columns]."""
    first_group = columns.start // 4
    groups = torch.arange(first_group, -(-columns.stop // 4), device=keys.device)
    bits = mix(keys[..., None] + groups * GAMMA).view(torch.int16)
    column_bits = bits[..., columns.start - 4 * first_group : columns.stop - 4 * first_group]
    return column_bits >= _count_dropped_levels(rate) - LEVELS // 2


def compute_keep_scale(rate: float) -> float:
    """Return 1 / (1 − rate), for the rounded rate."""
    return LEVELS / (LEVELS - _count_dropped_levels(rate))


def _count_dropped_levels(rate: float) -> int:
    return round(rate * LEVELS)


@torch.library.custom_op("fivefold::dropout_mask", mutates_args=())
def dropout_mask(keys: Tensor, columns: int, rate: float, first: int = 0) -> Tensor:
    """Compute ``make_keep_mask`` of ``columns`` columns from ``first`` on: bool [..., columns].

    On a GPU with Triton that is one kernel, else PyTorch's operations compute some rows at a time.
    """
    if keys.is_cuda and is_available():
        return draw_mask(keys, columns, first=first, dropped=_count_dropped_levels(rate))
    rows = keys.flatten()
    mask = torch.empty(len(rows), columns, dtype=torch.bool, device=keys.device)
    step = max(1, MAX_DRAWN_ELEMENTS // columns)
    for start in range(0, len(rows), step):
        mask[start : start + step] = make_keep_mask(
            rows[start : start + step], columns=range(first, first + columns), rate=rate
        )
    return mask.view(*keys.shape, columns)


@dropout_mask.register_fake
def _(keys: Tensor, columns: int, rate: float, first: int = 0) -> Tensor:
    return keys.new_empty(*keys.shape, columns, dtype=torch.bool)


class _Dropped(torch.autograd.Function):
    """Compute x · mask · scale; saves the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, rate: float) -> Tensor:
        mask = dropout_mask(keys, x.shape[-1], rate)
        ctx.scale = compute_keep_scale(rate)
        ctx.save_for_backward(mask)
        return apply_mask(x, mask, scale=ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return apply_mask(gradient, mask, scale=ctx.scale), None, None


def apply_mask(x: Tensor, mask: Tensor, *, scale: float) -> Tensor:
    """Return x · mask · scale, a new tensor; its own backward is the same on the gradient."""
    return torch.mul(x, mask).mul_(scale)


@exclude_from_graphs
def apply_dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Apply dropout to ``x`` [..., D] by the ``keys`` [...] of its rows."""
    return _Dropped.apply(x, keys, rate)


class PlacedNoise(nn.Module):
    """Random numbers at a ``place``: keys of the rows of sequences.

    Context parallelism sets ``positions``. ``row_part``: which of how many equal parts of the rows of all sequences
    this rank has; tensor parallelism sets it.
    """

    def __init__(self, *, place: int) -> None:
        super().__init__()
        self.place, self.row_part = place, (0, 1)
        self.positions: Tensor | None = None

    def make_row_keys(self, keys_B: Tensor, tokens: int) -> Tensor:
        """Return the keys [R] of the rows of sequences with keys ``keys_B``, of which this rank has ``tokens`` each."""
        positions = torch.arange(tokens, device=keys_B.device) if self.positions is None else self.positions
        return row_keys(keys_B, positions, place=self.place).flatten()

    def make_keys_of_part(self, keys_B: Tensor, *, rows: int) -> Tensor:
        """Return the keys [rows] of this rank's part of the rows of all sequences with keys ``keys_B``."""
        part, parts = self.row_part
        return self.make_row_keys(keys_B, rows * parts // len(keys_B)).chunk(parts)[part]


class Dropout(PlacedNoise):
    """Dropout of the stream [R, D]. Tensor parallelism sets ``own_rows``, as for ``Embed``."""

    def __init__(self, rate: float, *, place: int) -> None:
        super().__init__(place=place)
        self.rate = rate
        self.own_rows: Callable[[Tensor], Tensor] = take_all_rows

    @exclude_from_graphs
    def forward(self, x_RD: Tensor, keys_B: Tensor, tokens: int) -> Tensor:
        """Apply dropout to the rows of some sequences.

        ``keys_B``: keys of the sequences; ``tokens``: number of tokens of each sequence on this rank.
        """
        return apply_dropout(x_RD, self.own_rows(self.make_row_keys(keys_B, tokens)), self.rate)


class AdapterDropout(PlacedNoise):
    """Dropout of the input of an adapter, of which a rank may hold some columns, or some rows."""

    def __init__(self, rate: float, *, place: int) -> None:
        super().__init__(place=place)
        self.rate = rate

    @property
    def scale(self) -> float:
        """Return the factor on the elements that are kept."""
        return compute_keep_scale(self.rate)

    def draw(self, keys_B: Tensor, *, rows: int, columns: range) -> Tensor:
        """Return the mask [rows, columns] of this rank's rows of all sequences with keys ``keys_B``."""
        keys = self.make_keys_of_part(keys_B, rows=rows)
        return dropout_mask(keys, len(columns), self.rate, columns.start)
