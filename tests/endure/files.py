"""Files as users have them: complete, of another kind, broken, endless, or not files at all."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Link(NamedTuple):
    """A symbolic link to ``target``."""

    target: str


class Pipe(NamedTuple):
    """Make a FIFO that has no writer."""


class Sparse(NamedTuple):
    """A file of ``size`` zero bytes that takes no space on the disk."""

    size: int


Content = str | bytes | Link | Pipe | Sparse | None  # None: a folder

DEEP = "[" * 3000
BROKEN: tuple[Content, ...] = (
    "", " ", "\n", "\ufeff{}", "null", "true", "3", '"text"', "[]", "[1]", "[[]]", "{", '{"a"', '{"a": 1,}', "{}{}",
    '{"a": NaN}', '{"a": 1e999}', f'{{"a": {DEEP}', DEEP, "a", "a = ", "a = 1\na = 2\n", "[a]\n[a]\n", "= 1", "a = [1",
    "a = 1979-05-27", "a.b = 1\na = 2\n", "---\na: b\n  c: d\n", "\x00\x01", "a" * 100_000, "é" * 1000, "{}\n" * 2000,
    b"\x80\x02}q\x00.", b"\xff\xfe\x00\x00", b"PK\x03\x04" + bytes(60), b"\x1f\x8b\x08" + bytes(40), bytes(4096),
    b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"\xff" * 16, b"\x7fELF" + bytes(100),
    None, Link("/dev/null"), Link("nowhere"), Link("."), Link("/dev/zero"), Pipe(), Pipe(), Sparse(2 * 2**30),
)  # fmt: skip


def break_file(rng: random.Random, text: str) -> Content:
    """Return a broken file: one of ``BROKEN``, or ``text`` cut short or with a character changed, or in other bytes."""
    text = text.encode(errors="replace").decode()  # a lone surrogate cannot be written in any bytes
    place = rng.randrange(len(text)) if text else 0
    return rng.choice(
        (
            rng.choice(BROKEN),
            rng.choice(BROKEN),
            text[:place],
            text[:place].encode() + b"\xe9",
            text[:place] + rng.choice("}\"'=[é\x00,:") + text[place + 1 :],
            text.encode("utf-16"),
            text + text,
        )
    )


@contextlib.contextmanager
def folder(files: Mapping[str, Content]) -> Iterator[None]:
    """Make the files in a new folder, which is the working directory meanwhile and is removed afterwards."""
    former = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        for path, content in files.items():
            _write(Path(path), content)
        try:
            yield
        finally:
            os.chdir(former)


def _write(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    match content:
        case None:
            path.mkdir(exist_ok=True)
        case Link(target):
            path.symlink_to(target)
        case Pipe():
            os.mkfifo(path)
        case Sparse(size):
            path.touch()
            os.truncate(path, size)
        case bytes():
            path.write_bytes(content)
        case str():
            path.write_bytes(content.encode("utf-8", "surrogatepass"))  # a lone surrogate is invalid UTF-8
