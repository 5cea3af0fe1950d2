"""Tokenizes documents, in this process or in a pool of processes.

A unit of work is file slices of 1 MiB or a little more. Results come back in order, so that memory is bounded and the
output does not depend on the number of processes. Workers are spawned and import no torch.
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
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import RunFailure
from fivefold.trainer.data.corpus import CorpusFile, FileSlice, clean_text, list_slices, read_records, read_slice
from fivefold.trainer.data.shards import SPLITS, Split
from fivefold.trainer.data.supervised import Mask, SampleFormat, TrainingSample
from fivefold.trainer.data.tokenizer import Tokenizer, Tokens, load
from fivefold.units import MIB

WORK_BYTES = MIB
TEXT_HASHES = 2**64


@dataclass(frozen=True)
class EncodingSettings:
    """The settings by which every document is processed.

    ``key``: field or column of its text; ``samples``: how records become supervised samples, None for text;
    ``tokenizer``: path; ``bound``: a document is held out if its ``hash_text`` is below it.
    """

    key: str
    samples: SampleFormat | None
    tokenizer: Path
    fingerprint: str
    dtype: str
    bound: int


@dataclass(frozen=True)
class Documents:
    """The documents of one split: all tokens with end tokens [tokens], lengths [documents], UTF-8 bytes of text.

    ``trained`` [tokens]: of supervised samples, which tokens are targets with a loss.
    """

    tokens: Tokens
    lengths: NDArray[np.int64]
    text_bytes: int
    trained: Mask | None = None


@dataclass(frozen=True)
class Encoded:
    """The result of one unit of work: bytes read, NUL bytes removed, smallest ``hash_text``, and documents by split."""

    size_bytes: int
    nul_bytes: int
    lowest_hash: int
    splits: dict[Split, Documents]


def hash_text(text: str) -> int:
    """Return blake2b of ``text`` as a number from 0 to 2^64 - 1. It decides the split, so duplicates share a split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=b"held-out").digest())


def encode_all(files: Iterable[CorpusFile], *, rule: EncodingSettings, workers: int) -> Generator[Encoded]:
    """Tokenize ``files`` in order; if ``workers`` > 1 in that many processes, with at most twice as many units queued.

    Raises ``RunFailure`` if a worker dies.
    """
    units = _group_slices(files)
    if workers == 1:
        yield from (_encode(unit, rule) for unit in units)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_exit_with_parent)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(_encode, unit, rule))
            if len(waiting) == 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise RunFailure("a tokenizing process was killed, perhaps because memory ran out; try fewer workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _group_slices(files: Iterable[CorpusFile]) -> Iterator[list[FileSlice]]:
    """Group consecutive slices until they have ``WORK_BYTES``."""
    unit: list[FileSlice] = []
    size = 0
    for piece in chain.from_iterable(map(list_slices, files)):
        unit.append(piece)
        size += piece.size_bytes
        if size >= WORK_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def _exit_with_parent() -> None:
    """Set up a worker: ignore SIGINT, which the parent handles, and exit when the parent has died, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@lru_cache(maxsize=1)
def _load(path: Path, fingerprint: str) -> Tokenizer:
    """Load a tokenizer; its fingerprint makes the cache miss when the file changes."""
    tokenizer = load(path)
    assert tokenizer.fingerprint == fingerprint  # in the cache's key, as the file at this path may change
    return tokenizer


def _encode(unit: list[FileSlice], rule: EncodingSettings) -> Encoded:
    """Read, clean, tokenize and split the documents of one unit; runs in a worker."""
    tokenizer = _load(rule.tokenizer, rule.fingerprint)
    if rule.samples is not None:
        return _encode_samples(unit, rule, rule.samples, tokenizer)
    end = np.array([tokenizer.end], rule.dtype)
    nul_bytes, lowest_hash = 0, TEXT_HASHES
    tokens: dict[Split, list[Tokens]] = {split: [end[:0]] for split in SPLITS}
    text_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    for raw_text in chain.from_iterable(read_slice(piece, key=rule.key) for piece in unit):
        nul_bytes += raw_text.count("\0")
        if text := clean_text(raw_text):
            lowest_hash = min(lowest_hash, document_hash := hash_text(text))
            split: Split = "heldout" if document_hash < rule.bound else "train"
            tokens[split].append(np.concatenate((tokenizer.encode(text), end)))
            text_bytes[split] += len(text.encode())
    splits = {split: _join(tokens[split], text_bytes[split]) for split in SPLITS}
    return Encoded(sum(piece.size_bytes for piece in unit), nul_bytes, lowest_hash, splits)


def _encode_samples(
    unit: list[FileSlice], rule: EncodingSettings, samples: SampleFormat, tokenizer: Tokenizer
) -> Encoded:
    """Encode and split the supervised samples of one unit."""
    lowest_hash = TEXT_HASHES
    parts: dict[Split, list[TrainingSample]] = {split: [] for split in SPLITS}
    parse = partial(samples.encode_record, tokenizer=tokenizer)
    for record in chain.from_iterable(read_records(piece, parse=parse) for piece in unit):
        lowest_hash = min(lowest_hash, document_hash := hash_text("".join(sample.text for sample in record)))
        parts["heldout" if document_hash < rule.bound else "train"].extend(record)
    splits = {split: _join_samples(parts[split], rule.dtype) for split in SPLITS}
    return Encoded(sum(piece.size_bytes for piece in unit), 0, lowest_hash, splits)


def _join_samples(samples: list[TrainingSample], dtype: str) -> Documents:
    tokens = [sample.tokens.astype(dtype) for sample in samples]
    return Documents(
        np.concatenate([np.empty(0, dtype), *tokens]),
        np.array([len(sample.tokens) for sample in samples], np.int64),
        sum(len(sample.text.encode()) for sample in samples),
        np.concatenate([np.empty(0, bool), *(sample.trained for sample in samples)]),
    )


def _join(documents: list[Tokens], text_bytes: int) -> Documents:
    """Concatenate ``documents``; the first is empty, sets the dtype where there are no others, and is not counted."""
    lengths = np.array([len(document) for document in documents[1:]], np.int64)
    return Documents(np.concatenate(documents), lengths, text_bytes)
