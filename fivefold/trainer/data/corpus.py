"""Reads documents from a corpus: Python's standard library, or any file or folder of text.

A document is a line of .jsonl, a row of .parquet, or a full .txt, .md or .py file; a text file longer than 64 KiB is
cut at line ends into several, so that one long file can be split into training and held-out text. Files are read in
slices that end where a document ends: memory is bounded, and processes can share one file.
"""

from __future__ import annotations

import json
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from fivefold.errors import UserError
from fivefold.units import KIB, MIB

STDLIB = "stdlib"
TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
RECORD_SUFFIXES = (".jsonl", ".parquet")  # whose documents are records of named fields
DOCUMENT_BYTES = 64 * KIB  # longest document of a text file, give or take a line
LINES_BYTES = MIB  # slice of a .jsonl file
# Folders skipped under the standard library: tests, of which some are not UTF-8 on purpose and which some systems
# package excepted, and installed packages, which are not the standard library.
STDLIB_SKIPS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus; ``name``: its path inside the corpus; ``changed_ns``: its mtime in ns."""

    path: Path
    name: str
    size_bytes: int
    changed_ns: int


@dataclass(frozen=True)
class FileSlice:
    """A slice of a file: byte offsets ``start`` to ``stop``, each moved on to the next end of a document.

    In a .parquet file, the number of one row group.
    """

    path: Path
    start: int
    stop: int
    size_bytes: int


def list_files(corpus: str) -> list[CorpusFile]:
    """List the files of ``corpus`` (``stdlib``, a file or a folder), sorted by name, without hidden ones.

    Raises ``UserError`` if there are none, they cannot be read or all are empty.
    """
    if corpus == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        python_files = [path for path in _walk(root, skip=STDLIB_SKIPS) if path.suffix == ".py" and _is_utf8(path)]
        return [_describe_file(path, root) for path in python_files]
    root = Path(corpus)
    if root.is_file():
        paths, root = [root], root.parent
    elif root.is_dir():
        paths = _walk(root, skip=frozenset())
    else:
        raise UserError(f"{corpus}: no such file or folder; the corpus is {STDLIB!r} or a path")
    files = [_describe_file(path, root) for path in paths if path.suffix in SUFFIXES]
    if not files:
        raise UserError(f"{corpus}: no file ends in {' '.join(SUFFIXES)}; {_count_suffixes(paths)}")
    if not any(file.size_bytes for file in files):
        raise UserError(f"{corpus}: the corpus is empty: {len(files)} files of 0 bytes; add text")
    return files


def _walk(root: Path, *, skip: frozenset[str]) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}")

    paths: list[Path] = []
    for folder, inner, names in os.walk(root, onerror=refuse):
        inner[:] = [name for name in inner if name not in skip and not name.startswith(".")]
        paths += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def _describe_file(path: Path, root: Path) -> CorpusFile:
    """Return the size and time of a file of the corpus; a ``UserError`` if it cannot be read twice."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(
            f"{path}: not a regular file; the corpus is read several times, so write a pipe to a file first"
        )
    return CorpusFile(path, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _count_suffixes(paths: list[Path]) -> str:
    if not paths:
        return "it holds no files"
    counts = Counter(path.suffix or "no ending" for path in paths).most_common(3)
    return f"it holds {', '.join(f'{count} of {suffix}' for suffix, count in counts)}"


def list_slices(file: CorpusFile) -> Iterator[FileSlice]:
    """Yield the slices of ``file`` in order; their ``size_bytes`` add up to the file's."""
    if file.path.suffix == ".parquet":
        with _open_parquet(file.path) as parquet:
            groups = parquet.num_row_groups
        for group in range(groups):
            share = file.size_bytes * (group + 1) // groups - file.size_bytes * group // groups
            yield FileSlice(file.path, group, group + 1, share)
        return
    step = DOCUMENT_BYTES if file.path.suffix in TEXT_SUFFIXES else LINES_BYTES
    for start in range(0, file.size_bytes, step):
        stop = min(start + step, file.size_bytes)
        yield FileSlice(file.path, start, stop, stop - start)


def read_slice(piece: FileSlice, *, key: str) -> Iterator[str]:
    """Yield the documents of one slice, not cleaned; ``key``: the field of .jsonl or the column of .parquet.

    Raises ``UserError`` for a file that cannot be read, is not UTF-8 or has no ``key``.
    """
    if piece.path.suffix in RECORD_SUFFIXES:
        yield from read_records(piece, parse=partial(_get_field, key=key), columns=(key,))
    else:
        yield _decode_utf8(piece.path, *_read_bytes(piece))


Parsed = TypeVar("Parsed")


def read_records(
    piece: FileSlice, *, parse: Callable[[Mapping[str, Any]], Parsed], columns: tuple[str, ...] | None = None
) -> Iterator[Parsed]:
    """Yield ``parse`` of each record of a slice of .jsonl or .parquet; ``columns``: those that it needs, None: all.

    Raises ``UserError`` for a file that cannot be read. A ``ValueError`` of ``parse`` becomes one that says where.
    """
    if piece.path.suffix == ".parquet":
        yield from _read_rows(piece, parse, columns)
    elif piece.path.suffix == ".jsonl":
        yield from _read_lines(piece.path, *_read_bytes(piece), parse)
    else:
        raise UserError(f"{piece.path} holds text; records are read from files in {' and '.join(RECORD_SUFFIXES)}")


def clean_text(text: str) -> str:
    """Return ``text`` without NUL, the end of document of the byte tokenizer; "" if only whitespace remains."""
    text = text.replace("\0", "")
    return text if text.strip() else ""


def read_documents(files: Iterable[CorpusFile], *, key: str = "text") -> Iterator[str]:
    """Yield every document of ``files`` in order, cleaned, without blank ones."""
    for file in files:
        for piece in list_slices(file):
            yield from filter(None, map(clean_text, read_slice(piece, key=key)))


def _read_bytes(piece: FileSlice) -> tuple[int, bytes]:
    """Return the offset of a slice's first document, and its bytes."""
    try:
        with piece.path.open("rb") as file:
            limit = DOCUMENT_BYTES if piece.path.suffix in TEXT_SUFFIXES else -1
            start = _find_document_end(file, piece.start, limit)
            stop = _find_document_end(file, piece.stop, limit)
            file.seek(start)
            return start, file.read(stop - start)
    except OSError as error:
        raise UserError(f"{piece.path} cannot be read: {error.strerror}") from None


def _find_document_end(file: BinaryIO, offset: int, limit: int) -> int:
    """Return the end of the line at ``offset``; if it is ``limit`` or more bytes away, the next UTF-8 character."""
    if offset == 0:  # a document begins with the file
        return 0
    file.seek(offset)
    line = file.readline(limit)
    if limit < 0 or len(line) < limit or line.endswith(b"\n"):
        return offset + len(line)
    # A character has at most four bytes; all but its first begin with the bits 10.
    return offset + next((i for i, byte in enumerate(line[:4]) if byte & 0xC0 != 0x80), 0)


def _decode_utf8(path: Path, start: int, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        offset = start + error.start
        raise UserError(
            f"{path}: not UTF-8: byte 0x{data[error.start]:02x} at offset {offset}; convert the file or leave it out"
        ) from None


def _read_lines(path: Path, start: int, data: bytes, parse: Callable[[Mapping[str, Any]], Parsed]) -> Iterator[Parsed]:
    for line in data.split(b"\n"):
        if line.strip():
            text = _decode_utf8(path, start, line)
            try:
                yield parse(_record(text))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}:{_find_line_number(path, start)}: {error}") from None
        start += len(line) + 1


def _record(line: str) -> Mapping[str, Any]:
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"is of type {type(record).__name__}, not an object with named fields")
    return record


def _get_field(record: Mapping[str, Any], *, key: str) -> str:
    """Return the text of a record."""
    if key not in record:
        raise ValueError(
            f"has no key {key!r}; it has {', '.join(map(repr, record)) or 'none'}; set [data] key to one of these"
        )
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(
            f"the value of {key!r} is of type {type(text).__name__}, not text; set [data] key to a key with text"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the value of {key!r} holds half of a surrogate pair, which is not a character; remove it"
        ) from None
    return text


def _find_line_number(path: Path, offset: int) -> int:
    """Return the number (from 1) of the line at byte ``offset``."""
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(min(MIB, offset - file.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)


def _read_rows(
    piece: FileSlice, parse: Callable[[Mapping[str, Any]], Parsed], columns: tuple[str, ...] | None
) -> Iterator[Parsed]:
    """Yield ``parse`` of each row of a group, without the fields that are null in it."""
    with _open_parquet(piece.path) as parquet:
        names = parquet.schema_arrow.names
        for column in columns or ():
            if column not in names:
                raise UserError(f"{piece.path} has no column {column!r}; it has {', '.join(map(repr, names))}")
        rows = parquet.read_row_group(piece.start, columns=columns and list(columns)).to_pylist()
        for number, row in enumerate(rows):
            record = {name: value for name, value in row.items() if value is not None}
            if record:
                try:
                    yield parse(record)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{piece.path}: row {number} of row group {piece.start}: {error}") from None


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    """Open a ``pyarrow.parquet.ParquetFile``; an error that pyarrow raises becomes a ``UserError``."""
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read as Parquet: {reason}") from None
