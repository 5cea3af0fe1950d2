"""Data loader: selects the tokens that each rank reads at each step.

    position (samples so far) → epoch, place → seeded permutation → window → sequence + 1 tokens

Window i of a split starts at token i · sequence, so neighbours share one token: the last target of one is the first
input of the next. The permutation is a Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002): no table is stored, and the full state of the loader is one integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.trainer.data.shards import Shards, Split

ROUNDS = 6


def permute(numbers: NDArray[np.int64], *, size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Apply to ``numbers`` [any shape] the permutation of 0 … size - 1 that ``seed`` and ``epoch`` determine."""
    if (wrong := numbers[(numbers < 0) | (numbers >= size)]).size:  # else the walk below might not end
        raise ValueError(f"{wrong[0]} is not one of the {size} numbers of the permutation")
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8")
    permuted = _permute_feistel(numbers.astype(np.uint64), keys=keys, half=half, mask=mask)
    while (outside := permuted >= size).any():  # cycle walking; at most three of four numbers lie outside
        permuted[outside] = _permute_feistel(permuted[outside], keys=keys, half=half, mask=mask)
    return permuted.astype(np.int64)


def _permute_feistel(
    x: NDArray[np.uint64], *, keys: NDArray[np.uint64], half: np.uint64, mask: np.uint64
) -> NDArray[np.uint64]:
    left, right = x >> half, x & mask
    for key in keys:
        mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: its high bits depend on all
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)  # of SplitMix64
        left, right = right, left ^ (mixed >> np.uint64(32)) & mask
    return left << half | right


def permute_epochs(positions: NDArray[np.int64], *, size: int, seed: int) -> NDArray[np.int64]:
    """Return which of ``size`` items is at each of ``positions`` [rows], each epoch in an order of its own."""
    epochs, indices = np.divmod(positions, size)
    items = np.empty_like(positions)
    for epoch in np.unique(epochs):
        is_in_epoch = epochs == epoch
        items[is_in_epoch] = permute(indices[is_in_epoch], size=size, seed=seed, epoch=int(epoch))
    return items


@dataclass(frozen=True)
class Loader:
    """A loader of one split as windows of ``sequence`` + 1 tokens, in an order that depends only on ``seed``.

    ``ahead``: the number of further tokens in each window, for multi-token prediction.

    A position counts samples since the start of training; position p is in epoch p // windows, and every epoch reads
    each window once. To resume, continue from the saved position.
    """

    shards: Shards
    _: KW_ONLY
    split: Split = "train"
    sequence: int
    seed: int
    ahead: int = 0

    def __post_init__(self) -> None:
        self.check(global_batch=1)

    @property
    def windows(self) -> int:
        """Return the number of samples in one epoch."""
        return max(0, self.shards.index.part(self.split).tokens - 1 - self.ahead) // self.sequence

    @property
    def length(self) -> int:
        """Return the number of tokens of one sample."""
        return self.sequence + 1 + self.ahead

    def check(self, *, global_batch: int) -> None:
        """Raise a ``UserError`` unless the split holds one batch of ``global_batch`` sequences."""
        if self.windows < global_batch:
            tokens = self.shards.index.part(self.split).tokens
            needed = global_batch * self.sequence + 1 + self.ahead
            fix = "raise the held-out share" if self.split == "heldout" else "lower the sequence or the global batch"
            raise UserError(
                f"{self.shards.directory}: {self.split} holds {tokens} tokens, but {global_batch} sequences of "
                f"{self.sequence} need {needed}; add text or {fix}"
            )

    def count_targets(self, positions: NDArray[np.int64]) -> int | None:
        """Return the targets with a loss in the samples at ``positions``; None: all are."""
        return None

    def select(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the windows of the samples at ``positions`` [rows]."""
        return permute_epochs(positions, size=self.windows, seed=self.seed)

    def read_window(self, window: int) -> NDArray[np.int64]:
        """Read the tokens [length] of a window: inputs begin at 0, targets at 1."""
        return self.shards.read(self.split, start=window * self.sequence, count=self.length).astype(np.int64)

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read the samples at ``positions`` [rows] as rows [rows, length]."""
        tokens = np.empty((len(positions), self.length), np.int64)
        for row, window in zip(tokens, self.select(positions), strict=True):
            row[:] = self.read_window(int(window))
        return tokens

    def batch(
        self, taken: int, *, global_batch: int, rank: int, ranks: int, micro_batches: int, mbs: int
    ) -> NDArray[np.int64]:
        """Read the batch of data-parallel ``rank`` of ``ranks`` after ``taken`` samples: [micro_batches, mbs, length].

        Sample g of the step, position taken + g, is row j of micro-batch m on rank r with g = (m · ranks + r) · mbs +
        j, so that a step holds the same samples under every layout.
        """
        if ranks * micro_batches * mbs != global_batch:
            raise ValueError(
                f"{ranks} ranks x {micro_batches} micro-batches x mbs {mbs} is not the global batch of {global_batch}"
            )
        self.check(global_batch=global_batch)
        positions = taken + np.arange(global_batch).reshape(micro_batches, ranks, mbs)[:, rank]
        return self.rows(positions.ravel()).reshape(micro_batches, mbs, self.length)


def list_heldout_batches(
    loader: Loader, *, rows: int, mbs: int, rank: int = 0, ranks: int = 1
) -> Iterator[NDArray[np.int64]]:
    """Yield this rank's batches [mbs, length] of at most ``rows`` held-out samples, equal at every evaluation.

    Every rank gets the same number of batches, at least one, as collectives in the forward pass require: ``rows`` is
    rounded down to a multiple of ranks · mbs, and a split that is shorter than one such batch is read repeatedly.
    """
    batch = ranks * mbs
    for step in range(max(1, min(rows, loader.windows) // batch)):
        yield loader.rows(step * batch + rank * mbs + np.arange(mbs))
