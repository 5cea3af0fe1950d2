"""Run files, which ``train RUN.toml`` reads. Imports no torch, so that an invalid file is reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from fivefold.errors import UserError
from fivefold.job import FORMAT_OBJECTIVES, Job
from fivefold.layout.schedule.csv_file import read_table
from fivefold.layout.schedule.table import Table
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import locate_machine
from fivefold.model.catalog import locate_model, name_model
from fivefold.model.spec import Model
from fivefold.record import Record
from fivefold.text_files import locate, read_file
from fivefold.trainer.data.loader import Loader
from fivefold.trainer.data.packing import Excess, PackedLoader, Packing, PairLoader
from fivefold.trainer.data.shards import Shards, Split
from fivefold.trainer.data.supervised import DataFormat, LossOn, SampleFormat, sample_format
from fivefold.trainer.faults.spikes import Faults

KEYWORDS = ("stdlib", "bytes")  # values in [data] that are not paths: a corpus and a tokenizer


class Data(Record):
    """[data]: what to train on. ``corpus``: ``stdlib`` (Python's own library), or a file or folder."""

    corpus: str = "stdlib"  # ``stdlib`` (Python's own library), or a file or folder of text or of samples
    tokenizer: str = "bytes"  # bytes, bpe:SIZE, or a tokenizer.json
    # text; messages: conversations as a list of role and content, or ShareGPT's from and value; completions: a prompt
    # and a completion. These two need [job] objective = "sft". preferences: a prompt, a chosen and a rejected
    # completion, for objective = "dpo"
    format: DataFormat = "text"
    # field of .jsonl, column of .parquet. Default: text; messages or conversations; prompt,completion;
    # prompt,chosen,rejected
    key: str = ""
    heldout: float = Field(0.02, gt=0, lt=1)  # share of the documents
    chat_template: Path | None = None  # a .jinja file; None: the tokenizer's own template
    loss_on: LossOn = "replies"  # replies: what the assistant wrote, or the completion; all: every token
    # best-fit: as many samples as fit into a sequence; none: one. Preferences are never packed
    packing: Packing = "best-fit"
    excess: Excess = "truncate"  # a sample longer than the sequence loses its end (truncate), or is left out (drop)


class Checkpoints(Record):
    """[checkpoints]: how often the run is saved; the newest ``keep`` are kept."""

    every_steps: NonNegativeInt = 100  # 0: no checkpoints, unless a signal ends the run
    keep: PositiveInt = 2  # newest checkpoints that are kept
    asynchronous: bool = True  # copy to host memory, and write the copy while training goes on

    def is_due(self, step: int, *, last: bool) -> bool:
        """Return whether a run saves after ``step`` steps, of which this may be the ``last``."""
        return self.every_steps > 0 and (last or step % self.every_steps == 0)


class Start(Record):
    """[start]: initial weights of a run that has no checkpoint yet; absent: random."""

    weights: Path | None = None  # a Hugging Face folder
    adapter: Path | None = None  # a PEFT adapter folder: weights of [job] adapter; absent: A random, B zero

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.adapter is not None and self.weights is None:
            raise ValueError("adapter needs the weights under it; set weights to the folder of the base")
        return self


class Loggers(Record):
    """[logs]: further loggers, in addition to the run's folder. ``wandb``: project of Weights & Biases; empty: none."""

    wandb: str = ""  # project of Weights & Biases; empty: none


class Run(Record):
    """A training run: names of model, machine and layout (``auto``: the fastest that fits), the job, settings."""

    model: str = "tiny"  # catalog name, or path of a model file
    machine: str = "local"  # catalog name such as ``h100:8``, machine file, or ``local``
    layout: str = "auto"  # keywords of a layout; auto: the fastest that fits
    measure: NonNegativeInt = (
        0  # with layout = "auto": train this many of the best for a few steps, then train the fastest
    )
    schedule: Path | None = None  # a custom pipeline schedule (.csv) instead of the layout's
    folder: Path = Path("runs/tiny")  # where logs, checkpoints and results are written; default: runs/ and the model
    job: Job = Job()  # [job]: sequence, batch, precision, optimizer, software
    start: Start = Start()  # [start]: initial weights
    data: Data = Data()  # [data]: text to train on
    checkpoints: Checkpoints = Checkpoints()  # [checkpoints]: how often the run is saved
    faults: Faults = Faults()  # [faults]: what happens after a fault
    logs: Loggers = Loggers()  # [logs]: further loggers
    evaluate_every: PositiveInt = 50  # steps between two evaluations of the held-out loss
    evaluate_sequences: PositiveInt = 64  # held-out sequences of one evaluation
    trace_steps: NonNegativeInt = (
        0  # steps whose trace is written to ``folder``/trace; 0: a few are traced, none written
    )
    noise_scale: bool = False  # measure the gradient noise scale, in every step but the metered one
    sample: str = "def "  # prompt of the sample; empty: none
    sample_tokens: NonNegativeInt = 200  # tokens of the sample
    sample_at: Literal["end", "evaluations"] = "end"  # evaluations: also at each of them, as an event of the log

    @model_validator(mode="before")
    @classmethod
    def _name_folder(cls, values: object) -> object:
        """Name the folder after the model, so that runs of two models do not share one."""
        if not isinstance(values, dict) or "folder" in values or not isinstance(values.get("model"), str):
            return values
        return {**values, "folder": Path("runs") / name_model(Path(values["model"]))}

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read a run file; files that it names are next to it or in the working directory, as ``folder`` is."""
        if not path.suffix and not path.exists():
            raise UserError(f'{path}: no such file; a run file names the model, such as model = "{path}" in run.toml')
        values = read_file(path)
        if not values:
            raise UserError(f'{path} is empty; a run file names at least its model, such as model = "nano"')
        if isinstance(values.get("model"), str):  # before the run's folder is named after it
            values["model"] = locate_model(values["model"], named_in=path)
        run = cls.read(values, origin=str(path))
        data = {name: getattr(run.data, name) for name in ("corpus", "tokenizer")}
        for name, value in data.items():  # working directory first: a run's folder has a ``data`` too
            data[name] = value if value in KEYWORDS or Path(value).exists() else locate(value, named_in=path)
        weights, adapter, schedule, template = (
            Path(locate(str(file), named_in=path)) if file else None
            for file in (run.start.weights, run.start.adapter, run.schedule, run.data.chat_template)
        )
        return run.replace(
            machine=locate_machine(run.machine, named_in=path),
            schedule=schedule,
            start=run.start.replace(weights=weights, adapter=adapter),
            data=run.data.replace(**data, chat_template=template),
        )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if the custom schedule does not fit ``layout``, or the noise scale cannot be measured."""
        self.check_noise(layout)
        self.table(layout)

    def check_data(self, model: Model) -> None:
        """Raise ``UserError`` unless the objective is that of the data, and the model can read packed samples."""
        wanted = FORMAT_OBJECTIVES[self.data.format]
        packs = wanted == "sft" and self.data.packing != "none"
        counts_positions = (
            model.position in ("learned", "sinusoidal")
            or (model.window is not None and model.window_kind == "chunks")
            or any(map(model.has_temperature, range(model.layers)))
        )
        if packs and counts_positions:
            raise UserError(
                f"model {model.name!r}: its positions count from the start of a sequence, not of a packed sample; "
                'set [data] packing = "none"'
            )
        if wanted != self.job.objective:
            raise UserError(
                f'[data] format = "{self.data.format}" is for [job] objective = "{wanted}", not '
                f'"{self.job.objective}"; change either'
            )

    def check_noise(self, layout: Layout) -> None:
        """Raise ``UserError`` if the noise scale is to be measured and no rank has a gradient of part of the batch."""
        if not self.noise_scale:
            return
        if self.job.objective != "pretrain":
            raise UserError(
                "noise_scale: needs a loss that is the mean over all tokens; drop it, or use objective pretrain"
            )
        if self.job.freezes_text:
            field = "freeze" if self.job.freeze else "adapter"
            raise UserError(f"noise_scale is not supported with frozen weights yet; drop it, or [job] {field}")
        if layout.cp > 1:
            raise UserError(f"noise_scale: under cp{layout.cp} no rank has the gradient of a full sequence; use cp1")
        if layout.dp == 1:
            raise UserError("noise_scale: with dp1 every gradient is that of the full batch; use dp2 or more")

    def table(self, layout: Layout) -> Table | None:
        """Read the custom schedule, if any; raises ``UserError`` unless it fits ``layout`` and the micro-batches."""
        if self.schedule is None:
            return None
        if self.job.ramp is not None:
            raise UserError(f"{self.schedule} has a fixed number of micro-batches, but a ramp changes it; drop either")
        table = read_table(self.schedule)
        sizes = (table.pp, table.stages, table.micro_batches)
        if sizes != (wanted := (layout.pp, layout.pp * layout.v, layout.micro_batches(self.job))):
            has, needs = ("{} ranks, {} stages and {} micro-batches".format(*counts) for counts in (sizes, wanted))
            raise UserError(f"{self.schedule} has {has}, but layout {str(layout)!r} needs {needs}; change either")
        return table

    def samples(self) -> SampleFormat | None:
        """Return how the records of the corpus become samples; None for text."""
        data = self.data
        return sample_format(
            data.format, key=data.key, loss_on=data.loss_on, tokenizer=data.tokenizer, chat_template=data.chat_template
        )

    def loader(self, shards: Shards, *, split: Split = "train", ahead: int = 0) -> Loader:
        """Return the loader of a split; ``ahead``: further tokens, for multi-token prediction."""
        job, data = self.job, self.data
        seed = job.seed if split == "train" else 0  # of the held-out samples: the same for every run
        if job.objective == "dpo":
            return PairLoader(shards, split=split, sequence=job.sequence, seed=seed, excess=data.excess)
        if job.objective == "sft":
            return PackedLoader(
                shards, split=split, sequence=job.sequence, seed=seed, packing=data.packing, excess=data.excess
            )
        return Loader(shards, split=split, sequence=job.sequence, seed=seed, ahead=ahead)

    def describe_excess(self, model: Model) -> str | None:
        """Return a line about samples that are longer than the sequence; None if there are none, or for plain text."""
        loader = self.loader(self.shards(model))
        return loader.describe_excess() if isinstance(loader, PackedLoader) else None

    def shards(self, model: Model) -> Shards:
        """Open the prepared corpus; raises ``UserError`` if a split or the vocabulary of ``model`` is too small."""
        shards = Shards.open(self.folder / "data")
        self.loader(shards, ahead=model.mtp_depth).check(global_batch=self.job.global_batch)
        self.loader(shards, split="heldout")  # raises if it holds no sequence
        if (needed := shards.tokenizer.vocab) > model.vocab:
            raise UserError(
                f"tokenizer {self.data.tokenizer!r} has {needed} tokens, but {model.name} only vocab={model.vocab}; "
                "use a smaller tokenizer or a model of a larger vocabulary"
            )
        return shards
