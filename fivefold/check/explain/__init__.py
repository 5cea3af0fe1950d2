"""Explains what a failed or strange run has left behind. No torch, and nothing in a file is run.

explain(files) → by what each holds, an Explanation of
out_of_memory · snapshot · category   a log's message; a memory snapshot, and what its blocks were
against                               what the planner predicts beside it; the least change that fits
frames · plain_pickle                 lines of code in stacks; pickles that hold data alone
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fivefold.check.explain import out_of_memory, plain_pickle, snapshot
from fivefold.layout.explanation import Explanation
from fivefold.record import Mistake

TAIL = 64 << 20  # bytes of a longer text's end that are read


def explain(paths: Sequence[Path], *, top: int = 12) -> tuple[Explanation, ...]:
    """Explain every file, or every file of a folder. ``top``: how many lines of code are listed."""
    found: list[Explanation] = []
    for path in _files(paths):
        found += _read(path, top=top)
    return tuple(found)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise Mistake(f"{path}: no such file")
        within = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
        if not within:
            raise Mistake(f"{path}: an empty folder")
        yield from within


def _read(path: Path, *, top: int) -> list[Explanation]:
    with path.open("rb") as file:
        begin = file.read(4096)
    if not begin.strip():
        raise Mistake(f"{path}: an empty file")
    files = (str(path),)
    if begin.startswith(plain_pickle.MAGIC):
        return [_of_data(plain_pickle.load(path), files=files, top=top)]
    if begin.startswith(b"PK\x03\x04"):
        raise Mistake(f"{path}: a zip archive, as torch.save writes; a snapshot is written by _dump_snapshot")
    text = _text(path)
    if begin.lstrip().startswith((b"{", b"[")):
        data = _json(text)
        if data is not None:
            return [_of_data(data, files=files, top=top)]
    found = _of_text(text, files=files)
    if not found:
        raise Mistake(f"{path}: {KNOWN}")
    return found


KNOWN = (
    "neither a memory snapshot nor a log with an out-of-memory message; write the first by "
    "torch.cuda.memory._dump_snapshot, or give the whole log"
)


def _text(path: Path) -> str:
    """The text of a file; of a long one its end."""
    with path.open("rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - TAIL))
        return file.read().decode("utf-8", errors="replace")


def _json(text: str) -> Any:
    """What a text of JSON holds; None if it is none, such as lines of JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _of_data(data: Any, *, files: tuple[str, ...], top: int) -> Explanation:
    if snapshot.is_snapshot(data):
        return snapshot.explain(data, files=files, top=top)
    what = f"a {type(data).__name__}" + (f" of {', '.join(map(str, list(data)[:6]))}" if isinstance(data, dict) else "")
    raise Mistake(f"{files[0]}: holds {what[:200]}; {KNOWN}")


def _of_text(text: str, *, files: tuple[str, ...]) -> list[Explanation]:
    readers = (out_of_memory.explain,)
    return [found for read in readers if (found := read(text, files=files)) is not None]
