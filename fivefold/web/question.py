"""What a page or a request asks, as a record: model, machine, layout and job in the words of the command line.

Its URL is the question: ``/plan?model=llama3-8b&machine=h100:8&layout=dp8+zero3&seq=8192&gbs=64``.
"""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from pydantic import Field, model_validator

from fivefold.bounded_types import Ffn, Heads, Layers, Vocab, Width
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.machine.spec import Machine
from fivefold.model import catalog as models
from fivefold.model.spec import Model
from fivefold.planner.compare import Case, in_precision, run_by
from fivefold.record import Mistake, Remark
from fivefold.requests.commands import (
    AskRequest,
    CompareRequest,
    LayoutRequest,
    MachineRequest,
    PlanRequest,
    RatiosRequest,
    SearchRequest,
)
from fivefold.requests.fields import FrontLevels, LayoutText, Lines, MachineName, ModelName, ShownLayouts
from fivefold.requests.job import get_job_words, load_job
from fivefold.web.folder import Folder

CONFIG = 60_000  # characters of a pasted config.json
MOST_LAYOUTS, MOST_LEVELS = 200, 64  # of a table and of a front that a page draws
Asked = TypeVar("Asked", bound="About")


class Noun(NamedTuple):
    """The nouns of a question; ``remarks``: what is legal, but perhaps not intended, a line each."""

    model: Model
    machine: Machine
    job: Job
    remarks: tuple[str, ...]


class About(MachineRequest, defer_build=False):
    """Model, machine and job. ``config``: a pasted config.json, or fields of a model, instead of ``model``."""

    shape: ClassVar[tuple[str, ...]] = ("layers", "width", "heads", "kv_heads", "ffn", "vocab")

    model: ModelName = "llama3-8b"
    config: str = Field("", max_length=CONFIG, description="The text of a config.json, instead of model.")
    machine: MachineName = "h100:8"
    layers: Layers | None = Field(None, description="Instead of the model's, as the next five.")
    width: Width | None = None
    heads: Heads | None = None
    kv_heads: Heads | None = None
    ffn: Ffn | None = None
    vocab: Vocab | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, values: object) -> object:
        """What a form leaves empty was not said."""
        if not isinstance(values, dict):
            return values
        lists = {k: [each for each in v if each] for k, v in values.items() if isinstance(v, list | tuple)}
        return {k: lists.get(k, v) for k, v in values.items() if v != ""}

    def resolve(self, *, folder: Folder, local: Path) -> Noun:
        """The records that the question names; a ``Mistake`` in one line."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Remark)
            model = self._model(folder)
            machine = machines.resolve(self.machine, local=local, find=folder.path)
            job = load_job(**get_job_words(self))
        return Noun(model, machine, job, tuple(str(each.message) for each in caught))

    def _model(self, folder: Folder) -> Model:
        if self.config:
            name = "pasted" if self.model == type(self).model_fields["model"].default else self.model
            found = models.from_values(_table(self.config), name=name, source="pasted config")
        else:
            found = models.resolve(self.model, find=folder.path)
        changes = {name: getattr(self, name) for name in self.shape if getattr(self, name) is not None}
        if not changes:
            return found
        name = " ".join([found.name, *(f"{field}={value}" for field, value in changes.items())])
        return Model.read(found.model_dump() | changes | {"name": name}, origin=name)

    def about(self) -> About:
        """The question without what only one page asks: with it a reader goes from page to page."""
        return self.as_(About)

    def as_(self, kind: type[Asked]) -> Asked:
        """The fields of ``kind``, of a question that asks more."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})

    def said(self) -> list[tuple[str, str]]:
        """Fields that are not as by default, as a form repeats them."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in fields}
        changed = {name: value for name, value in values.items() if value != fields[name].default}
        entries = ((name, value if isinstance(value, tuple) else (value,)) for name, value in changed.items())
        return [(name, spell_value(entry)) for name, values in entries for entry in values]

    def url(self, path: str, **changes: Any) -> str:
        """The address of this question, with some of its fields changed, at ``path``; what is default is left out."""
        said = {name: value for name, value in dict(self).items() if name in type(self).model_fields} | changes
        fields = type(self).model_fields
        said = {
            k: v for k, v in said.items() if v not in (None, "", ()) and (k not in fields or fields[k].default != v)
        }
        said = {k: spell_value(v) if isinstance(v, float) else v for k, v in said.items()}
        return f"{path}?{urlencode(said, doseq=True, quote_via=quote, safe=':=,/')}" if said else path


class Question(About, LayoutRequest, defer_build=False):
    """... and a layout: what ``predict`` and ``dryrun`` are asked."""

    layout: LayoutText = "dp8 zero3 mbs1"

    def chosen(self) -> Layout:
        """The layout."""
        return Layout.parse(self.layout)


class RatiosQuestion(About, RatiosRequest, defer_build=False):
    """What ``ratios`` is asked."""


class CompareQuestion(About, CompareRequest, defer_build=False):
    """... and what is laid beside each other: every layout on every machine, by every software, in every precision."""

    layout: Lines = Field((), description="Layouts.")
    machines: Lines = Field((), description="Machines, besides the first.")

    def cases(self, *, folder: Folder, local: Path) -> dict[Case, str]:
        """Every combination, and the address of its plan."""
        noun = self.resolve(folder=folder, local=local)
        found: dict[Case, str] = {}
        names = (self.machine, *self.machines)
        for stack, precision, name, text in product(self.stacks or ("",), self.precisions or ("",), names, self.layout):
            job = run_by(noun.job, stack) if stack else noun.job
            job = in_precision(job, precision) if precision else job
            machine = machines.resolve(name, local=local, find=folder.path)
            words = {
                "machine": name,
                "layout": text,
                "stack": stack or self.stack,
                "precision": precision or self.precision,
            }
            found[Case(noun.model, machine, Layout.parse(text), job)] = self.about().url("/plan", **words)
        return found


class SearchQuestion(About, SearchRequest, defer_build=False):
    """What ``search`` is asked: of so many layouts as a page can draw."""

    top: Annotated[ShownLayouts, Field(le=MOST_LAYOUTS)] = 10
    front: Annotated[FrontLevels, Field(le=MOST_LEVELS)] = 1


class AskQuestion(About, AskRequest, defer_build=False):
    """What ``ask`` is asked."""


class PlaybookQuestion(About, PlanRequest, defer_build=False):
    """What ``plan`` is asked."""


def spell_value(value: object) -> str:
    """Return a value as an address and a form have it."""
    return f"{value:.12g}".replace("e+", "e") if isinstance(value, float) else str(value)


def of_ranks(word: str, ranks: int) -> str:
    """A machine in words, with another number of ranks: ``h100:8 nic=1Gbit`` of 64 is ``h100:64 nic=1Gbit``."""
    named, space, others = machines.spell_machine(word).partition(" ")
    return f"{named.rpartition(':')[0] or named}:{ranks}{space}{others}"


def _table(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Mistake(f"the pasted config is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise Mistake(f"the pasted config holds a {type(values).__name__}, not a table of keys")
    return values
