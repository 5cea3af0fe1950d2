"""Turns a corpus into token shards: list files, tokenize, write, publish.

Whether a document is held out depends only on its text, so duplicates fall into one split. Shards are written to a
hidden folder next to the target, which replaces the target when it is complete: a killed run leaves nothing that looks
finished, and the next run removes its leftovers.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fivefold.atomic_file import sync
from fivefold.errors import RunFailure, UserError
from fivefold.trainer.data.corpus import CorpusFile, list_files, read_documents
from fivefold.trainer.data.encode import TEXT_HASHES, EncodingSettings, encode_all, hash_text
from fivefold.trainer.data.shards import (
    INDEX,
    SHARD_NAME,
    SPLITS,
    TOKENIZER,
    Index,
    Shards,
    SplitWriter,
    append,
    read_index,
)
from fivefold.trainer.data.supervised import SampleFormat
from fivefold.trainer.data.tokenizer import build_tokenizer as make_tokenizer
from fivefold.trainer.data.tokenizer import choose_dtype, is_built_in, load
from fivefold.units import MIB, show_bytes

# Bytes of corpus per additional process: for a smaller share, starting one (0.3 s) costs more than it saves.
BYTES_PER_WORKER, BPE_BYTES_PER_WORKER = 128 * MIB, 4 * MIB

Progress = Callable[[str, int, int], None]  # activity, bytes of the corpus done, total bytes


def prepare(
    corpus: str,
    *,
    tokenizer: str = "bytes",
    directory: Path,
    holdout: float = 0.01,
    key: str = "text",
    samples: SampleFormat | None = None,
    workers: int | None = None,
    progress: Progress = lambda what, done, total: None,
    shard_tokens: int = 2**28,
) -> Index:
    """Tokenize ``corpus`` (``stdlib``, a file or a folder) into shards in ``directory``, unless they exist already.

    ``tokenizer``: ``bytes``, ``bpe:N`` or a path. ``holdout``: the share of documents held out, at least one unless 0.
    ``key``: field of .jsonl, column of .parquet. ``samples``: how records become supervised samples; None: documents
    are text. ``workers``: processes; the shards do not depend on it.
    Raises ``UserError`` for a corpus that cannot be read and ``RunFailure`` for a full disk or a dead worker; neither
    leaves files behind.
    """
    if not 0 <= holdout < 1:
        raise UserError(
            f"holdout={holdout} is not a fraction of the documents; give a number from 0 to below 1, such as 0.01"
        )
    plan = _Plan(corpus, list_files(corpus), tokenizer, holdout, key, shard_tokens, samples)
    directory = directory.absolute()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock_folder(directory.parent):
            return _reuse(plan, directory) or _publish(plan, directory, workers=workers, progress=progress)
    except OSError as error:
        raise _explain_failure(error, plan, directory) from None


def _explain_failure(error: OSError, plan: _Plan, directory: Path) -> UserError | RunFailure:
    """Return the error to raise if writing failed. Call it before files are removed, as it states free bytes."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"{directory} cannot be written: {error.strerror or error}")
    free_text = show_bytes(shutil.disk_usage(directory.parent).free)
    return RunFailure(
        f"{directory}: the disk is full: {free_text} are free, the corpus has {show_bytes(plan.size_bytes)}; "
        "free some space or choose another folder (nothing was left behind)"
    )


@contextmanager
def show_progress() -> Iterator[Progress]:
    """Show a progress bar on stderr for ``prepare``; hidden if stderr is no terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@dataclass(frozen=True)
class _Plan:
    """A plan of the preparation: the arguments of ``prepare`` and the files of the corpus."""

    corpus: str
    files: list[CorpusFile]
    tokenizer: str
    holdout: float
    key: str
    shard_tokens: int
    samples: SampleFormat | None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def request(self) -> str:
        """Return the sha256 of all that determines the shards: path, size and mtime of each file, and the settings."""
        determinants = [
            [[str(file.path.absolute()), file.size_bytes, file.changed_ns] for file in self.files],
            self.tokenizer if is_built_in(self.tokenizer) else load(Path(self.tokenizer)).fingerprint,
            [self.holdout, self.key, self.shard_tokens],
            *([] if self.samples is None else [asdict(self.samples)]),
        ]
        return hashlib.sha256(json.dumps(determinants).encode()).hexdigest()

    def workers(self, wanted: int | None) -> int:
        """Return ``wanted``, or else as many processes as the size of the corpus justifies, at most one per core."""
        bytes_per_worker = BYTES_PER_WORKER if self.tokenizer == "bytes" else BPE_BYTES_PER_WORKER
        return wanted or min(os.cpu_count() or 1, 1 + self.size_bytes // bytes_per_worker)


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold an exclusive flock on ``folder``: one ``prepare`` at a time works in it; freed if the process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _reuse(plan: _Plan, directory: Path) -> Index | None:
    """Return the index of ``directory`` if it holds complete shards of this plan."""
    try:
        if read_index(directory).request == plan.request:
            return Shards.open(directory).index
    except UserError:  # missing or damaged: prepare again
        pass
    return None


def _publish(plan: _Plan, directory: Path, *, workers: int | None, progress: Progress) -> Index:
    """Write the shards to a hidden folder, sync it, and rename it to ``directory``."""
    _check_replaceable(directory)
    partial, old = (directory.with_name(f".{directory.name}.{word}") for word in ("partial", "old"))
    for leftover in (partial, old):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        partial.mkdir()
        index = _build(plan, partial, workers=plan.workers(workers), progress=progress)
        for path in (*partial.iterdir(), partial):
            sync(path)
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
        sync(directory.parent)
        shutil.rmtree(old, ignore_errors=True)
        return index
    except OSError as error:
        raise _explain_failure(error, plan, directory) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(directory: Path) -> None:
    """Raise a ``UserError`` if ``directory`` is a file, or a folder with anything but shards and their index."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory} is a file; choose another folder")
    names = sorted(path.name for path in directory.iterdir())
    shard_files = {name for name in names if name in (INDEX, TOKENIZER) or SHARD_NAME.fullmatch(name)}
    other_files = [name for name in names if name not in shard_files or INDEX not in names]
    if other_files:
        raise UserError(f"{directory} holds {other_files[0]!r}, which is not a shard; choose another folder")


def _build(plan: _Plan, folder: Path, *, workers: int, progress: Progress) -> Index:
    """Make the tokenizer and write tokenizer, shards and index into ``folder``."""
    bound = round(plan.holdout * TEXT_HASHES)
    tokenizer = make_tokenizer(plan.tokenizer, texts=lambda: _list_training_texts(plan, bound, progress))
    append(folder / TOKENIZER, tokenizer.text.encode())
    rule = EncodingSettings(
        plan.key, plan.samples, folder / TOKENIZER, tokenizer.fingerprint, str(choose_dtype(tokenizer.vocab)), bound
    )
    index, lowest_hash = _write(plan, folder, rule, workers=workers, progress=progress)
    if plan.holdout and index.train.documents and not index.heldout.documents:
        # In so small a corpus no hash may fall below the bound: write again, holding out the lowest one.
        for path in folder.glob("*.bin"):
            path.unlink()
        rule = replace(rule, bound=lowest_hash + 1)
        index, _ = _write(plan, folder, rule, workers=workers, progress=progress)
    if not index.train.documents:
        if index.heldout.documents:
            raise UserError(
                f"{plan.corpus}: a corpus of one document cannot be split into training and held-out text; add a "
                "document"
            )
        raise UserError(f"{plan.corpus}: the corpus is empty: its {len(plan.files)} files hold no text; add some")
    append(folder / INDEX, index.model_dump_json(indent=1).encode())
    return index


def _list_training_texts(plan: _Plan, bound: int, progress: Progress) -> Iterator[str]:
    """Yield the documents that are not held out, to train the tokenizer on."""
    if plan.samples is not None:
        raise UserError(
            f"tokenizer {plan.tokenizer!r}: a tokenizer is trained on text, and the corpus holds {plan.samples.kind}; "
            "use the tokenizer of the base model"
        )
    done = 0
    for text in read_documents(plan.files, key=plan.key):
        progress("training the tokenizer", done := done + len(text.encode()), plan.size_bytes)
        if hash_text(text) >= bound:
            yield text


def _write(plan: _Plan, folder: Path, rule: EncodingSettings, *, workers: int, progress: Progress) -> tuple[Index, int]:
    """Write the shards of both splits; return their index and the lowest ``hash_text`` of any document."""
    writers = {split: SplitWriter(folder, split, plan.shard_tokens) for split in SPLITS}
    done, nul_bytes, lowest_hash = 0, 0, TEXT_HASHES
    with closing(encode_all(plan.files, rule=rule, workers=workers)) as results:
        for encoded in results:
            for split, documents in encoded.splits.items():
                writers[split].add(
                    documents.tokens,
                    lengths=documents.lengths,
                    text_bytes=documents.text_bytes,
                    trained=documents.trained,
                )
            nul_bytes = nul_bytes + encoded.nul_bytes
            lowest_hash = min(lowest_hash, encoded.lowest_hash)
            progress("tokenizing", done := done + encoded.size_bytes, plan.size_bytes)
    index = Index(
        corpus=plan.corpus,
        request=plan.request,
        tokenizer=rule.fingerprint,
        dtype="uint16" if rule.dtype == "uint16" else "uint32",
        holdout=plan.holdout,
        nul_bytes=nul_bytes,
        train=writers["train"].finish(),
        heldout=writers["heldout"].finish(),
    )
    return index, lowest_hash
