"""Tokenizers: plain bytes, a byte-level BPE trained on the corpus, or any ``tokenizer.json``.

A tokenizer is identified by its fingerprint, the sha256 of its file, so that shards cannot be read with another one.
Every tokenizer has an end-of-document token, which ``encode`` never returns: only packing writes it.
BPE: Sennrich et al., arXiv:1508.07909; over bytes: GPT-2 (Radford et al. 2019); by Hugging Face ``tokenizers``, which
is imported on first use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UserError
from fivefold.text_files import read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HuggingFace

Tokens = NDArray[np.unsignedinteger[Any]]

BYTES_TEXT = '{"version": "1.0", "model": {"type": "fivefold-bytes", "end": 0}}'
OWN_END = "<|end|>"
# Names of the end-of-document token, in the order in which they are looked for: our own; GPT-2, Qwen and OLMo;
# Llama 3; DeepSeek; Gemma; Llama 2 and Mistral.
KNOWN_ENDS = (OWN_END, "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")


class Tokenizer(Protocol):
    """The interface of a tokenizer that corpus preparation and the training loop need."""

    @property
    def vocab(self) -> int:
        """Return the size of the vocabulary: every token id is below it."""

    @property
    def end(self) -> int:
        """Return the id of the end-of-document token."""

    @property
    def text(self) -> str:
        """Return the content of its ``tokenizer.json``."""

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of ``text``, in hexadecimal."""

    def encode(self, text: str) -> Tokens:
        """Return the token ids [n] of ``text``, without the end of document."""

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[Tokens, NDArray[np.int64]]:
        """Return the ids [n] of ``text``, in which special tokens are read as such, and their characters [n, 2].

        ``special``: add the tokens that the tokenizer puts around a text, such as its beginning of sequence.
        """

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD.

        ``special``: keep special tokens in the text.
        """


def choose_dtype(vocab: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smaller of uint16 and uint32 that holds every token below ``vocab``."""
    return np.dtype(np.uint16 if vocab <= 2**16 else np.uint32)


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer with one token per byte of UTF-8; token 0, NUL, is the end of document, and text must not hold it."""

    vocab: int = 256
    end: int = 0
    text: str = BYTES_TEXT
    fingerprint: str = _hash_text(BYTES_TEXT)

    def encode(self, text: str) -> Tokens:
        """Return the bytes of ``text`` as uint16 [n]; raises ``UserError`` if it holds a NUL, the end of document."""
        data = text.encode()
        if (offset := data.find(0)) >= 0:
            raise UserError(f"the text holds {data.count(0)} NUL bytes, the first at offset {offset}; remove them")
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[Tokens, NDArray[np.int64]]:
        """Return ``encode`` of ``text`` and the character of each byte; there are no special tokens."""
        lengths = [len(character.encode()) for character in text]
        places = np.repeat(np.arange(len(lengths)), lengths)
        return self.encode(text), np.stack((places, places + 1), axis=1)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ``ids``; an end of document becomes NUL."""
        return bytes(int(i) for i in ids).decode(errors="replace")


@dataclass(frozen=True)
class BpeTokenizer:
    """A Hugging Face tokenizer; ``read`` builds it from the content of a ``tokenizer.json``."""

    vocab: int  # largest id + 1: added tokens may leave gaps
    end: int
    text: str
    fingerprint: str
    rust: HuggingFace

    @classmethod
    def read(cls, text: str, *, origin: str) -> Self:
        """Parse ``text``; raises ``UserError`` that names ``origin`` on failure or without an end-of-document token."""
        from tokenizers import Tokenizer as HuggingFace

        try:
            rust = HuggingFace.from_str(text)
        except Exception as error:  # tokenizers raises a bare Exception for every parse error
            raise UserError(f"{origin}: not a tokenizer.json: {error}") from None
        rust.no_truncation()
        rust.no_padding()
        rust.encode_special_tokens = True  # "<|end|>" inside a document is text, not the end
        ids = rust.get_vocab(with_added_tokens=True)
        end = next((ids[name] for name in KNOWN_ENDS if name in ids), None)
        if end is None:
            raise UserError(f"{origin} has no end-of-document token; add one of {' '.join(KNOWN_ENDS)} to it")
        return cls(vocab=max(ids.values()) + 1, end=end, text=text, fingerprint=_hash_text(text), rust=rust)

    def encode(self, text: str) -> Tokens:
        """Return the token ids [n] of ``text``, with no special token added."""
        return np.array(self.rust.encode(text, add_special_tokens=False).ids, choose_dtype(self.vocab))

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[Tokens, NDArray[np.int64]]:
        """Return the ids [n] of ``text`` and the characters [n, 2] of each; special tokens have those of their name."""
        self.rust.encode_special_tokens = False
        try:
            encoding = self.rust.encode(text, add_special_tokens=special)
        finally:
            self.rust.encode_special_tokens = True
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        return np.array(encoding.ids, choose_dtype(self.vocab)), offsets

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ``ids``; special tokens are left out unless they are asked for."""
        return str(self.rust.decode([int(i) for i in ids], skip_special_tokens=not special))


def train_bpe(texts: Iterable[str], *, vocab: int) -> BpeTokenizer:
    """Train a byte-level BPE of exactly ``vocab`` tokens: 256 bytes, ``<|end|>`` and the merges that ``texts`` yield.

    Deterministic. Reads ``texts`` once, lazily, so that the caller can show progress. Raises ``UserError`` for too
    little text.
    """
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab < 257:
        raise UserError(f"bpe:{vocab} is below 257, the 256 bytes and the end of document; try bpe:4096")
    rust = HuggingFace(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[OWN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rust.train_from_iterator(texts, trainer=trainer)
    if (size := rust.get_vocab_size()) < vocab:
        raise UserError(f"bpe:{vocab} needs more text: this corpus yields {size} tokens; add text or use bpe:{size}")
    return BpeTokenizer.read(rust.to_str(), origin=f"bpe:{vocab}")


def is_built_in(spec: str) -> bool:
    """Return whether the tokenizer that ``spec`` names is bytes or trained here, and not read from a file."""
    return spec == "bytes" or spec.startswith("bpe:")


def load(path: Path) -> Tokenizer:
    """Read the tokenizer file ``path``, or ``tokenizer.json`` in the folder ``path``; ``UserError`` on failure."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise UserError(f"unknown tokenizer {str(path)!r}: write bytes, bpe:4096, or the path of a tokenizer.json")
    text = read_text(file, kind="UTF-8 text")
    return ByteTokenizer() if text == BYTES_TEXT else BpeTokenizer.read(text, origin=str(file))


def build_tokenizer(spec: str, *, texts: Callable[[], Iterable[str]] = tuple) -> Tokenizer:
    """Build the tokenizer that ``spec`` names: ``bytes``, ``bpe:N`` (trained on ``texts()``), or a path."""
    if not is_built_in(spec):
        return load(Path(spec))
    if spec == "bytes":
        return ByteTokenizer()
    size = spec.removeprefix("bpe:")
    if not (size.isascii() and size.isdigit()):
        raise UserError(f"{spec!r}: the vocabulary must be a whole number; try bpe:4096")
    return train_bpe(texts(), vocab=int(size))
