"""Checkpoint folders on disk: written atomically, found, verified and pruned. Knows nothing of the tensors.

    DIRECTORY/step-00000100/  checkpoint.json  .metadata  __0_0.distcp  __1_0.distcp …

It is written as ``step-00000100.tmp-…``, completed by ``checkpoint.json`` and only then renamed; so at any moment,
even after kill -9 or a power cut, every folder with a checkpoint's name is complete.
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

from fivefold.atomic_file import sync
from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.model.weights import get_layer
from fivefold.record import Record
from fivefold.text_files import read_file

VERSION = 1
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})(\.replaced)?")
_BLOCK_BYTES = 2**22


class RunProgress(Record):
    """The position of a run. ``samples``: the data loader's position; ``facts``: other state that a resume needs."""

    step: NonNegativeInt  # steps finished
    samples: NonNegativeInt
    tokens: NonNegativeInt
    facts: dict[str, JsonValue] = {}


class CheckpointFile(Record):
    """A file of a checkpoint as it was written: name, size and SHA-256."""

    name: str
    size_bytes: NonNegativeInt
    sha256: str

    @classmethod
    def from_path(cls, path: Path) -> CheckpointFile:
        """Hash the file at ``path`` as it is now."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
        return cls(name=path.name, size_bytes=size, sha256=digest.hexdigest())


class Checkpoint(Record):
    """The manifest ``checkpoint.json``: model, layout, job, progress, and every other file of the folder.

    ``base``: the Hugging Face folder of the weights under adapters, which the checkpoint does not hold.
    """

    version: int = VERSION
    torch: str
    device: str
    model: Model
    layout: Layout
    job: Job
    progress: RunProgress
    files: tuple[CheckpointFile, ...]
    base: str | None = None


# Writing


def format_folder_name(step: int) -> str:
    """Return the name of the folder of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def name_router_tensor(model: Model, name: str) -> str:
    """Return the name in a checkpoint of what a router holds: ``bias/3`` of ``blocks.3.moe.bias``."""
    return f"{name.rpartition('.')[2]}/{get_layer(model, name)}"


def begin(final: Path) -> Path:
    """Create an empty temporary folder, to be filled and passed to ``finish``; removes leftovers of dead runs."""
    remove_leftovers(final.parent)
    temporary = _choose_temporary_name(final)
    temporary.mkdir()
    return temporary


def finish(temporary: Path, final: Path, *, checkpoint: Checkpoint, keep: int) -> None:
    """Write the manifest, fsync, rename ``temporary`` to ``final``, and delete all but the newest ``keep`` checkpoints.

    Checkpoints of later steps, left from before a rollback, are neither counted nor deleted.
    """
    values = checkpoint.model_dump(mode="json")
    with (temporary / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({**values, "digest": _compute_digest(values)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(temporary)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():  # the old one keeps a name that `latest` knows until the new one has taken its own
        if replaced.exists():
            _remove(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync(final.parent)
    if replaced.exists():
        _remove(replaced)
    for old in _list_up_to(final)[: -max(1, keep)]:
        _remove(old)


def remove_leftovers(directory: Path) -> None:
    """Delete the folders of saves that did not finish."""
    for folder in directory.glob("step-*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Delete a checkpoint: rename it first, so that a half-deleted one is never taken for a checkpoint."""
    removed_path = _choose_temporary_name(folder)
    os.rename(folder, removed_path)
    shutil.rmtree(removed_path, ignore_errors=True)  # leftovers are removed by the next save


def _choose_temporary_name(folder: Path) -> Path:
    """Return a new temporary name next to ``folder``, with a random suffix."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")


def _compute_digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# Finding and reading


def find_latest(directory: Path) -> Path | None:
    """Return the complete checkpoint of the highest step in ``directory``; None if there is none."""
    complete = _list_complete(directory)
    return complete[-1] if complete else None


def _list_complete(directory: Path) -> list[Path]:
    """List the complete checkpoints of ``directory``, lowest step first; ``.replaced`` before its replacement."""
    if not directory.is_dir():
        return []
    numbered = [
        (int(match[1]), match[2] is None, path)
        for path in directory.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return [path for *_, path in sorted(numbered)]


def _list_up_to(path: Path) -> list[Path]:
    """List the complete checkpoints next to ``path`` up to and including it; all if ``path`` is not one."""
    complete = _list_complete(path.parent)
    return complete[: complete.index(path) + 1] if path in complete else complete


def read(path: Path) -> Checkpoint:
    """Read the manifest of the checkpoint ``path``; raises ``UserError`` if missing, damaged or of a newer version."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise UserError(f"{path} is not a complete checkpoint, because it has no {MANIFEST}; {describe_recovery(path)}")
    try:
        values = read_file(manifest)
    except UserError as error:
        raise UserError(f"{error}; {describe_recovery(path)}") from None
    version = values.get("version")
    if isinstance(version, int) and version > VERSION:
        raise UserError(
            f"{path}: written by a newer version {version}; this one reads up to {VERSION}; upgrade fivefold"
        )
    if values.pop("digest", None) != _compute_digest(values):
        raise UserError(f"{manifest}: does not hold what was written; {describe_recovery(path)}")
    return Checkpoint.read(values, origin=str(manifest))


def verify(path: Path, files: tuple[CheckpointFile, ...]) -> None:
    """Check size and SHA-256 of ``files`` in ``path``; raises ``UserError`` if one is missing, cut short or changed."""
    for file in files:
        file_path = path / file.name
        size_text = f"{file.size_bytes} bytes were written"
        if not file_path.is_file():
            raise UserError(f"{file_path} is missing, but {size_text}; {describe_recovery(path)}")
        size = file_path.stat().st_size
        if size != file.size_bytes:
            raise UserError(f"{file_path} holds {size} bytes, but {size_text}; {describe_recovery(path)}")
        if CheckpointFile.from_path(file_path) != file:
            raise UserError(
                f"{file_path}: its {size} bytes have another SHA-256 than when written; {describe_recovery(path)}"
            )


def find_previous(path: Path) -> Path | None:
    """Return the newest complete checkpoint before ``path``, or None."""
    earlier = [other for other in _list_up_to(path) if other != path]
    return earlier[-1] if earlier else None


def describe_recovery(path: Path) -> str:
    """Return advice about the damaged checkpoint ``path``, for the end of a ``UserError``."""
    earlier = find_previous(path)
    return f"remove {path.name} and resume from {earlier}" if earlier else "there is none before it to resume from"
