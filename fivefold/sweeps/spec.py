"""The sweep file: lists of models, machines, ranks and job fields, whose every combination is a setting, and layouts.

models = ["llama3-8b"]                 machines = ["h100"]            ranks = [8, 16, 32]
layouts = ["dp* tp{1,2} zero{0,1}", "dp8 zero3", "best 3"]            recomputations = ["none", "full"]
sequences · batches (or batch_tokens) · precisions · stacks           [job]: fields that all settings share

Without a batch all settings have the one of the commands, a sequence per GPU, for the largest number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from fivefold.bounded_types import Degree, Sequences, Steps, Tokens
from fivefold.errors import UserError
from fivefold.job import Job, get_recipe
from fivefold.layout.batch import fill_batch
from fivefold.layout.pattern import expand_alternatives, fill_degree
from fivefold.machine.catalog import locate_machine
from fivefold.machine.catalog import resolve as resolve_machine
from fivefold.machine.spec import Machine
from fivefold.model.catalog import locate_model
from fivefold.model.catalog import resolve as resolve_model
from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.stack.catalog import build_stack as named_stack
from fivefold.text_files import read_file

Item = TypeVar("Item")
Some = Annotated[tuple[Item, ...], Field(min_length=1)]
_BEST = re.compile(r"best ([1-9]\d{0,3})")
# The lists of a sweep, with the job field that each varies.
FIELDS = {"sequences": "sequence", "batches": "global_batch", "precisions": "precision", "stacks": "stack"}


class Sweep(Record):
    """A sweep. An empty list varies nothing: the job's own value, the machine's ranks or the layout's ``ac=`` holds."""

    models: Some[str]
    machines: Some[str]
    layouts: Some[str]
    ranks: tuple[Degree, ...] = ()
    sequences: tuple[Tokens, ...] = ()
    batches: tuple[Sequences, ...] = ()  # sequences per step
    batch_tokens: tuple[Steps, ...] = ()  # instead of ``batches``: tokens per step, for any sequence length
    precisions: tuple[str, ...] = ()
    recomputations: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    job: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.batches and self.batch_tokens:
            raise ValueError("batches and batch_tokens both set the batch; keep one")
        varied_fields = {field for name, field in FIELDS.items() if getattr(self, name)}
        varied_fields |= {"global_batch"} if self.batch_tokens else set()
        if both := sorted(varied_fields & set(self.job)):
            lists = {field: name for name, field in FIELDS.items()}
            raise ValueError(f"{lists[both[0]]} and job.{both[0]} both set {both[0]}; keep one")
        return self

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Read a sweep file; raises ``UserError`` for any unknown name, layout keyword or job field in it.

        Files that it names are looked up next to it, then in the current folder.
        """
        sweep = cls.from_values(read_file(path), origin=str(path))
        return sweep.replace(
            models=tuple(locate_model(name, named_in=path) for name in sweep.models),
            machines=tuple(locate_machine(name, named_in=path) for name in sweep.machines),
        )

    @classmethod
    def from_values(cls, values: dict[str, Any], *, origin: str) -> Sweep:
        """Build the sweep of ``values``, validated like a file."""
        sweep = cls.read(values, origin=origin)
        Job.read(sweep.job, origin=f"{origin}: job")
        for name in sweep.precisions:
            get_recipe(name)
        for name in sweep.stacks:
            named_stack(name)
        sweep.requests()
        return sweep

    def requests(self) -> list[str]:
        """Return what is requested for every setting: layout texts and ``best K``.

        A layout text may leave a degree open (``dp*``).
        """
        texts: list[str] = []
        for line in self.layouts:
            expanded = [line] if _BEST.fullmatch(line.strip()) else expand_alternatives(line)
            if self.recomputations and any("ac=" in text for text in expanded):
                raise UserError(f"layouts: {line!r} and recomputations both set ac=; keep one")
            texts += expanded
        if self.recomputations:
            texts = [f"{text} ac={ac}" for text in texts for ac in self.recomputations]
        for text in texts:
            if parse_best(text) is None:
                expand_alternatives(text)  # validates the recomputation keyword too
        return list(dict.fromkeys(texts))


def parse_best(request: str) -> tuple[int, str | None] | None:
    """Return the count and the recomputation of ``best 3 ac=full``, 3 and ``full``; None for a layout."""
    words = request.split(" ac=")
    match = _BEST.fullmatch(words[0].strip())
    return (int(match[1]), words[1] if len(words) > 1 else None) if match else None


def fill_request(request: str, *, ranks: int) -> str | None:
    """Return a request with its open degree filled for ``ranks`` ranks; None if its degrees cannot make as many."""
    return request if parse_best(request) else fill_degree(request, ranks=ranks)


class SweepSetting(NamedTuple):
    """Everything but the layout. ``job`` is None if the job is invalid, with the reason in ``why``."""

    model: Model
    machine_name: str
    ranks: int
    sequence: int
    batch: int
    precision: str
    stack: str
    machine: Machine
    job: Job | None
    why: str


def list_settings(sweep: Sweep, *, local: Path) -> Iterator[SweepSetting]:
    """Yield every setting; those of one model and job are consecutive, so that they can share counts."""
    models = [resolve_model(name) for name in sweep.models]
    machines = [
        (name, resolve_machine(name, local=local, ranks=ranks))
        for name in sweep.machines
        for ranks in sweep.ranks or (None,)
    ]
    most_ranks = max(machine.ranks for _, machine in machines)
    for model, (values, job, why), (name, machine) in product(models, list(_list_jobs(sweep, most_ranks)), machines):
        yield SweepSetting(model, name, machine.ranks, *values, machine=machine, job=job, why=why)


def _list_jobs(sweep: Sweep, most_ranks: int) -> Iterator[tuple[tuple[int, int, str, str], Job | None, str]]:
    """Yield the sequence, batch, precision and stack of each job, then the job, or None and why it is invalid."""
    base = Job.read(sweep.job, origin="job")
    sequences = sweep.sequences or (base.sequence,)
    batches = sweep.batch_tokens or sweep.batches or (None,)
    for sequence, size, precision, stack in product(
        sequences, batches, sweep.precisions or ("",), sweep.stacks or ("",)
    ):
        if size is None:
            job = base.model_copy(update={"sequence": sequence})
            size = fill_batch(job, ranks=most_ranks, stated=sweep.job).global_batch
        batch, rest = divmod(size, sequence) if sweep.batch_tokens else (size, 0)
        names = (sequence, batch, precision or base.precision.name, stack or base.stack.name)
        if rest or not batch:
            yield names, None, f"a batch of {size} tokens is no whole number of sequences of {sequence}"
            continue
        values = {"sequence": sequence, "global_batch": batch, "precision": precision, "stack": stack}
        try:
            yield names, Job.read(sweep.job | {key: v for key, v in values.items() if v}, origin="job"), ""
        except UserError as mistake:
            yield names, None, str(mistake)
