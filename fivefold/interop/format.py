"""A configuration format: one folder, which recognizes, parses, interprets and writes the files of one software.

keys     a table of the software's keys, each with its kind, its meaning and the version's default parse    a document
to values of these keys            to_job   the values to model, layout and job emit     model, layout and job to files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.interop.keys import Table, Values, nest
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.launch import divide_over_hosts
from fivefold.model.spec import Model
from fivefold.results.reading import DataReading, ParsedKey, Reading
from fivefold.spelling import join_names


class Document(NamedTuple):
    """A parsed file or launch line; ``remarks``: parts of a script that were not followed."""

    origin: str
    kind: str  # toml, yaml, json, python, words
    values: Mapping[str, Any] = {}
    words: tuple[str, ...] = ()
    text: str = ""
    folder: Path = Path()
    find: Callable[[str], Path] = Path  # maps a path that it names to the file; ``UserError`` if not allowed
    ranks: int | None = None  # as a launcher or a Slurm script gives them
    remarks: tuple[ParsedKey, ...] = ()
    assumed: tuple[ParsedKey, ...] = ()  # values missing from the file, read as in most configs of the software
    options: Mapping[str, str] = {}  # of the launcher
    environment: Mapping[str, str] = {}  # variables that a command is started with
    given: Mapping[str, str] = {}  # keys that the user adds


class Overrides(NamedTuple):
    """Facts that the user gives in addition to the file."""

    ranks: int | None = None
    ranks_per_node: int = 8
    model: Model | None = None
    vocab: int | None = None
    sequence: int | None = None  # the length of a sequence, of files that state none
    searches: bool = False  # a layout is searched for ``ranks``, so a file may state another number of ranks


class ConfigPlan(NamedTuple):
    """The model, layout and job to write as a config."""

    model: Model
    layout: Layout
    job: Job
    ranks_per_node: int = 8
    machine: str = ""  # by the name that the user gave
    data: DataReading | None = None  # of the config that is rewritten

    @property
    def hosts(self) -> tuple[int, int]:
        """Return the number of hosts and the ranks on each."""
        return divide_over_hosts(self.layout.world, self.ranks_per_node)


class WrittenConfig(NamedTuple):
    """Files by name, the first of which ``read`` takes; ``remarks``: what the software does differently."""

    files: Mapping[str, str]
    remarks: tuple[str, ...] = ()


class ParsedConfig(NamedTuple):
    """The keys that a document sets: ``parse`` returns them and ``to_job`` reads them."""

    document: Document
    values: Values
    model: Model | None = None  # the model that the user or the document gives by name
    stack: str = ""  # the software that wrote the document, if the format is that of several
    fields: Mapping[str, Any] = {}  # fields of layout and job by path, which the document sets other than by keys
    unset: tuple[str, ...] = ()  # keys whose value follows from the model


class ConfigFormat(NamedTuple):
    """A configuration format of one software; a format that is only written has neither ``parse`` nor ``to_job``."""

    name: str  # for ``--to``
    version: str  # the version for which files are written
    stack: str
    recognizes: Callable[[Document], bool]
    parse: Callable[[Document, Overrides], ParsedConfig] | None
    to_job: Callable[[ParsedConfig, Overrides], Reading] | None
    emit: Callable[[ConfigPlan], WrittenConfig] | None
    keys: Mapping[str, Table] = {}  # tables by the name of their software
    main_keys: frozenset[str] = frozenset()  # keys that a config should set itself: sequence length and batch size
    order: int = 0  # formats are tried in this order; one whose keys occur in others' configs has a higher number
    choose_stack: Callable[[ConfigPlan], str] | None = None  # of a trainer with several stacks: that of a plan
    sample_data: str = ""  # what a config trains on that is written without the user's data
    fine_tuning_stacks: tuple[str, ...] = ()  # whose jobs with adapters or pairs the format expresses

    def is_of(self, stack: str) -> bool:
        """Tell whether it is a format of the configs of ``stack``."""
        return stack in (self.stack, *self.fine_tuning_stacks)

    def read(self, document: Document, overrides: Overrides) -> Reading:
        """Return the document as model, layout and job."""
        assert self.parse is not None
        assert self.to_job is not None
        return self.to_job(self.parse(document, overrides), overrides)


def resolve_world(
    document: Document, overrides: Overrides, *, stated: int | None = None, where: str = "its launcher"
) -> int | None:
    """Return the number of ranks that the file states, as ``stated`` in ``where`` or by its launcher, or the user's.

    Raises ``UserError`` if both are given and differ, except where a layout is searched: the global batch, which often
    depends on the number, stays that of the file.
    """
    stated = document.ranks if stated is None else stated
    if stated and overrides.ranks not in (None, stated) and not overrides.searches:
        raise UserError(
            f"{document.origin}: number of GPUs: {stated} in {where}, {overrides.ranks} in --gpus; the global batch "
            f"depends on it: use --gpus NAME:{stated}, or let `search` find a layout for {overrides.ranks}"
        )
    return stated or overrides.ranks


def compute_replicas(ranks: int | None, degree: int, *, of: str, origin: str) -> int | None:
    """Return the data-parallel size, ``ranks`` / ``degree``; raise ``UserError`` if it is not a whole number.

    ``of``: how an error names ``degree``, for example ``tp·cp·pp``.
    """
    if ranks is None:
        return None
    if degree < 1:
        raise UserError(f"{origin}: {of}={degree} must be 1 or more")
    if ranks % degree:
        next_multiple = -(-ranks // degree) * degree
        raise UserError(f"{origin}: {ranks} ranks are not a multiple of {of}={degree}; try --gpus NAME:{next_multiple}")
    return ranks // degree


LENGTH_MISSING = (
    "the length of a sequence: add {}=4096 after the file (in quotes with --from); `predict` and `write` take --seq too"
)
NAME_MODEL = "name it before --from, or with `read` and `write` by --model NAME"
NO_MODEL = f"the model: {NAME_MODEL}"
RANKS_MISSING = "on how many GPUs it runs: add the number to the machine, as in --gpus h100:64"


def build_reading(
    config: ParsedConfig,
    fields: Mapping[str, Any],
    *,
    model: Model | None,
    ranks: int | None,
    missing: tuple[str, ...] = (),
) -> Reading:
    """Build the reading from ``fields``, layout and job by path; without ``ranks`` it has neither of them.

    No value of ``fields`` is None.
    """
    document, values = config.document, config.values
    missing_facts = missing if model or missing else (NO_MODEL,)
    assumed = document.assumed
    if model and model.non_attention_mixers and fields.get("job.documents") == "separate":
        fields = {**fields, "job.documents": "joined"}
        mixers = join_names(model.non_attention_mixers, "and")
        means = f"{mixers} layers are counted as over joined documents, without partial chunks at the ends of each"
        assumed += (ParsedKey(key="(documents)", value="separate", means=means),)
    layout = job = None
    if model is None:
        ranks = None
    elif ranks is not None:
        layout = Layout.read(nest(fields, "layout"), origin=document.origin)
        job = Job.read(nest(fields, "job"), origin=document.origin)
    elif not missing:
        missing_facts += (RANKS_MISSING,)
    return Reading(
        software=values.software,
        version=values.version,
        origin=document.origin,
        model=model,
        layout=layout,
        job=job,
        ranks=ranks,
        understood=values.list_parsed(),
        defaulted=values.list_defaults(),
        not_understood=(*document.remarks, *values.list_unparsed()),
        harmless=values.list_harmless(),
        approximated=(*assumed, *values.list_approximated()),
        missing=missing_facts,
    )
