"""What a page or a request asks, as a record: model, machine, layout and job in the words of the command line.

Its URL is the question: ``/plan?model=llama3-8b&machine=h100:8&layout=dp8+zero3&seq=8192&gbs=64``.
"""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fivefold.bounded_types import Ffn, Heads, Layers, Vocab, Width
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.machine.spec import Machine
from fivefold.model import catalog as models
from fivefold.model.spec import Model
from fivefold.planner.compare import Case, in_precision, run_by
from fivefold.record import Mistake, Record, Remark
from fivefold.requests.across import is_asked
from fivefold.requests.job import load_job
from fivefold.requests.words import tokens_of
from fivefold.step import FITS_RISK
from fivefold.web.folder import Folder

TEXT = 2000  # longest of a name or line, in characters
CONFIG = 60_000  # of a pasted config.json
Asked = TypeVar("Asked", bound="About")
Line = Annotated[str, Field(max_length=TEXT)]
Lines = Annotated[
    tuple[Line, ...],
    BeforeValidator(lambda given: tuple(each for each in given if each) if isinstance(given, list | tuple) else given),
    Field(max_length=32),
]

Goal = Literal["time", "cost", "memory", "energy", "robust"]


def _number_of_tokens(text: str) -> str:
    tokens_of(text)  # raises if it is none
    return text


Tokens = Annotated[Line, AfterValidator(_number_of_tokens)]  # 2e12 or 2T, kept as it was said


class Noun(NamedTuple):
    """The nouns of a question; ``remarks``: what is legal, but perhaps not intended, a line each."""

    model: Model
    machine: Machine
    job: Job
    remarks: tuple[str, ...]


class About(Record):
    """Model, machine and job. ``config``: a pasted config.json, or fields of a model, instead of ``model``."""

    shape: ClassVar[tuple[str, ...]] = ("layers", "width", "heads", "kv_heads", "ffn", "vocab")

    model: Line = Field("llama3-8b", description="Catalog name, or a config.json, .toml or .json below the folder.")
    config: str = Field("", max_length=CONFIG, description="The text of a config.json, instead of model.")
    machine: Line = Field("h100:8", description="NAME[:GPUS] such as h100:8 or 'l40s:16 nic=100Gbit/node', or local.")
    seq: int | None = Field(None, description="Tokens per sequence.")
    gbs: int | None = Field(None, description="Sequences per optimizer step.")
    precision: Line | None = Field(None, description="fp32, bf16, fp8, mxfp8, …")
    attention: Line | None = Field(None, description="flash, flash2, flash1 or unfused.")
    stack: Line | None = Field(None, description="The software that runs it: fivefold, megatron-core, torchtitan, …")
    set: Lines = Field((), description="Any other job field: loss=chunked, optimizer.kind=muon.")
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
        return {k: v for k, v in values.items() if v != ""} if isinstance(values, dict) else values

    def resolve(self, *, folder: Folder, local: Path) -> Noun:
        """The records that the question names; a ``Mistake`` in one line."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Remark)
            model = self._model(folder)
            machine = machines.resolve(self.machine, local=local, find=folder.path)
            settings = {name: getattr(self, name) for name in ("seq", "gbs", "precision", "attention", "stack")}
            job = load_job(settings=list(self.set), **settings)
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
        found = ((name, getattr(self, name)) for name in fields if getattr(self, name) != fields[name].default)
        return [
            (name, str(each)) for name, value in found for each in (value if isinstance(value, tuple) else (value,))
        ]

    def url(self, path: str, **changes: Any) -> str:
        """The address of this question, with some of its fields changed, at ``path``; what is default is left out."""
        said = {name: value for name, value in dict(self).items() if name in type(self).model_fields} | changes
        fields = type(self).model_fields
        said = {
            k: v for k, v in said.items() if v not in (None, "", ()) and (k not in fields or fields[k].default != v)
        }
        return f"{path}?{urlencode(said, doseq=True, quote_via=quote, safe=':=,/')}" if said else path


class Question(About):
    """... and a layout: what ``predict`` and ``dryrun`` are asked."""

    layout: Line = Field("dp8 zero3 mbs1", description="Such as 'dp16 tp8 pp4 v2 zero1 mbs1 ac=selective'.")

    def chosen(self) -> Layout:
        """The layout."""
        return Layout.parse(self.layout)


class RatiosQuestion(Question):
    """What ``ratios`` is asked."""

    layout: Line = Field("dp1", description="The degrees that stay; each axis is varied alone.")


class CompareQuestion(About):
    """... and what is laid beside each other: every layout on every machine, by every software, in every precision."""

    layout: Lines = Field((), description="Layouts.")
    machines: Lines = Field((), description="Machines, besides the first.")
    stacks: Lines = Field((), description="Several softwares.")
    precisions: Lines = Field((), description="Several precisions.")

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


class SearchQuestion(About):
    """What ``search`` is asked, besides: of layouts of one machine, or of a run on several."""

    by: Goal = Field(
        "time", description="What the best has least of; robust: of what it loses if the run is otherwise."
    )
    top: int = Field(10, ge=1, le=200, description="How many layouts to show.")
    where: Line = Field("", description="Only such layouts: 'tp<=8 cp=1 zero<=1 ac=none,selective'.")
    memory: Line = Field("", description="Plan for GPUs of so much memory, such as 72GiB.")
    risk: float = Field(
        FITS_RISK, ge=0, le=0.99, description="Propose layouts that run out of memory with at most this probability."
    )
    within: float | None = Field(None, ge=0, le=1, description="Layouts so near to the best are alike; 0.02.")
    exact: bool = Field(False, description="The ranking alone, without a proposal.")
    front: int = Field(1, ge=1, le=64, description="Memory limits for the front of memory against time.")
    also: Lines = Field((), description="Another precision to try, such as fp8.")
    two: bool = Field(False, description="Also tensor parallelism in two dimensions, which is not run.")
    keep: Line = Field("", description="Change one thing at a time from this layout: what helps most?")
    price: Lines = Field((), description="Dollars per GPU and hour: 'h100=2.2/h', or '2.2'.")
    machines: Lines = Field((), description="More machines: one table of the run on each.")
    tokens: Tokens = Field("", description="Of the run, with several machines or ranks: such as 2T.")
    deadline: Line = Field("", description="The fewest ranks of each machine whose run takes at most this: 30d.")
    ranks: Line = Field("", description="Numbers of ranks to try, from FEW-MANY: 64-512.")
    assume: Lines = Field((), description="Of a whole run: failures=, restart=, checkpoint=, pue=, grid=, …")

    @property
    def is_of_a_run(self) -> bool:
        """Whether it is answered by one run on several machines or numbers of ranks."""
        words = (self.tokens, self.deadline, self.ranks, self.assume)
        return is_asked(self.by, self.machines, *(word or None for word in words))


class WholeQuestion(Question):
    """What ``ask`` is asked, besides; without a layout, of the one that a search puts first."""

    layout: Line = Field("", description="Such as 'dp16 tp8 pp4 v2 zero1 mbs1'; without it, the fastest that fits.")
    tokens: Tokens = Field("1e12", description="Of the whole run, for batch and run: 2T.")
    price: Lines = Field((), description="Dollars per GPU and hour: 'h100=2.2/h', or '2.2'.")
    assume: Lines = Field((), description="Of a whole run: failures=, restart=, checkpoint=, pue=, grid=, …")
    noise: Line = Field("", description="Of batch: the gradient noise scale in tokens, or a run's folder that has it.")
    risk: float = Field(
        FITS_RISK, ge=0, le=0.99, description="Propose layouts that run out of memory with at most this probability."
    )


class PlaybookQuestion(About):
    """What ``plan`` is asked, besides."""

    tokens: Tokens = Field("1e12", description="Of the whole run: 2T.")
    batch: Literal["advised", "job"] = Field(
        "advised", description="The batch: by the literature (unless gbs), or the job's."
    )
    where: Line = Field("", description="Of the search: only such layouts, as 'tp<=8 cp=1'.")
    risk: float = Field(
        FITS_RISK, ge=0, le=0.99, description="Propose layouts that run out of memory with at most this probability."
    )
    price: Lines = Field((), description="Dollars per GPU and hour: 'h100=2.2/h', or '2.2'.")
    assume: Lines = Field((), description="Of a whole run: failures=, restart=, checkpoint=, pue=, grid=, …")


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
