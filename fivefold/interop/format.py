"""What a format is: a name, a version, and how it is recognised, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.interop.keys import Values, nested
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


class Format(NamedTuple):
    """A config format of one version of a software."""

    name: str
    version: str
    stack: str
    recognises: Callable[[Document], bool]
    read: Callable[[Document, Asked], Reading] | None
    write: Callable[[Plan], Written] | None = None


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


def reading(
    form: tuple[str, str],
    values: Values,
    fields: Mapping[str, Any],
    *,
    document: Document,
    model: Model | None,
    ranks: int | None,
    missing: tuple[str, ...] = (),
) -> Reading:
    """The result: layout and job of ``fields`` by path, none of which is None; no layout if ``ranks`` are missing."""
    software, version = form
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
        software=software, version=version, origin=document.origin, model=model, layout=layout, job=job, ranks=ranks,
        understood=values.understood(), defaulted=values.defaulted(),
        not_understood=(*document.remarks, *values.not_understood()), harmless=values.harmless(),
        approximated=(*document.assumed, *values.approximated()), missing=lacks,
    )  # fmt: skip
