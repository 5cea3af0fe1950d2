"""The question of a page or request as a record: model, machine, layout and job as on the command line.

Its URL is the question: ``/plan?model=llama3-8b&machine=h100:8&layout=dp8+zero3&seq=8192&gbs=64``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

from pydantic import Field, model_validator

from fivefold.bounded_types import Ffn, Heads, Layers, Tokens, Vocab, Width
from fivefold.errors import UsageWarning, UserError
from fivefold.job import Job
from fivefold.layout.batch import find_most_ranks
from fivefold.layout.spec import Layout
from fivefold.layout.stored_base import keep_stored_base
from fivefold.layout.where import Where
from fivefold.machine import catalog as machines
from fivefold.machine.spec import Machine
from fivefold.model import catalog as models
from fivefold.model.spec import Model
from fivefold.planner.compare import ComparedCase, with_precision, with_stack
from fivefold.requests.batch import choose_batch
from fivefold.requests.commands import (
    AskedQuestion,
    AskRequest,
    CompareRequest,
    LayoutRequest,
    MachineRequest,
    PlanRequest,
    RatiosRequest,
    SearchRequest,
)
from fivefold.requests.fields import FrontLevels, LayoutText, Line, Lines, MachineName, ModelName, ShownLayouts
from fivefold.requests.job import collect_fields, get_job_words, list_stated, load_job
from fivefold.requests.offers import apply_prices
from fivefold.requests.schema import make_field
from fivefold.requests.settings import AppliedSettings, UserSettings, load_settings, show_settings_file
from fivefold.requests.words import TOKENS
from fivefold.sweeps.spec import Sweep
from fivefold.web.folder import ServedFolder

CONFIG = 60_000  # largest pasted config.json, in characters
MAX_LAYOUTS, MAX_LEVELS = 200, 64  # layouts in a table, and points of a front, that a page draws
PRECISION_PARTS = (  # of the job's precision, which the page offers as choices
    "weights_bytes",
    "gradients_bytes",
    "master_bytes",
    "accumulated_bytes",
    "moments_bytes",
    "scaling",
    "gathers",
    "dispatches",
)
Asked = TypeVar("Asked", bound="JobQuestion")


class ResolvedRequest(NamedTuple):
    """The records that a question names.

    ``remarks``: what is valid but perhaps not intended, one line each; ``settings``: the line that names the user's
    settings which took effect, or empty; ``stated``: the fields of the job that it gives; ``batch_reason``: why the
    global batch that it leaves open is not one sequence per GPU.
    """

    model: Model
    machine: Machine
    job: Job
    remarks: tuple[str, ...]
    settings: str = ""
    stated: frozenset[str] = frozenset()
    batch_reason: str = ""

    @property
    def chosen_batch(self) -> dict[str, int]:
        """Return the global batch as a field of a URL, if the question leaves it open: another one may have another."""
        return {} if "global_batch" in self.stated else {"gbs": self.job.global_batch}


class Mistake(NamedTuple):
    """Why a question has no answer, in one line, and the field to correct; empty if there is no reason, or no field.

    ``entry``: the number of the wrong entry of a field that is a list.
    """

    message: str = ""
    field: str = ""
    entry: int = 0


NO_MISTAKE = Mistake()
REQUIRED_FIELDS = ("model", "machine")  # fields that a form may leave empty, and that are then asked for


class JobQuestion(MachineRequest, defer_build=False):
    """Model, machine and job. ``config``: a pasted config.json, or fields of a model, instead of ``model``."""

    reads_settings: ClassVar[bool] = True
    unlinked: ClassVar[tuple[str, ...]] = ()  # fields that do not change an answer, which links of the page leave out
    shape: ClassVar[tuple[str, ...]] = ("layers", "width", "heads", "kv_heads", "ffn", "vocab")
    job_keys: ClassVar[dict[str, str]] = {  # fields of a job that the page has controls for, and their keys
        "loss": "loss",
        "documents": "documents",
        "freeze": "freeze",
        "fused_scans": "fused_scans",
        "adapter_targets": "adapter.targets",
        "modules_to_save": "adapter.modules_to_save",
        "rank_pattern": "adapter.rank_pattern",
        "alpha_pattern": "adapter.alpha_pattern",
        **{name: name for name in ("images", "image_tokens", "freeze_vision_tower", "freeze_projector")},
        **{part: f"precision.{part}" for part in PRECISION_PARTS},
    }

    model: ModelName = "llama3-8b"
    config: str = Field("", max_length=CONFIG, description="The text of a config.json, instead of model.")
    machine: MachineName = "h100:8"
    layers: Layers | None = Field(
        None, description="Number of layers, instead of the model's; likewise the next five fields."
    )
    width: Width | None = None
    heads: Heads | None = None
    kv_heads: Heads | None = None
    ffn: Ffn | None = None
    vocab: Vocab | None = None
    loss: Line | None = Field(None, description="Kernel of the loss, as --set loss=…; likewise the next field.")
    documents: Line | None = None
    freeze: Line | None = Field(None, description="Parts that are not trained, such as embed_tokens,layers[:-2].")
    fused_scans: Line | None = Field(None, description="true: scans run the kernels of flash-linear-attention.")
    adapter_targets: Line | None = Field(None, description="Layers with an adapter, such as q_proj,v_proj.")
    modules_to_save: Line | None = Field(
        None, description="Modules that are trained in full next to the adapter: embed_tokens, lm_head or both."
    )
    rank_pattern: Line | None = Field(None, description="Ranks of some targets of the adapter, such as q_proj:8.")
    alpha_pattern: Line | None = Field(None, description="Alphas of some targets of the adapter, such as q_proj:16.")
    images: int | None = make_field(None, "Images in a sequence, of a model with a vision tower.", ge=0)
    image_tokens: Tokens | None = Field(None, description="Tokens of an image.")
    freeze_vision_tower: bool = Field(False, description="The vision tower is not trained.")
    freeze_projector: bool = Field(False, description="Neither is the projector.")
    weights_bytes: Line | None = Field(
        None, description="Bytes of a weight, instead of the precision's; likewise the next seven fields."
    )
    gradients_bytes: Line | None = None
    master_bytes: Line | None = None
    accumulated_bytes: Line | None = None
    moments_bytes: Line | None = None
    scaling: Line | None = None
    gathers: Line | None = None
    dispatches: Line | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_fields(cls, values: object) -> object:
        """Drop the fields that a form leaves empty, except machine and model, which is needed without a config."""
        if not isinstance(values, dict):
            return values
        lists = {k: [entry for entry in v if entry] for k, v in values.items() if isinstance(v, list | tuple)}
        needed = ("machine",) if values.get("config") else REQUIRED_FIELDS
        return {k: lists.get(k, v) for k, v in values.items() if v != "" or k in needed}

    def resolve(self, *, folder: ServedFolder, local: Path) -> ResolvedRequest:
        """Resolve the records that the question names; raises ``UserError`` in one line."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UsageWarning)
            model = self.resolve_model(folder)
            if not self.machine.strip():
                raise UserError("name a machine, such as h100:8, or a file")
            named = [machines.resolve(name, local=local, find=folder.path) for name in self.machine_names]
            machine = named[0]
            settings = load_settings() if self.reads_settings else UserSettings()
            applied = AppliedSettings(file=show_settings_file())
            stack = self.stack
            if settings.stack and stack is None and not any(word.startswith("stack=") for word in self.set):
                stack = settings.stack
                applied = applied.replace(stack=stack)
            name = machine.name.split()[0]
            if machine.dollars_per_rank_hour is None and (price := settings.prices.get(name)):
                machine = machine.replace(dollars_per_rank_hour=price)
                applied = applied.replace(prices={name: price})
            words = get_job_words(self) | {"stack": stack, "settings": list(self.settings)}
            job, stated = load_job(**words), list_stated(**words)
            job = keep_stored_base(job, model)
            job, batch_reason = self._choose_batch(model, job, stated, named)
        remarks = (*(str(warning.message) for warning in caught), *self._explain_layouts(named))
        used_settings = "" if applied.is_empty else applied.describe()
        return ResolvedRequest(model, machine, job, remarks, used_settings, stated, batch_reason)

    def find_mistake(self, *, folder: ServedFolder, local: Path) -> Mistake:
        """Return why the question cannot be resolved, and the field that this is about, if there is one.

        It is the field without which the question can be resolved, or the first without which the reason is another.
        """

        def resolve_with(**changes: object) -> str:
            try:
                question = self.replace(**changes)
                resolved = question.resolve(folder=folder, local=local)
                question.validate_texts(resolved.machine)
            except UserError as error:
                return str(error)
            return ""

        message = resolve_with()
        if not message:
            return NO_MISTAKE
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        others = {name: resolve_with(**{name: defaults[name]}) for name, _ in self.list_changed_fields()}
        fields = sorted(
            (name for name, other in others.items() if other != message), key=lambda name: bool(others[name])
        )
        if not fields:
            return Mistake(message)
        entries = getattr(self, fields[0])
        rests = [(*entries[:n], *entries[n + 1 :]) for n in range(len(entries))] if isinstance(entries, tuple) else []
        entry = next((n for n, rest in enumerate(rests) if resolve_with(**{fields[0]: rest}) != message), 0)
        return Mistake(message, fields[0], entry)

    @property
    def machine_names(self) -> tuple[str, ...]:
        """Return the names of the machines of the question, the first of which is that of its plan."""
        return (self.machine,)

    def _choose_batch(
        self, model: Model, job: Job, stated: frozenset[str], named: Sequence[Machine]
    ) -> tuple[Job, str]:
        """Return the job with a global batch for the machines ``named``, if the question names none, and its reason."""
        return choose_batch(
            model,
            job,
            run_tokens=self.run_tokens,
            ranks=find_most_ranks((machine.ranks for machine in named), self.tried_gpu_counts),
            stated=stated,
            layouts=self._list_layouts(named),
        )

    def validate_texts(self, machine: Machine) -> None:
        """Raise ``UserError`` if a layout or another text that ``resolve`` does not read is not valid."""
        self.parse_layouts([machine])

    @property
    def layout_texts(self) -> tuple[str, ...]:
        """Return the layouts of the question as they are written."""
        return ()

    def parse_layouts(self, named: Sequence[Machine]) -> list[Layout]:
        """Return the layouts of the question on its machines; raises ``UserError`` if one is not valid."""
        return [parse_layout(text, machine) for text in self.layout_texts for machine in named]

    def _list_layouts(self, named: Sequence[Machine]) -> list[Layout]:
        """Return the layouts of the request; the default batch is a multiple of what they need."""
        return self.parse_layouts(named)

    def _explain_layouts(self, named: Sequence[Machine]) -> list[str]:
        """Return what the machines fill in of the layouts, one line each; a layout that is not valid has none."""
        remarks = list[str]()
        for text, machine in product(self.layout_texts, named):
            with suppress(UserError):
                remarks += parse_with_remarks(text, machine)[1]
        return list(dict.fromkeys(remarks))

    @property
    def settings(self) -> tuple[str, ...]:
        """Return all fields of the job that the command line takes by ``--set``."""
        chosen = ((key, getattr(self, name)) for name, key in self.job_keys.items())
        return (*self.set, *(f"{key}={str(value).lower()}" for key, value in chosen if value not in (None, False)))

    @property
    def model_name(self) -> str:
        """Return the name of the model; that of a pasted config without a name of its own is "pasted"."""
        is_unnamed = self.config and self.model == type(self).model_fields["model"].default
        return "pasted" if is_unnamed else self.model

    def resolve_model(self, folder: ServedFolder) -> Model:
        """Return the model of a question, pasted, of the catalog or of a file, with the fields that were changed."""
        if self.config:
            model = models.from_values(_parse_table(self.config), name=self.model_name, source="pasted config")
        elif not self.model.strip():
            raise UserError("name a model, such as llama3-8b or a file, or paste a config.json")
        else:
            model = models.resolve(self.model, find=folder.path)
        changes = {name: getattr(self, name) for name in self.shape if getattr(self, name) is not None}
        if not changes:
            return model
        name = " ".join([model.name, *(f"{field}={value}" for field, value in changes.items())])
        return Model.read(model.model_dump() | changes | {"name": name}, origin=name)

    def to_shared(self) -> JobQuestion:
        """Return the question without the fields of single pages, to carry it from page to page."""
        return self.convert(JobQuestion)

    def convert(self, kind: type[Asked]) -> Asked:
        """Return the fields of ``kind``, from a question with more fields."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})

    def list_changed_fields(self) -> list[tuple[str, str]]:
        """Return the fields that differ from their defaults, as a form repeats them."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in fields}
        changed_fields = {name: value for name, value in values.items() if value != fields[name].default}
        entries = ((name, value if isinstance(value, tuple) else (value,)) for name, value in changed_fields.items())
        return [(name, spell_field(name, entry)) for name, values in entries for entry in values]

    def url(self, path: str, **changes: Any) -> str:
        """Return the URL of this question at ``path``, with some fields changed; defaults are left out."""
        parameters = self.parameters | {name: self._encode(name, value) for name, value in changes.items()}
        stated = "&".join(filter(None, parameters.values()))
        return f"{path}?{stated}" if stated else path

    @cached_property
    def parameters(self) -> dict[str, str]:
        """Return each field as a URL has it, which is empty if it is the default. A page has a hundred URLs."""
        fields = type(self).model_fields.keys() - self.unlinked
        return {name: self._encode(name, value) for name, value in self if name in fields}

    def _encode(self, name: str, value: Any) -> str:
        """Return a field with a value as a URL has it, or an empty text if that is the default."""
        field = type(self).model_fields.get(name)
        if (value in (None, "", ()) and name not in REQUIRED_FIELDS) or (field and field.default == value):
            return ""
        spelled = spell_field(name, value) if isinstance(value, float) else value
        return urlencode({name: spelled}, doseq=True, quote_via=quote, safe=":=,/")


class PredictQuestion(JobQuestion, LayoutRequest, defer_build=False):
    """A question about one layout, for ``predict``."""

    layout: LayoutText = "dp8 zero3 mbs1"

    @property
    def layout_texts(self) -> tuple[str, ...]:
        """Return the layout."""
        return (self.layout,)

    def _list_layouts(self, named: Sequence[Machine]) -> list[Layout]:
        try:
            return self.parse_layouts(named)
        except UserError:  # the answer names it, below the controls
            return []

    def parse_layout(self, machine: Machine) -> Layout:
        """Parse the layout, of which ``machine`` may fill in the data-parallel ranks."""
        return parse_layout(self.layout, machine)


class DryrunQuestion(PredictQuestion, defer_build=False):
    """A question to ``dryrun``, which reads no user settings."""

    reads_settings: ClassVar[bool] = False


class RatiosQuestion(JobQuestion, RatiosRequest, defer_build=False):
    """A question to ``ratios``."""

    @property
    def layout_texts(self) -> tuple[str, ...]:
        """Return the layout."""
        return (self.layout,)


class CompareQuestion(JobQuestion, CompareRequest, defer_build=False):
    """A question to ``compare``: every layout on every machine, with every software, in every precision."""

    layout: Lines = Field((), description="Layouts.")
    machines: Lines = Field((), description="Machines, besides the first.")

    @property
    def machine_names(self) -> tuple[str, ...]:
        """Return the names of all machines."""
        return (self.machine, *self.machines)

    @property
    def layout_texts(self) -> tuple[str, ...]:
        """Return the layouts."""
        return self.layout

    def cases(self, *, folder: ServedFolder, local: Path) -> dict[ComparedCase, str]:
        """Return every combination, with the URL of its plan."""
        resolved = self.resolve(folder=folder, local=local)
        url_by_case: dict[ComparedCase, str] = {}
        names = self.machine_names
        machines_by_name = {
            name: apply_prices([machines.resolve(name, local=local, find=folder.path)], self.price)[0] for name in names
        }
        stacks = split_at_commas(self.stacks) or ("",)
        precisions = split_words(self.precisions) or ("",)
        for stack, precision, name, text in product(stacks, precisions, names, self.layout):
            job = with_stack(resolved.job, stack) if stack else resolved.job
            job = with_precision(job, precision) if precision else job
            machine = machines_by_name[name]
            words = {
                "machine": name,
                "layout": text,
                "stack": stack or self.stack,
                "precision": precision or self.precision,
                **resolved.chosen_batch,
            }
            url_by_case[ComparedCase(resolved.model, machine, parse_layout(text, machine), job)] = self.to_shared().url(
                "/plan", **words
            )
        return url_by_case


def parse_layout(text: str, machine: Machine) -> Layout:
    """Parse a layout as the command line does: the machine may fill in its data-parallel ranks."""
    return parse_with_remarks(text, machine)[0]


def parse_with_remarks(text: str, machine: Machine) -> tuple[Layout, tuple[str, ...]]:
    """Parse a layout as ``parse_layout`` does, and say what the machine filled in."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UsageWarning)
        layout = Layout.parse(text, machine=machine)
    return layout, tuple(str(warning.message) for warning in caught)


def split_at_commas(fields: Iterable[str]) -> tuple[str, ...]:
    """Return the names in the fields of a page, of which one may hold several with commas, as on the command line."""
    return tuple(name.strip() for field in fields for name in field.split(",") if name.strip())


def split_words(fields: Iterable[str]) -> tuple[str, ...]:
    """Return the numbers or names without spaces in the fields of a page: at commas and at spaces."""
    return tuple(word for name in split_at_commas(fields) for word in name.split())


class SearchQuestion(JobQuestion, SearchRequest, defer_build=False):
    """A question to ``search``, limited to as many layouts as a page can draw."""

    top: Annotated[ShownLayouts, Field(le=MAX_LAYOUTS)] = 10
    front: Annotated[FrontLevels, Field(le=MAX_LEVELS)] = 1

    @property
    def machine_names(self) -> tuple[str, ...]:
        """Return the names of all machines."""
        return (self.machine, *self.machines)

    def validate_texts(self, machine: Machine) -> None:
        """Raise ``UserError`` if the constraints or the first layout of changes are not valid."""
        Where.parse(self.where)
        if self.keep:
            parse_layout(self.keep, machine)


class AskQuestion(JobQuestion, AskRequest, defer_build=False):
    """A question to ``ask``."""

    @property
    def layout_texts(self) -> tuple[str, ...]:
        """Return the layout, if one is given."""
        return (self.layout,) if self.layout else ()


class ChosenQuestion(AskQuestion, defer_build=False):
    """A question to ``ask``, and which one it is."""

    question: AskedQuestion = Field("micro-batch", description="The question.")

    @property
    def run_tokens(self) -> float | None:
        """Return the training tokens if the question is about a complete run; ``tokens`` begins with the default."""
        return self.tokens if self.question in ("run", "tokens") else None


class PlaybookQuestion(JobQuestion, PlanRequest, defer_build=False):
    """A question to ``plan``, which answers what the batch is."""

    def _choose_batch(
        self, model: Model, job: Job, stated: frozenset[str], named: Sequence[Machine]
    ) -> tuple[Job, str]:
        return job, ""


class FilesQuestion(PredictQuestion, defer_build=False):
    """A question about files of a run, dropped on the page or below the served folder."""

    files: Lines = Field((), description="Files or folders of the run.")
    against: bool = Field(False, description="Compare with the prediction of the layout.")


class TraceQuestion(FilesQuestion, defer_build=False):
    """A question to ``trace``."""

    step: int | None = make_field(None, "Analyze only the ProfilerStep with this number.", ge=0)


class ExplainQuestion(FilesQuestion, defer_build=False):
    """A question to ``explain``."""


class SweepStart(JobQuestion):
    """A sweep to start: every combination of the question's model, machine and job with these lists.

    ``rows``: the file below the served folder that the rows are written to.
    """

    models: Lines = Field((), description="Models, besides the first.")
    machines: Lines = Field((), description="Machines, besides the first.")
    layouts: Lines = Field(("best 3",), description="Layouts, which may leave dp open (dp*), or best K.")
    ranks: Lines = Field((), description="Numbers of GPUs. Default: the machine's.")
    sequences: Lines = Field((), description="Tokens per sequence. Default: the job's; likewise the next four fields.")
    batches: Lines = ()
    precisions: Lines = ()
    stacks: Lines = ()
    recomputations: Lines = Field((), description="Recomputation of each layout. Default: the layout's own.")
    rows: Line = Field("sweep.jsonl", description="File for the rows: .jsonl, .csv or .parquet.")

    def read_sweep(self, *, folder: ServedFolder, local: Path) -> Sweep:
        """Build the sweep; raises ``UserError`` for what is not valid, and for files outside of the folder."""
        if self.config or any(getattr(self, name) is not None for name in self.shape):
            raise UserError("a sweep takes names of models: save the changed model as a file, and give its name")
        model_names = (self.model, *self.models)
        machine_names = (self.machine, *self.machines)
        for name in model_names:
            models.resolve(name, find=folder.path)
        for name in machine_names:
            machines.resolve(name, local=local, find=folder.path)
        job = collect_fields(
            None, list(self.settings), **{k: v for k, v in get_job_words(self).items() if k not in ("settings", "job")}
        )
        if (stack := load_settings().stack) and "stack" not in job and not self.stacks:
            job["stack"] = stack
        lists = ("ranks", "sequences", "batches", "precisions", "recomputations")
        values = {name: split_words(getattr(self, name)) for name in lists}
        values["stacks"] = split_at_commas(self.stacks)
        return Sweep.from_values(
            {"models": model_names, "machines": machine_names, "layouts": self.layouts, **values, "job": job},
            origin="sweep",
        )


def spell_value(value: object) -> str:
    """Return a value as URLs and forms contain it."""
    return f"{value:.12g}".replace("e+", "e") if isinstance(value, float) else str(value)


def spell_field(name: str, value: object) -> str:
    """Return a field's value as URLs and forms contain it, a number of tokens as people write it: ``2T``, ``1.5B``."""
    if name == "tokens" and isinstance(value, float):
        for unit in ("T", "B", "M"):
            if value >= TOKENS[unit]:
                return f"{value / TOKENS[unit]:.12g}{unit}"
    return spell_value(value)


def _parse_table(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the pasted config is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"the pasted config holds a {type(values).__name__}, not a table of keys")
    return values
