"""Packs supervised samples into sequences, so that few tokens are padding.

    sequence    | sample 5         | sample 2     | 9 | padding |        inputs: tokens; padding: the end of document
    targets       s5[1] s5[2] … ✕    s2[1] … ✕      …   ✕                  ✕: no loss

Best fit decreasing: samples in order of falling length, each into the fullest sequence with room for it (TRL's ``bfd``;
arXiv:2404.10830). It is computed from the lengths when a run starts, equally on every rank, so nothing is stored.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.trainer.data.loader import Loader, permute_epochs

Packing = Literal["best-fit", "none"]
Excess = Literal["truncate", "drop"]
Ints = NDArray[np.int64]

IGNORED, LAST = -100, -101  # targets without a loss; LAST: of the last token of a sample


@dataclass(frozen=True)
class PackedLoader(Loader):
    """A loader of supervised samples: rows of ``sequence`` tokens and as many targets.

    ``packing``: several samples in a sequence, or one. ``excess``: a longer sample loses its end, or is left out.
    Samples without a target are left out.
    """

    _: KW_ONLY
    packing: Packing = "best-fit"
    excess: Excess = "truncate"

    @property
    def windows(self) -> int:
        """Return the number of sequences in one epoch."""
        return len(self._sequences[1]) - 1

    @property
    def length(self) -> int:
        """Return the number of elements of one row."""
        return 2 * self.sequence

    @cached_property
    def starts(self) -> Ints:
        """Return the offset of the first token of each sample."""
        return np.concatenate((np.zeros(1, np.int64), self.shards.read_ends(self.split)[:-1]))

    @cached_property
    def full_lengths(self) -> Ints:
        """Return the tokens of each sample."""
        return self.shards.read_ends(self.split) - self.starts

    @cached_property
    def counts(self) -> Ints:
        """Return the targets with a loss of each sample, of those that the sequence holds."""
        marks = self.shards.marks[self.split]
        counts = np.add.reduceat(marks, self.starts, dtype=np.int64) if len(self.starts) else self.starts
        for sample in np.flatnonzero(self.full_lengths > self.sequence):
            start = self.starts[sample]
            counts[sample] = np.count_nonzero(marks[start : start + self.sequence])
        return counts

    @property
    def fill_ratio(self) -> float:
        """Return the share of the sequences' tokens that are not padding."""
        held = np.minimum(self.full_lengths[self._sequences[0]], self.sequence)
        return float(held.sum()) / max(1, self.windows * self.sequence)

    @cached_property
    def _sequences(self) -> tuple[Ints, Ints]:
        """Return the samples in the order of the sequences [samples], and where each sequence begins [windows + 1]."""
        samples = np.flatnonzero(self._find_kept_samples())
        if self.packing == "none":
            return samples, np.arange(len(samples) + 1)
        bins = pack(np.minimum(self.full_lengths[samples], self.sequence), size=self.sequence)
        order = np.array([sample for members in bins for sample in members], np.int64)
        return samples[order], np.cumsum([0, *map(len, bins)])

    def _find_kept_samples(self) -> NDArray[np.bool_]:
        """Tell of each sample whether it is read."""
        kept = self.counts > 0
        return kept & (self.full_lengths <= self.sequence) if self.excess == "drop" else kept

    @cached_property
    def _counts_by_window(self) -> Ints:
        samples, begins = self._sequences
        return np.add.reduceat(self.counts[samples], begins[:-1]) if len(samples) else samples

    def describe_excess(self) -> str | None:
        """Return a line about the samples that are longer than the sequence; None if there are none."""
        longer = self.full_lengths > self.sequence
        if not longer.any():
            return None
        n_longer, total = int(longer.sum()), len(longer)
        what = f"{n_longer:,} of {total:,} {self.split} samples are longer than {self.sequence:,} tokens"
        if self.excess == "drop":
            return f"{what} and are left out"
        lost = 1 - self.counts.sum() / max(1, self.shards.index.part(self.split).trained_tokens or 0)
        return f"{what} and lose their end: {100 * lost:.1f} % of all trained tokens"

    def check(self, *, global_batch: int) -> None:
        """Raise a ``UserError`` unless the samples fill one batch of ``global_batch`` sequences."""
        if self.windows < global_batch:
            fix = "raise the held-out share" if self.split == "heldout" else "lower the sequence or the global batch"
            raise UserError(
                f"{self.shards.directory}: the {len(self._sequences[0]):,} {self.split} samples fill {self.windows:,} "
                f"sequences of {self.sequence} tokens, but a batch needs {global_batch}; add samples or {fix}"
            )

    def count_targets(self, positions: Ints) -> int:
        """Return the targets with a loss in the samples at ``positions``."""
        return int(self._counts_by_window[self.select(positions)].sum())

    def read_window(self, window: int) -> Ints:
        """Read a sequence: its inputs, then its targets."""
        samples, begins = self._sequences
        row = np.full(self.length, self.shards.tokenizer.end, np.int64)
        inputs, targets = row[: self.sequence], row[self.sequence :]
        targets[:] = IGNORED
        place = 0
        for sample in samples[begins[window] : begins[window + 1]]:
            start = int(self.starts[sample])
            length = int(min(self.full_lengths[sample], self.sequence))
            tokens = self.shards.read(self.split, start=start, count=length).astype(np.int64)
            marks = self.shards.marks[self.split][start + 1 : start + length]
            inputs[place : place + length] = tokens
            targets[place : place + length - 1] = np.where(marks, tokens[1:], IGNORED)
            targets[place + length - 1] = LAST
            place += length
        return row


@dataclass(frozen=True)
class PairLoader(PackedLoader):
    """A loader of preference pairs: a sequence for the chosen completion, and the next for the rejected one.

    A pair of which either is to be left out is left out.
    """

    packing: Packing = "none"

    @cached_property
    def _sequences(self) -> tuple[Ints, Ints]:
        kept = self._find_kept_samples().reshape(-1, 2).all(1).repeat(2)
        samples = np.flatnonzero(kept)
        return samples, np.arange(len(samples) + 1)

    def select(self, positions: Ints) -> Ints:
        """Return the sequences at ``positions`` [rows]; the order of an epoch is one of pairs."""
        pairs, ends = np.divmod(positions, 2)
        return 2 * permute_epochs(pairs, size=self.windows // 2, seed=self.seed) + ends

    def count_targets(self, positions: Ints) -> int:
        """Return the pairs at ``positions``, over which the loss is a mean."""
        return len(positions) // 2


def pack(lengths: Ints, *, size: int) -> list[list[int]]:
    """Assign items of ``lengths``, none above ``size``, to bins of ``size`` by best fit decreasing.

    Returns the items of each bin, in the order in which they were assigned.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left → bins that have it
    rooms: list[int] = []  # the keys of ``by_room``, ascending
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            chosen, room = len(bins), size
            bins.append([])
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        bins[chosen].append(item)
        if left := room - length:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(chosen)
    return bins
