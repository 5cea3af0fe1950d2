"""Explain the files that a failed or unusual run left. Needs no torch, and runs nothing that a file contains.

explain(files) → by the contents of each, an Explanation of
out_of_memory · snapshot              a log's message; a memory snapshot and the categories of its blocks
flight_recorder · stacks · losses     dumps of a hang, by rank; a log of losses
timeout                               lines of NCCL's watchdog in a log
prediction                            comparison with the planner's prediction; the least change that fits
frames · safe_pickle                  lines of code in stacks; pickles that contain only data
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
from fivefold.errors import UserError
from fivefold.results.explanation import Explanation

TAIL_BYTES = 64 << 20  # bytes at the end of a longer text that are read
RANK = re.compile(r"(?:rank|trace|dump|_)[_.-]?(\d{1,6})(?:\.\w+)?$")


class _UnknownFormat(UserError):
    """An error: a file that is empty, as the stacks of a run that was killed, or a text of none of the known forms."""


class _Ranks(NamedTuple):
    """The files that only all ranks together explain: dumps of flight recorders, and stack texts by name."""

    dumps: dict[int, dict[str, Any]]
    dump_files: list[str]
    stacks: dict[str, str]
    stack_files: list[str]


def explain(paths: Sequence[Path], *, top: int = 12) -> tuple[Explanation, ...]:
    """Explain every file, or of a folder every file that it can; dumps of ranks are explained together.

    ``top``: how many lines of code are listed, those that hold the most memory.
    """
    explanations: list[Explanation] = []
    ranks = _Ranks({}, [], {}, [])
    unknown_files: list[_UnknownFormat] = []
    for path, is_named in _list_files(paths):
        try:
            explanations += _explain_file(path, ranks, top=top)
        except _UnknownFormat as unknown:
            if is_named:
                raise
            unknown_files.append(unknown)
    if unknown_files and not (explanations or ranks.dumps or ranks.stacks):
        raise unknown_files[0]
    if ranks.dumps:
        with _convert_format_errors(ranks.dump_files[0]):
            explanations.append(flight_recorder.explain(ranks.dumps, files=tuple(ranks.dump_files)))
    if ranks.stacks:
        explanations.append(stacks.explain(ranks.stacks, files=tuple(ranks.stack_files)))
    return tuple(explanations)


def _list_files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Yield the files, and whether each was named itself."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file")
        files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        if not files:
            raise UserError(
                f"{path}: a folder without files; name one with logs, memory snapshots or flight recorder dumps"
            )
        yield from ((file, file is path) for file in files)


def _explain_file(path: Path, ranks: _Ranks, *, top: int) -> list[Explanation]:
    try:
        with open_stream(path) as file:
            return _explain_open_file(path, file, ranks, top=top)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def _explain_open_file(path: Path, file: BufferedReader, ranks: _Ranks, *, top: int) -> list[Explanation]:
    """Explain one file by its first bytes: a pickle, JSON or text."""
    begin = file.peek(4096)[:4096]
    if not begin.strip():
        raise _UnknownFormat(f"{path} is empty; write the file again")
    if begin.startswith(safe_pickle.MAGIC):
        return _explain_data(safe_pickle.load_open(file, path=path), path, ranks, top=top)
    if begin.startswith(b"PK\x03\x04"):
        raise UserError(f"{path}: a zip archive, as torch.save writes; a snapshot is written by _dump_snapshot")
    if b"\0" in begin:  # binary, or zeros that a full disk left
        raise _UnknownFormat(f"{path}: {UNKNOWN_TEXT}")
    text = _read_text(file)
    data = _parse_json(text) if begin.lstrip().startswith((b"{", b"[")) else None
    if snapshot.is_snapshot(data) or flight_recorder.is_dump(data):
        return _explain_data(data, path, ranks, top=top)
    return _explain_text(text, path, ranks)


UNKNOWN_TEXT = (
    "neither a memory snapshot, a flight recorder dump, a stack dump nor a log with an out-of-memory message, "
    "a timeout of a collective, or losses: see docs/how-to/explain.md for how each is written"
)


def _read_text(file: BufferedReader) -> str:
    """Return the text of a file; of a long file its end, of a long pipe its beginning."""
    if file.seekable():
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
    return file.read(TAIL_BYTES).decode("utf-8", errors="replace")


@contextmanager
def _convert_format_errors(file: str) -> Iterator[None]:
    """Turn the exceptions that a file of another form raises into a ``UserError`` of one line."""
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{file}: not in the format that torch writes: {type(error).__name__} {reason}") from error


def _parse_json(text: str) -> Any:
    """Return what a text of JSON holds; None if it is not JSON (JSON lines, for example)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _explain_data(data: Any, path: Path, ranks: _Ranks, *, top: int) -> list[Explanation]:
    """Explain a memory snapshot, or keep a flight recorder dump until those of all ranks are read."""
    if snapshot.is_snapshot(data):
        with _convert_format_errors(str(path)):
            return [snapshot.explain(data, files=(str(path),), top=top)]
    if not flight_recorder.is_dump(data):
        key_list = f" of {', '.join(map(str, list(data)[:6]))}" if isinstance(data, dict) else ""
        raise UserError(f"{path} holds a {type(data).__name__}{key_list[:200]}; it is {UNKNOWN_TEXT}")
    rank = _find_rank(path, data.get("rank"))
    if rank is None:
        rank = next(number for number in range(len(ranks.dumps) + 1) if number not in ranks.dumps)
    if rank in ranks.dumps:
        raise UserError(f"{path}: rank {rank} has a second dump, {ranks.dump_files[-1]}; give one dump per rank")
    ranks.dumps[rank] = data
    ranks.dump_files.append(str(path))
    return []


def _explain_text(text: str, path: Path, ranks: _Ranks) -> list[Explanation]:
    """Return the explanations of a log: out of memory, a timeout, losses; stacks are kept in ``ranks``."""
    files, explanations = (str(path),), list[Explanation]()
    if stacks.is_stacks(text):
        rank = _find_rank(path, None)
        ranks.stacks[path.name if rank is None else str(rank)] = text
        ranks.stack_files.append(str(path))
    from_messages = (out_of_memory.explain(text, files=files), timeout.explain(text, files=files))
    for explanation in (*from_messages, losses.explain(losses.read(text), files=files)):
        explanations += [explanation] if explanation is not None else []
    if not explanations and str(path) not in ranks.stack_files:
        raise _UnknownFormat(f"{path}: {UNKNOWN_TEXT}")
    return explanations


def _find_rank(path: Path, stated_rank: object) -> int | None:
    """Return the rank of a file, by the file's name or by what the file states."""
    match = RANK.search(path.name)
    if match is not None:
        return int(match[1])
    return stated_rank if isinstance(stated_rank, int) and not isinstance(stated_rank, bool) else None
