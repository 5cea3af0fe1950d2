"""A config of other software as our model, layout and job, as far as it states them.

Each key of the config is in one list: understood, approximated (read as the nearest setting that is counted), not
understood (it may change memory, FLOPs, messages or time, and nothing counts it), or harmless (it changes none of
these).
"""

from __future__ import annotations

from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.model.spec import Model
from fivefold.record import Record


class ParsedKey(Record):
    """A key of a config, its value and its meaning; for a key that is not understood, the reason."""

    key: str
    value: str
    means: str


class DataReading(Record):
    """The data of a config as ``[data]`` of a run file; ``remarks``: what it cannot express."""

    fields: dict[str, str | float]
    remarks: tuple[str, ...] = ()


class Reading(Record):
    """A config of ``software`` as records; ``missing``: what it does not state, one line each."""

    software: str
    version: str  # whose keys and defaults these are
    origin: str  # files, or a launch line
    model: Model | None = None
    layout: Layout | None = None
    job: Job | None = None
    ranks: int | None = None
    data: DataReading | None = None  # of supervised fine-tuning
    understood: tuple[ParsedKey, ...] = ()
    defaulted: tuple[ParsedKey, ...] = ()
    not_understood: tuple[ParsedKey, ...] = ()
    approximated: tuple[ParsedKey, ...] = ()
    harmless: tuple[ParsedKey, ...] = ()
    missing: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()  # why the layout does not fit the model or the job


class ConfigNotes(Record):
    """Keys of a third-party config that an answer must mention: ignored, approximated, harmless or left at defaults."""

    origin: str
    software: str
    version: str
    ignored: tuple[ParsedKey, ...] = ()  # keys that may have an effect, ignored at the user's request
    approximated: tuple[ParsedKey, ...] = ()
    harmless: tuple[ParsedKey, ...] = ()
    defaulted: tuple[ParsedKey, ...] = ()  # sequence and batch left at the software's defaults
    launched_ranks: int | None = None  # the config's number of GPUs, where a search is of another number
