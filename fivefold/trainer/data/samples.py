"""Prints what a prepared corpus holds: counts of a split, and samples with ⟦ and ⟧ around the text that is trained."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from fivefold.trainer.data.loader import Loader
from fivefold.trainer.data.packing import PackedLoader, PairLoader
from fivefold.trainer.data.shards import Shards

BRACKETS = "⟦", "⟧"


def describe_split(loader: Loader) -> str:
    """Return the counts of a split in a line, and a second line if samples are longer than the sequence."""
    part = loader.shards.index.part(loader.split)
    if not isinstance(loader, PackedLoader):
        return f"{loader.split:8} {part.documents:>9,} documents {part.tokens:>14,} tokens"
    what = f"{part.documents // 2:>9,} pairs  " if isinstance(loader, PairLoader) else f"{part.documents:>9,} samples"
    counts = f"{what} {part.tokens:>14,} tokens, {part.trained_tokens or 0:,} trained"
    sequences = f"{loader.windows:,} sequences of {loader.sequence:,}, {100 * loader.fill_ratio:.0f} % filled"
    line = f"{loader.split:8} {counts}; {sequences}"
    return "\n".join(filter(None, (line, loader.describe_excess())))


def show_pair(shards: Shards, number: int, *, sequence: int) -> str:
    """Return the chosen and the rejected sample of training pair ``number`` as ``show_sample`` does."""
    return "\n".join(
        show_sample(shards, 2 * number + place, sequence=sequence, title=f"pair {number}, {end}")
        for place, end in enumerate(("chosen", "rejected"))
    )


def show_sample(shards: Shards, number: int, *, sequence: int, title: str = "") -> str:
    """Return training sample ``number`` as text, cut to ``sequence`` tokens, with ⟦ and ⟧ around what is trained."""
    part, ends = shards.index.train, shards.read_ends("train")
    start, stop = int(ends[number - 1]) if number else 0, int(ends[number])
    length = min(stop - start, sequence)
    tokens = shards.read("train", start=start, count=length)
    trained = np.arange(length) > 0 if part.trained is None else shards.marks["train"][start : start + length] > 0
    pieces = []
    for is_trained, places in groupby(range(length), key=lambda place: bool(trained[place])):
        text = shards.tokenizer.decode(tokens[list(places)].tolist(), special=True)
        pieces.append(f"{BRACKETS[0]}{text}{BRACKETS[1]}" if is_trained else text)
    cut = f" of {stop - start:,}" if length < stop - start else ""
    return f"{title or f'sample {number}'}: {length:,}{cut} tokens, {int(trained.sum()):,} trained\n{''.join(pieces)}"
