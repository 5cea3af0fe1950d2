"""Explains what a failed or strange run has left behind. No torch, and nothing in a file is run.

explain(files) → by what each holds, an Explanation of
out_of_memory · snapshot · category   a log's message; a memory snapshot, and what its blocks were
flight_recorder · stacks · losses     dumps of a hang, by rank; a log of losses
timeout                               lines of NCCL's watchdog in a log
against                               what the planner predicts beside it; the least change that fits
frames · safe_pickle                  lines of code in stacks; pickles that hold data alone
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.bounded_file import open_stream
from fivefold.diagnosis.explain import flight_recorder, losses, out_of_memory, safe_pickle, snapshot, stacks, timeout
from fivefold.record import Mistake
from fivefold.results.explanation import Explanation

TAIL = 64 << 20  # bytes of a longer text's end that are read
RANK = re.compile(r"(?:rank|trace|dump|_)[_.-]?(\d{1,6})(?:\.\w+)?$")


class _Strange(Mistake):
    """A text that is none of the forms."""


class _Ranks(NamedTuple):
    """What only all ranks together explain: dumps of flight recorders, and texts of stacks by name."""

    dumps: dict[int, dict[str, Any]]
    dump_files: list[str]
    stacks: dict[str, str]
    stack_files: list[str]


def explain(paths: Sequence[Path], *, top: int = 12) -> tuple[Explanation, ...]:
    """Explain every file, or of a folder every one that it can; dumps of ranks together. ``top``: how many lines are
    listed.
    """
    found: list[Explanation] = []
    ranks = _Ranks({}, [], {}, [])
    strange: list[_Strange] = []
    for path, alone in _files(paths):
        try:
            found += _read(path, ranks, top=top)
        except _Strange as other:
            if alone:
                raise
            strange.append(other)
    if strange and not (found or ranks.dumps or ranks.stacks):
        raise strange[0]
    if ranks.dumps:
        with _as_torch_writes(ranks.dump_files[0]):
            found.append(flight_recorder.explain(ranks.dumps, files=tuple(ranks.dump_files)))
    if ranks.stacks:
        found.append(stacks.explain(ranks.stacks, files=tuple(ranks.stack_files)))
    return tuple(found)


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Files, and whether each was named itself."""
    for path in paths:
        if not path.exists():
            raise Mistake(f"{path}: no such file")
        within = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        if not within:
            raise Mistake(f"{path}: a folder without files")
        yield from ((each, each is path) for each in within)


def _read(path: Path, ranks: _Ranks, *, top: int) -> list[Explanation]:
    try:
        with open_stream(path) as file:
            return _read_open(path, file, ranks, top=top)
    except OSError as error:
        raise Mistake(f"{path}: cannot be read: {error.strerror or error}") from None


def _read_open(path: Path, file: BufferedReader, ranks: _Ranks, *, top: int) -> list[Explanation]:
    begin = file.peek(4096)[:4096]
    if not begin.strip():
        raise Mistake(f"{path}: an empty file")
    if begin.startswith(safe_pickle.MAGIC):
        return _of_data(safe_pickle.load_open(file, path=path), path, ranks, top=top)
    if begin.startswith(b"PK\x03\x04"):
        raise Mistake(f"{path}: a zip archive, as torch.save writes; a snapshot is written by _dump_snapshot")
    if b"\0" in begin:  # binary, or zeros that a full disk left
        raise _Strange(f"{path}: {KNOWN}")
    text = _text(file)
    data = _json(text) if begin.lstrip().startswith((b"{", b"[")) else None
    if snapshot.is_snapshot(data) or flight_recorder.is_dump(data):
        return _of_data(data, path, ranks, top=top)
    return _of_text(text, path, ranks)


KNOWN = (
    "neither a memory snapshot, a flight recorder, a stack dump nor a log with an out-of-memory message or losses: "
    "see docs/how-to/explain.md for how each is written"
)


def _text(file: BufferedReader) -> str:
    """The text of a file; of a long one its end, of a long pipe its beginning."""
    if file.seekable():
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL))
    return file.read(TAIL).decode("utf-8", errors="replace")


@contextmanager
def _as_torch_writes(file: str) -> Iterator[None]:
    """Turn what a file of another form raises into one line."""
    try:
        yield
    except Mistake:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise Mistake(f"{file}: not in the form in which torch writes it: {type(error).__name__} {reason}") from error


def _json(text: str) -> Any:
    """What a text of JSON holds; None if it is none, such as lines of JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _of_data(data: Any, path: Path, ranks: _Ranks, *, top: int) -> list[Explanation]:
    if snapshot.is_snapshot(data):
        with _as_torch_writes(str(path)):
            return [snapshot.explain(data, files=(str(path),), top=top)]
    if not flight_recorder.is_dump(data):
        keys = f" of {', '.join(map(str, list(data)[:6]))}" if isinstance(data, dict) else ""
        raise Mistake(f"{path}: holds a {type(data).__name__}{keys[:200]}; it is {KNOWN}")
    rank = _rank_of(path, data.get("rank"))
    if rank is None:
        rank = next(number for number in range(len(ranks.dumps) + 1) if number not in ranks.dumps)
    if rank in ranks.dumps:
        raise Mistake(f"{path}: rank {rank} has another dump, {ranks.dump_files[-1]}; give one of each rank")
    ranks.dumps[rank] = data
    ranks.dump_files.append(str(path))
    return []


def _of_text(text: str, path: Path, ranks: _Ranks) -> list[Explanation]:
    files, found = (str(path),), list[Explanation]()
    if stacks.is_stacks(text):
        rank = _rank_of(path, None)
        ranks.stacks[path.name if rank is None else str(rank)] = text
        ranks.stack_files.append(str(path))
    said = (out_of_memory.explain(text, files=files), timeout.explain(text, files=files))
    for each in (*said, losses.explain(losses.read(text), files=files)):
        found += [each] if each is not None else []
    if not found and str(path) not in ranks.stack_files:
        raise _Strange(f"{path}: {KNOWN}")
    return found


def _rank_of(path: Path, said: object) -> int | None:
    """The rank whose file it is, by its name or by what it says."""
    match = RANK.search(path.name)
    if match is not None:
        return int(match[1])
    return said if isinstance(said, int) and not isinstance(said, bool) else None
