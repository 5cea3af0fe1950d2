"""A configuration format: one folder, which says how its files are recognized, parsed, read as a job and written.

keys     a table of the software's keys, each with its kind, its meaning and the version's default
parse    a document to values of these keys            to_job   the values to model, layout and job
emit     model, layout and job to files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.interop.keys import Table, Values, nested
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.launch import divide_over_hosts
from fivefold.model.spec import Model
from fivefold.record import Mistake
from fivefold.results.reading import Reading, Said


class Document(NamedTuple):
    """A file, or a launch line, as parsed; ``remarks``: what of a script was not followed."""

    origin: str
    kind: str  # toml, yaml, json, python, words
    values: Mapping[str, Any] = {}
    words: tuple[str, ...] = ()
    text: str = ""
    folder: Path = Path()
    ranks: int | None = None  # that a launcher or a Slurm script says
    remarks: tuple[Said, ...] = ()
    assumed: tuple[Said, ...] = ()  # what is read as most configs of the software have it
    options: Mapping[str, str] = {}  # of the launcher
    given: Mapping[str, str] = {}  # keys that the user adds


class Asked(NamedTuple):
    """What the user says beside the file."""

    ranks: int | None = None
    ranks_per_node: int = 8
    model: Model | None = None
    vocab: int | None = None


class Plan(NamedTuple):
    """What is to be written."""

    model: Model
    layout: Layout
    job: Job
    ranks_per_node: int = 8
    machine: str = ""  # as the user named it

    @property
    def hosts(self) -> tuple[int, int]:
        """Hosts, and ranks on each."""
        return divide_over_hosts(self.layout.world, self.ranks_per_node)


class Written(NamedTuple):
    """Files by name, the first of which ``read`` takes; ``remarks``: what the software does otherwise."""

    files: Mapping[str, str]
    remarks: tuple[str, ...] = ()


class ParsedConfig(NamedTuple):
    """The keys that a document gives: what ``parse`` returns and ``to_job`` reads."""

    document: Document
    values: Values
    model: Model | None = None  # that the user or the document names as a whole
    stack: str = ""  # of the software that the document is of, where a format has several
    fields: Mapping[str, Any] = {}  # fields of layout and job that it says other than by keys, by path
    unset: tuple[str, ...] = ()  # keys whose value follows from the model


class Format(NamedTuple):
    """A configuration format of one software; a format that is only written has neither ``parse`` nor ``to_job``."""

    name: str  # as ``--to`` has it
    version: str  # that is written
    stack: str
    recognizes: Callable[[Document], bool]
    parse: Callable[[Document, Asked], ParsedConfig] | None
    to_job: Callable[[ParsedConfig, Asked], Reading] | None
    emit: Callable[[Plan], Written] | None
    keys: Mapping[str, Table] = {}  # by the name of the software whose keys they are
    main_keys: frozenset[str] = frozenset()  # what a config should not leave to a default: the sequence and the batch
    order: int = 0  # of recognition: a format whose keys configs of others have too comes after those

    def read(self, document: Document, asked: Asked) -> Reading:
        """Return the document as model, layout and job."""
        assert self.parse is not None
        assert self.to_job is not None
        return self.to_job(self.parse(document, asked), asked)


def world(document: Document, asked: Asked) -> int | None:
    """How many ranks; ``Mistake`` if the user and a launcher say two numbers."""
    if asked.ranks and document.ranks and asked.ranks != document.ranks:
        raise Mistake(
            f"{document.origin}: is started on {document.ranks} ranks, and --gpus says {asked.ranks}; let both be equal"
        )
    return asked.ranks or document.ranks


def replicas(ranks: int | None, degree: int, *, of: str, origin: str) -> int | None:
    """Data-parallel ranks: what is left of ``ranks``; ``Mistake`` unless ``degree``, the product ``of``, divides it."""
    if ranks is None:
        return None
    if ranks % degree:
        near = -(-ranks // degree) * degree
        raise Mistake(f"{origin}: {ranks} ranks are not a multiple of {of}={degree}; try --gpus NAME:{near}")
    return ranks // degree


RANKS_MISSING = "on how many GPUs it runs: say --gpus h100:64"


def build_reading(
    config: ParsedConfig,
    fields: Mapping[str, Any],
    *,
    model: Model | None,
    ranks: int | None,
    missing: tuple[str, ...] = (),
) -> Reading:
    """Return the reading: layout and job of ``fields`` by path, none of which is None; no layout if ``ranks`` are."""
    document, values = config.document, config.values
    lacks = missing if model or missing else ("the model: say --model NAME",)
    layout = job = None
    if model is None:
        ranks = None
    elif ranks is not None:
        layout = Layout.read(nested(fields, "layout"), origin=document.origin)
        job = Job.read(nested(fields, "job"), origin=document.origin)
    elif not missing:
        lacks += (RANKS_MISSING,)
    return Reading(
        software=values.software,
        version=values.version,
        origin=document.origin,
        model=model,
        layout=layout,
        job=job,
        ranks=ranks,
        understood=values.understood(),
        defaulted=values.defaulted(),
        not_understood=(*document.remarks, *values.not_understood()),
        harmless=values.harmless(),
        approximated=(*document.assumed, *values.approximated()),
        missing=lacks,
    )
