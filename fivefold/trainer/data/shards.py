"""Token shards on disk, memory-mapped: the format, its reader and its writer.

    directory/  index.json  tokenizer.json  train-00000.bin …  train-ends.bin  heldout-00000.bin …  heldout-ends.bin

A split is one array of tokens: its documents in the order of the corpus, each followed by the end-of-document token.
``*-ends.bin`` holds, as int64, the offset of each document's end in tokens: one past its end token. Supervised samples
have no end token of ours, and ``*-trained.bin`` holds a byte for each token: 1 if it is a target with a loss.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from fivefold.errors import UserError
from fivefold.record import Record
from fivefold.text_files import read_file
from fivefold.trainer.data.tokenizer import Tokenizer, Tokens, load

VERSION = 2
INDEX, TOKENIZER = "index.json", "tokenizer.json"
SHARD_NAME = re.compile(r"(train|heldout)-(\d{5,}|ends|trained)\.bin")
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


class Shard(Record):
    """A file of ``tokens`` tokens. All shards of a split but its last hold the same number."""

    name: str
    tokens: PositiveInt


class SplitEntry(Record):
    """The entry of one split in ``index.json``.

    ``text_bytes``: UTF-8 bytes without ends, which convert nats per token to nats per byte; ``sha256``: hash of all
    tokens of the split in order, whatever the size of its shards.
    """

    tokens: NonNegativeInt
    documents: NonNegativeInt
    text_bytes: NonNegativeInt
    sha256: str
    shards: tuple[Shard, ...]
    ends: str
    trained: str | None = None  # file of the marks of supervised samples
    trained_tokens: NonNegativeInt | None = None  # the targets with a loss; None: all


class Index(Record):
    """The file ``index.json``. ``request``: hash of the arguments of ``prepare``, which identifies finished work."""

    version: PositiveInt = VERSION
    corpus: str
    request: str
    tokenizer: str  # fingerprint
    dtype: Literal["uint16", "uint32"]
    holdout: NonNegativeFloat
    nul_bytes: NonNegativeInt  # removed from the text
    train: SplitEntry
    heldout: SplitEntry

    def part(self, split: Split) -> SplitEntry:
        """Return the entry of ``split``."""
        return self.train if split == "train" else self.heldout

    @property
    def text(self) -> str:
        """Return the sha256 of the tokens of both splits in order, independent of the files they came from."""
        return hashlib.sha256(f"{self.train.sha256} {self.heldout.sha256}".encode()).hexdigest()


@dataclass(frozen=True)
class Shards:
    """An opened folder of shards, memory-mapped: tokens are read from disk when they are accessed."""

    directory: Path
    index: Index
    tokenizer: Tokenizer
    maps: Mapping[Split, tuple[Tokens, ...]]
    marks: Mapping[Split, NDArray[np.uint8]]  # of supervised samples, by token

    @classmethod
    def open(cls, directory: Path, *, fingerprint: str | None = None) -> Self:
        """Map the shards of ``directory``.

        Raises ``UserError`` if a file is missing or cut short, or the tokenizer differs.

        ``fingerprint``: the fingerprint of the tokenizer that the caller needs, such as a checkpoint's; None: any.
        """
        index = read_index(directory)
        tokenizer = load(directory / TOKENIZER)
        if tokenizer.fingerprint != index.tokenizer:
            raise UserError(f"{directory / TOKENIZER} is not the tokenizer of these shards; prepare the corpus again")
        if fingerprint not in (None, index.tokenizer):
            raise UserError(
                f"{directory}: made with another tokenizer ({index.tokenizer[:12]}, expected {fingerprint[:12]}); "
                "prepare the corpus with the tokenizer that the model was trained with"
            )
        maps: dict[Split, tuple[Tokens, ...]] = {}
        marks: dict[Split, NDArray[np.uint8]] = {}
        for split in SPLITS:
            part = index.part(split)
            _check_size(directory / part.ends, 8 * part.documents)
            maps[split] = tuple(_map(directory / shard.name, index.dtype, shard.tokens) for shard in part.shards)
            if part.trained is not None:
                marks[split] = np.empty(0, np.uint8)
                if part.tokens:
                    marks[split] = _map(directory / part.trained, "uint8", part.tokens)
        return cls(directory, index, tokenizer, maps, marks)

    def read(self, split: Split, *, start: int, count: int) -> Tokens:
        """Copy tokens ``start`` to ``start + count`` of ``split``, across shards; raises ``IndexError`` outside."""
        part = self.index.part(split)
        if not 0 <= start <= start + count <= part.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {part.tokens}")
        slices = []
        while count:
            shard, offset = divmod(start, part.shards[0].tokens)
            slices.append(self.maps[split][shard][offset : offset + count])
            start, count = start + len(slices[-1]), count - len(slices[-1])
        return np.concatenate(slices) if slices else np.empty(0, self.index.dtype)

    def read_ends(self, split: Split) -> NDArray[np.int64]:
        """Read the token offset of each document's end [documents], ascending; the last is the split's token count."""
        part = self.index.part(split)
        return np.fromfile(self.directory / part.ends, np.int64)


def read_index(directory: Path) -> Index:
    """Read ``index.json`` in ``directory``; raises ``UserError`` if there is none or it has another version."""
    path = directory / INDEX
    if not path.exists():
        raise UserError(f"{directory} holds no prepared corpus; run `fivefold data` first")
    values = read_file(path)
    if isinstance(version := values.get("version"), int) and version > VERSION:
        raise UserError(f"{path}: written by a newer fivefold (version {version}, this one reads {VERSION}); update it")
    if isinstance(version, int) and version < VERSION:
        raise UserError(
            f"{path}: written by an older fivefold (version {version}, this one {VERSION}); prepare it again"
        )
    return Index.read(values, origin=str(path))


def _map(path: Path, dtype: str, tokens: int) -> Tokens:
    _check_size(path, tokens * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, mode="r")


def _check_size(path: Path, expected: int) -> None:
    """Raise a ``UserError`` unless ``path`` is a file of ``expected`` bytes."""
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; prepare the corpus again") from None
    if actual != expected:
        state = f"cut short by {expected - actual}" if actual < expected else f"longer by {actual - expected}"
        raise UserError(f"{path}: {state} bytes, should be {expected}; prepare the corpus again")


@dataclass
class SplitWriter:
    """A writer that appends documents to the shards of one split in ``directory``."""

    directory: Path
    split: Split
    shard_tokens: int
    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)  # over the tokens so far

    trained_tokens: int | None = None  # None: documents without marks

    @property
    def ends_name(self) -> str:
        """Return the name of the file of document ends."""
        return f"{self.split}-ends.bin"

    @property
    def trained_name(self) -> str:
        """Return the name of the file of marks."""
        return f"{self.split}-trained.bin"

    def add(
        self, tokens: Tokens, *, lengths: NDArray[np.int64], text_bytes: int, trained: NDArray[np.bool_] | None = None
    ) -> None:
        """Append complete documents: their ``tokens``, ends included, and their ``lengths`` [documents].

        ``trained`` [tokens]: which tokens are targets with a loss, if not all are.
        """
        if trained is not None:
            append(self.directory / self.trained_name, trained.astype(np.uint8).tobytes())
            self.trained_tokens = (self.trained_tokens or 0) + int(trained.sum())
            self.digest.update(trained.tobytes())
        append(self.directory / self.ends_name, (self.tokens + np.cumsum(lengths)).tobytes())
        self.documents += len(lengths)
        self.text_bytes += text_bytes
        self.digest.update(tokens.tobytes())
        while len(tokens):
            shard, offset = divmod(self.tokens, self.shard_tokens)
            shard_part, tokens = np.split(tokens, [self.shard_tokens - offset])
            append(self.directory / self._shard(shard), shard_part.tobytes())
            self.tokens += len(shard_part)

    def _shard(self, number: int) -> str:
        return f"{self.split}-{number:05d}.bin"

    def finish(self) -> SplitEntry:
        """Return the index entry of the written tokens."""
        sizes = [self.shard_tokens] * (self.tokens // self.shard_tokens) + [self.tokens % self.shard_tokens]
        shards = [Shard(name=self._shard(number), tokens=size) for number, size in enumerate(sizes) if size]
        return SplitEntry(
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=self.text_bytes,
            sha256=self.digest.hexdigest(),
            shards=tuple(shards),
            ends=self.ends_name,
            trained=None if self.trained_tokens is None else self.trained_name,
            trained_tokens=self.trained_tokens,
        )


def append(path: Path, data: bytes) -> None:
    """Append ``data`` to the file ``path``. All shards are written by this function."""
    with path.open("ab") as file:
        file.write(data)
