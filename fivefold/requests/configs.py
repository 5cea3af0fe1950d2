"""Configs of other software as the model, layout and job of a question, and what the answer must say of their keys.

A key that may change memory, FLOPs, messages or time and that nothing here counts is an error, unless it is ignored by
name. Keys without effect, and those read as the nearest setting that is counted, are warnings and a field of the JSON.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fivefold.record import Mistake
from fivefold.requests.machines import load_machine

if TYPE_CHECKING:
    from fivefold.interop.format import Asked
    from fivefold.job import Job
    from fivefold.layout.spec import Layout
    from fivefold.model.spec import Model
    from fivefold.results.reading import ConfigNotes, Reading, Said

MAX_REASONS = 4  # keys whose reason an error states; the others are named alone
MAX_LIST_LENGTH = 200  # characters of one list of keys on a command line


class LoadedConfig(NamedTuple):
    """A config of another software: its records, and what an answer about them must say."""

    model: Model
    layout: Layout
    job: Job
    notes: ConfigNotes


def load_config(words: Sequence[str], asked: Asked, *, ignore: Iterable[str] = ()) -> LoadedConfig:
    """Read a config; raise ``Mistake`` for what it lacks, and for keys with an effect that ``ignore`` does not name."""
    from fivefold.interop.read import read

    reading = read(words, asked)
    origin = str(words[0])
    if reading.model is None or reading.layout is None or reading.job is None:
        raise Mistake(f"{origin}: does not say {'; '.join(reading.missing)}")
    return LoadedConfig(reading.model, reading.layout, reading.job, check_keys(reading, ignore=ignore, origin=origin))


def build_request(gpus: str | None, model: str | None = None, vocab: int | None = None) -> Asked:
    """Return what the user says beside a config; for ``h100`` without a number, the config must say how many."""
    from fivefold.interop.format import Asked
    from fivefold.machine.catalog import spell_machine
    from fivefold.model.catalog import resolve

    gpus = gpus and spell_machine(gpus)
    machine = load_machine(gpus) if gpus else None
    counted = machine is not None and gpus is not None and (":" in gpus or gpus.endswith(".toml"))
    return Asked(
        ranks=machine.ranks if machine and counted else None,
        ranks_per_node=machine.ranks_per_node if machine else 8,
        model=resolve(model) if model else None,
        vocab=vocab,
    )


def split_keys(words: Iterable[str] | None) -> frozenset[str]:
    """Return the keys of ``--ignore a,b --ignore c``."""
    return frozenset(key.strip() for word in words or () for key in word.split(",") if key.strip())


def check_keys(reading: Reading, *, ignore: Iterable[str] = (), origin: str = "") -> ConfigNotes:
    """Return what an answer must say of a config's keys; raise ``Mistake`` for one with an effect, if not ignored."""
    from fivefold.interop.registry import FORMATS
    from fivefold.results.reading import ConfigNotes

    main_keys = {key for form in FORMATS for key in form.main_keys}
    accepted = split_keys(ignore)
    open_keys = [key for key in reading.not_understood if not _is_named(key, accepted)]
    if open_keys:
        raise Mistake(_describe_open(open_keys, reading, origin=origin or reading.origin))
    return ConfigNotes(
        origin=origin or reading.origin, software=reading.software, version=reading.version,
        ignored=reading.not_understood, approximated=reading.approximated, harmless=reading.harmless,
        defaulted=tuple(said for said in reading.defaulted if said.key in main_keys),
    )  # fmt: skip


def _is_named(said: Said, keys: frozenset[str]) -> bool:
    """Whether ``keys`` hold a key of a config, by its full name or by the last part of it."""
    return said.key in keys or said.key.rpartition(".")[2] in keys


def _describe_open(keys: Sequence[Said], reading: Reading, *, origin: str) -> str:
    """Return the error that names the keys, why each is one, and how to go on."""
    reasons = [f"{key.key}={key.value} ({key.means})" for key in keys[:MAX_REASONS]]
    reasons += [key.key for key in keys[MAX_REASONS:]]
    options = " ".join(f"--ignore {shlex.quote(chunk)}" for chunk in _join_keys(key.key for key in keys))
    one = len(keys) == 1
    what, them = ("a key", "it") if one else (f"{len(keys)} keys", "them")
    return (
        f"{origin}: {what} may change memory, FLOPs, messages or time, and Fivefold does not model {them}: "
        f"{', '.join(reasons)}; remove {them}, or accept an answer without {them} by {options}"
    )


def _join_keys(keys: Iterable[str]) -> Iterator[str]:
    """Return the keys joined by commas, in lists that a line can show."""
    chunk = ""
    for key in keys:
        if chunk and len(chunk) + len(key) >= MAX_LIST_LENGTH:
            yield chunk
            chunk = ""
        chunk = f"{chunk},{key}" if chunk else key
    yield chunk


def describe_notes(notes: ConfigNotes) -> Iterator[str]:
    """Return one line for each kind of keys that an answer does not count as the config has them."""
    if notes.ignored:
        named = "; ".join(f"{key.key}={key.value} ({key.means})" for key in notes.ignored)
        yield f"{notes.origin}: ignored as asked, so the answer is not of this config: {named}"
    if notes.approximated:
        named = "; ".join(f"{key.key}={key.value} ({key.means})" for key in notes.approximated)
        yield f"{notes.origin}: counted as the nearest setting: {named}"
    if notes.defaulted:
        named = ", ".join(f"{key.key}={key.value}" for key in notes.defaulted)
        yield f"{notes.origin}: left to the defaults of {notes.software} {notes.version}: {named}"
    if notes.harmless:
        yield f"{notes.origin}: without effect on a training step: {', '.join(key.key for key in notes.harmless)}"


def add_notes(text: str, notes: Sequence[ConfigNotes] | ConfigNotes | None) -> str:
    """Return a JSON object with the notes of the config that it is about, as the field ``config``."""
    if not notes:
        return text
    several = isinstance(notes, Sequence)
    dumped = [each.model_dump(mode="json") for each in (notes if isinstance(notes, Sequence) else [notes])]
    return json.dumps({**json.loads(text), "config": dumped if several else dumped[0]}, indent=2)


def describe_defaults(job: Job) -> str:
    """Return one line that names what a written config says of the job only because it is Fivefold's default."""
    from fivefold.job import Job

    usual, rate, optimizer = Job(), job.learning_rate, job.optimizer
    values = {
        "sequence": (f"sequence {job.sequence} (--seq)", job.sequence == usual.sequence),
        "batch": (f"global batch {job.global_batch} (--gbs)", job.global_batch == usual.global_batch),
        "precision": (f"precision {job.precision.name} (--precision)", job.precision == usual.precision),
        "steps": (f"{job.steps} steps (--set steps=N)", job.steps == usual.steps),
        "optimizer": (f"{optimizer.kind} (--set optimizer.kind=…)", optimizer == usual.optimizer),
        "rate": (f"learning rate {rate.peak:g} (--set learning_rate.peak=…)", rate == usual.learning_rate),
    }
    said = [text for text, is_default in values.values() if is_default]
    return f"left at Fivefold's defaults: {', '.join(said)}" if said else ""
