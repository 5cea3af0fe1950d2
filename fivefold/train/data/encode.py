"""Documents into tokens, in this process or in several.

A unit of work is some MiB of pieces, and its result comes back in order: memory stays bounded, and what comes out
does not depend on the number of processes. Workers are spawned and import no torch.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.record import Fault
from fivefold.train.data.corpus import File, FileSlice, clean, file_slices, read_slice
from fivefold.train.data.shards import SPLITS, Split
from fivefold.train.data.tokenizer import Tokenizer, Tokens, load
from fivefold.units import MIB

WORK_BYTES = MIB
TEXT_HASHES = 2**64


@dataclass(frozen=True)
class Rule:
    """What is done with every document: how it is read, tokenized, and when it is held out (``text_hash`` <
    ``bound``).
    """

    key: str
    tokenizer: Path
    fingerprint: str
    dtype: str
    bound: int


@dataclass(frozen=True)
class Documents:
    """Some documents of one split: tokens with their ends [tokens], lengths [documents], and bytes of text."""

    tokens: Tokens
    lengths: NDArray[np.int64]
    text_bytes: int


@dataclass(frozen=True)
class Encoded:
    """The result of one unit of work; ``lowest`` is the smallest ``text_hash`` of its documents."""

    size_bytes: int
    nul_bytes: int
    lowest: int
    splits: dict[Split, Documents]


def text_hash(text: str) -> int:
    """A number from 0 to 2^64 - 1 that only the text decides: documents below a bound are held out."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=b"held-out").digest())


def encode_all(files: Iterable[File], *, rule: Rule, workers: int) -> Generator[Encoded]:
    """Tokenize ``files`` in order; with ``workers`` > 1 in as many processes, at most twice as many units ahead."""
    units = _units(files)
    if workers == 1:
        yield from (_encode(unit, rule) for unit in units)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_live_and_die_with_parent)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(_encode, unit, rule))
            if len(waiting) == 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise Fault("a tokenizing process died, perhaps for want of memory; try fewer workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _units(files: Iterable[File]) -> Iterator[list[FileSlice]]:
    unit: list[FileSlice] = []
    size = 0
    for piece in chain.from_iterable(map(file_slices, files)):
        unit.append(piece)
        size += piece.size_bytes
        if size >= WORK_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def _live_and_die_with_parent() -> None:
    """Ctrl-C is the parent's to handle; a killed parent, which can tell nobody, must not leave workers behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@lru_cache(maxsize=1)
def _loaded(path: Path, fingerprint: str) -> Tokenizer:
    tokenizer = load(path)
    assert tokenizer.fingerprint == fingerprint  # part of the key: another tokenizer may lie at the same path later
    return tokenizer


def _encode(unit: list[FileSlice], rule: Rule) -> Encoded:
    tokenizer = _loaded(rule.tokenizer, rule.fingerprint)
    end = np.array([tokenizer.end], rule.dtype)
    nul_bytes, lowest = 0, TEXT_HASHES
    tokens: dict[Split, list[Tokens]] = {split: [end[:0]] for split in SPLITS}
    text_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    for raw in chain.from_iterable(read_slice(piece, key=rule.key) for piece in unit):
        nul_bytes += raw.count("\0")
        if text := clean(raw):
            lowest = min(lowest, here := text_hash(text))
            split: Split = "heldout" if here < rule.bound else "train"
            tokens[split].append(np.concatenate((tokenizer.encode(text), end)))
            text_bytes[split] += len(text.encode())
    splits = {split: _join(tokens[split], text_bytes[split]) for split in SPLITS}
    return Encoded(sum(piece.size_bytes for piece in unit), nul_bytes, lowest, splits)


def _join(documents: list[Tokens], text_bytes: int) -> Documents:
    """``documents`` opens with an empty one, which gives the tokens their type and is not counted."""
    lengths = np.array([len(document) for document in documents[1:]], np.int64)
    return Documents(np.concatenate(documents), lengths, text_bytes)
