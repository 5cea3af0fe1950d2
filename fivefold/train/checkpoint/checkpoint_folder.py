"""A checkpoint as a folder on disk that is either whole or not there; what is in its tensors is none of its business.

    DIRECTORY/step-00000100/  checkpoint.json  .metadata  __0_0.distcp  __1_0.distcp …

It is written as ``step-00000100.tmp-…``, sealed by ``checkpoint.json`` and only then given its name; so at any moment,
kill -9 and a power cut included, every folder with a checkpoint's name is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

from pydantic import JsonValue, NonNegativeInt

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.record import Mistake, Record, read_file

VERSION = 1
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_BLOCK_BYTES = 2**22


class Progress(Record):
    """How far a run has come. ``samples`` is the loader's position; ``facts`` is what else a resume needs."""

    step: NonNegativeInt  # steps finished
    samples: NonNegativeInt
    tokens: NonNegativeInt
    facts: dict[str, JsonValue] = {}


class File(Record):
    """One file of a checkpoint as it was written."""

    name: str
    size_bytes: NonNegativeInt
    sha256: str

    @classmethod
    def of(cls, path: Path) -> File:
        """The file at ``path`` as it is now."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
        return cls(name=path.name, size_bytes=size, sha256=digest.hexdigest())


class Checkpoint(Record):
    """``checkpoint.json``: what was trained how and how far, and every other file of the folder."""

    version: int = VERSION
    torch: str
    device: str
    model: Model
    layout: Layout
    job: Job
    progress: Progress
    files: tuple[File, ...]


# Writing


def named(step: int) -> str:
    """The folder of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def begin(final: Path) -> Path:
    """A new empty folder, to be filled and given to ``finish``; what dead runs left behind is removed."""
    remove_leftovers(final.parent)
    temporary = _aside(final)
    temporary.mkdir()
    return temporary


def finish(temporary: Path, final: Path, *, checkpoint: Checkpoint, keep: int) -> None:
    """Seal the written folder, give it its name, and delete what is older than the newest ``keep``.

    Checkpoints of later steps, which a run that went back to an earlier one has before it, are left alone.
    """
    values = checkpoint.model_dump(mode="json")
    with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**values, "digest": _digest(values)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(temporary)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():  # the old one keeps a name that `latest` knows until the new one has taken its own
        if replaced.exists():
            _remove(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    _sync(final.parent)
    if replaced.exists():
        _remove(replaced)
    for old in _until(final)[: -max(1, keep)]:
        _remove(old)


def remove_leftovers(directory: Path) -> None:
    """Delete the folders of saves that did not finish."""
    for folder in directory.glob("step-*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Delete a checkpoint, its name first: half of one must not pass for one."""
    doomed = _aside(folder)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # what stays is a leftover, and the next save tries again


def _aside(folder: Path) -> Path:
    """A name beside ``folder`` that is no checkpoint's and that no dead run has used."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` outlive a power cut, as fsync of a file does for its contents."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# Finding and reading


def latest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step in ``directory``; None if there is none."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def _complete(directory: Path) -> list[Path]:
    """The checkpoints in ``directory``, lowest step first; one that is being replaced lies before its replacement."""
    if not directory.is_dir():
        return []
    found = [
        (int(match[1]), match[2] is None, path)
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return [path for *_, path in sorted(found)]


def _until(path: Path) -> list[Path]:
    """The checkpoints beside ``path`` up to and with itself; all, if it is none."""
    complete = _complete(path.parent)
    return complete[: complete.index(path) + 1] if path in complete else complete


def read(path: Path) -> Checkpoint:
    """What the checkpoint ``path`` says of itself; a ``Mistake`` if that is missing, damaged or too new to read."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise Mistake(f"{path}: is no complete checkpoint, as it has no {MANIFEST}; {recovery_hint(path)}")
    try:
        values = read_file(manifest)
    except Mistake as error:
        raise Mistake(f"{error}; {recovery_hint(path)}") from None
    version = values.get("version")
    if isinstance(version, int) and version > VERSION:
        raise Mistake(f"{path}: written by a newer version {version}; this one reads up to {VERSION}; upgrade fivefold")
    if values.pop("digest", None) != _digest(values):
        raise Mistake(f"{manifest}: does not hold what was written; {recovery_hint(path)}")
    return Checkpoint.read(values, origin=str(manifest))


def verify(path: Path, files: tuple[File, ...]) -> None:
    """Read ``files`` of the checkpoint ``path``; a ``Mistake`` if one is missing, cut short or changed."""
    for file in files:
        where, written = path / file.name, f"{file.size_bytes} bytes were written"
        if not where.is_file():
            raise Mistake(f"{where}: is missing, but {written}; {recovery_hint(path)}")
        size = where.stat().st_size
        if size != file.size_bytes:
            raise Mistake(f"{where}: holds {size} bytes, but {written}; {recovery_hint(path)}")
        if File.of(where) != file:
            raise Mistake(f"{where}: {written}, but it now holds others; {recovery_hint(path)}")


def before(path: Path) -> Path | None:
    """The newest complete checkpoint of an earlier step than ``path``'s."""
    earlier = [other for other in _until(path) if other != path]
    return earlier[-1] if earlier else None


def recovery_hint(path: Path) -> str:
    """What to do about the damaged checkpoint ``path``."""
    earlier = before(path)
    return f"remove {path.name} and resume from {earlier}" if earlier else "there is none before it to resume from"
