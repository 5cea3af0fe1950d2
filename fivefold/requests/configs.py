"""Reads configs of other software as the model, layout and job of a question, with notes on their keys.

A key that may change memory, FLOPs, messages or time and is not modelled is an error, unless it is ignored by name.
Keys without effect, and keys read as the nearest setting that is modelled, are warnings and a field of the JSON.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fivefold.errors import UserError
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.interop.format import Overrides
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.spec import Model
    from fivefold.results.reading import ConfigNotes, DataReading, ParsedKey, Reading

MAX_REASONS = 4  # keys whose reason an error states; the others are only named
MAX_LIST_LENGTH = 200  # characters of one list of keys on a command line


class LoadedConfig(NamedTuple):
    """A config of another software as records, with the notes that an answer about it must contain."""

    model: Model
    layout: Layout
    job: Job
    notes: ConfigNotes
    data: DataReading | None = None
    stated: frozenset[str] = frozenset()  # fields of the job that the config or its software sets


def load_config(words: Sequence[str], asked: Overrides, *, ignore: Iterable[str] = ()) -> LoadedConfig:
    """Read a config; raises ``UserError`` for missing values and for keys with an effect that are not ignored.

    A single word that is not a file is split as a shell does: a file and keys that it leaves out, or a launch command.
    """
    from fivefold.interop.read import read

    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.exists(words[0]):  # False, too, if it is too long
        words = _split(words[0])
    reading = read(words, asked)
    origin = str(words[0])
    if reading.model is None or reading.layout is None or reading.job is None:
        raise UserError(f"{origin}: does not say {'; '.join(reading.missing)}")
    notes = check_keys(reading, ignore=ignore, origin=origin)
    stated = _list_stated(reading)
    return LoadedConfig(reading.model, reading.layout, reading.job, notes, reading.data, stated)


def _list_stated(reading: Reading) -> frozenset[str]:
    """Return the fields of the job that a config or its software's defaults set."""
    from fivefold.job import Job

    if reading.software != "fivefold":
        return frozenset((*Job.model_fields, "optimizer.kind"))
    return frozenset(key.means.removeprefix("job.") for key in reading.understood if key.means.startswith("job."))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text) or [text]
    except ValueError as fault:
        raise UserError(f"{text}: {fault}; close the quotes") from None


def build_request(
    gpus: str | None, model: str | None = None, vocab: int | None = None, sequence: int | None = None
) -> Overrides:
    """Return what the user adds to a config; for ``h100`` without a number, the config must give the number of GPUs."""
    from fivefold.interop.format import Overrides
    from fivefold.machine.catalog import has_ranks
    from fivefold.model.catalog import resolve

    machine = load_machine(gpus) if gpus else None
    return Overrides(
        ranks=machine.ranks if machine and gpus and has_ranks(gpus) else None,
        ranks_per_node=machine.ranks_per_node if machine else 8,
        model=resolve(model) if model else None,
        vocab=vocab,
        sequence=sequence,
    )


def split_keys(words: Iterable[str] | None) -> frozenset[str]:
    """Return the keys of ``--ignore a,b --ignore c``."""
    return frozenset(key.strip() for word in words or () for key in word.split(",") if key.strip())


def check_keys(reading: Reading, *, ignore: Iterable[str] = (), origin: str = "") -> ConfigNotes:
    """Return the notes on a config's keys; raises ``UserError`` for keys with an effect that are not ignored."""
    from fivefold.interop.registry import FORMATS
    from fivefold.results.reading import ConfigNotes

    main_keys = {key for form in FORMATS for key in form.main_keys}
    stated = {key.means for key in reading.understood}  # fields that another key of the config sets
    accepted = split_keys(ignore)
    open_keys = [key for key in reading.not_understood if not _is_named(key, accepted)]
    if open_keys:
        raise UserError(_describe_open(open_keys, reading, origin=origin or reading.origin))
    return ConfigNotes(
        origin=origin or reading.origin,
        software=reading.software,
        version=reading.version,
        ignored=reading.not_understood,
        approximated=reading.approximated,
        harmless=reading.harmless,
        defaulted=tuple(
            key for key in reading.defaulted if key.key in main_keys and key.means.partition(":")[0] not in stated
        ),
    )


def _is_named(parsed_key: ParsedKey, keys: frozenset[str]) -> bool:
    """Tell whether ``keys`` holds a key of a config, by its full name or by its last part."""
    return parsed_key.key in keys or parsed_key.key.rpartition(".")[2] in keys


def _describe_open(keys: Sequence[ParsedKey], reading: Reading, *, origin: str) -> str:
    """Return the error that names the keys, the reason for each, and what to do."""
    reasons = [f"{key.key}={key.value} ({key.means})" for key in keys[:MAX_REASONS]]
    reasons += [key.key for key in keys[MAX_REASONS:]]
    options = " ".join(f"--ignore {shlex.quote(chunk)}" for chunk in _join_keys(key.key for key in keys))
    is_single = len(keys) == 1
    what, pronoun = ("a key", "it") if is_single else (f"{len(keys)} keys", "them")
    return (
        f"{origin}: {what} may change memory, FLOPs, messages or time, and Fivefold does not model {pronoun}: "
        f"{', '.join(reasons)}; remove {pronoun}, or accept an answer without {pronoun} by {options}"
    )


def _join_keys(keys: Iterable[str]) -> Iterator[str]:
    """Yield the keys joined by commas, in lists short enough for a line."""
    chunk = ""
    for key in keys:
        if chunk and len(chunk) + len(key) >= MAX_LIST_LENGTH:
            yield chunk
            chunk = ""
        chunk = f"{chunk},{key}" if chunk else key
    yield chunk


def describe_notes(notes: ConfigNotes) -> Iterator[str]:
    """Yield one line for each kind of keys that an answer does not count as the config has them."""
    if notes.ignored:
        key_list = "; ".join(f"{key.key}={key.value} ({key.means})" for key in notes.ignored)
        yield f"{notes.origin}: ignored as asked, so the answer is not of this config: {key_list}"
    if notes.launched_ranks is not None:
        launched = f"{notes.launched_ranks} GPU{'s' if notes.launched_ranks > 1 else ''}"
        yield f"{notes.origin}: read as it is launched, on {launched}; its global batch is that of {launched}"
    if notes.approximated:
        key_list = "; ".join(f"{key.key}={key.value} ({key.means})" for key in notes.approximated)
        yield f"{notes.origin}: counted as the nearest setting: {key_list}"
    if notes.defaulted:
        key_list = ", ".join(f"{key.key}={key.value}" for key in notes.defaulted)
        yield f"{notes.origin}: left to the defaults of {notes.software} {notes.version}: {key_list}"
    if notes.harmless:
        yield f"{notes.origin}: without effect on a training step: {', '.join(key.key for key in notes.harmless)}"


def list_fields(notes: Sequence[ConfigNotes] | ConfigNotes | None) -> dict[str, Any]:
    """Return the notes as the field ``config`` of an answer's JSON; empty without notes."""
    if not notes:
        return {}
    if isinstance(notes, Sequence):
        return {"config": [note.model_dump(mode="json") for note in notes]}
    return {"config": notes.model_dump(mode="json")}


def describe_defaults(job: Job, *, stated: Collection[str] = ()) -> str:
    """Return one line listing the values of a written config that are only Fivefold's defaults.

    ``stated``: fields of the job that a run file states.
    """
    from fivefold.job import Job

    rate, optimizer = job.learning_rate, job.optimizer
    values = {
        "sequence": f"sequence {job.sequence} (--seq)",
        "global_batch": f"global batch {job.global_batch} (--gbs)",
        "precision": f"precision {job.precision.name} (--precision)",
        "steps": f"{job.steps} steps (--set steps=N)",
        "optimizer": f"{optimizer.kind} (--optimizer)",
        "learning_rate": f"learning rate {rate.peak:g} (--set learning_rate.peak=…)",
    }
    default_job = Job()
    defaulted = [
        text for name, text in values.items() if name not in stated and getattr(job, name) == getattr(default_job, name)
    ]
    return f"left at Fivefold's defaults: {', '.join(defaulted)}" if defaulted else ""
