"""The request of each command: ``…Request`` has the fields of every interface, ``…Options`` those of the terminal.

Options of the terminal name files to read or write and select the output; the web page does not have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fivefold.requests.fields import (
    TOKENS,
    Assumptions,
    AttentionKernel,
    ConfigFile,
    ConfigMachine,
    ConfigModel,
    ConfigTarget,
    FrontLevels,
    GlobalBatch,
    IgnoredKeys,
    JobFile,
    LayoutText,
    Line,
    Lines,
    MachineName,
    ModelName,
    PrecisionName,
    PrecisionNames,
    Prices,
    PrintsJson,
    Risk,
    RunFile,
    Sequence,
    Settings,
    ShownLayouts,
    StackName,
    StackNames,
    TokenCount,
    Where,
)
from fivefold.requests.schema import Argument, Option, Request
from fivefold.results.objectives import Objective
from fivefold.step import FITS_RISK

ALIKE = 0.02  # relative difference of step times below which a prediction cannot rank layouts
Question = Literal["micro-batch", "sequence", "gpus", "model", "batch", "run", "changes"]
Batch = Literal["advised", "job"]
Picture = Literal["pipeline", "memory", "parts", "roofline", "topology", "bandwidth", "collectives", "masks", "formats"]
WeightsDtype = Literal["bf16", "fp32"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class JobRequest(Request):
    """A job: the most common fields, and any other by ``set``."""

    stack: StackName = None
    seq: Sequence = None
    gbs: GlobalBatch = None
    precision: PrecisionName = None
    attention: AttentionKernel = None
    set: Settings = ()


class JobOptions(JobRequest):
    """A job whose other fields come from a file."""

    job: JobFile = None


class JsonOption(Request):
    """The choice between a page of text and JSON."""

    as_json: PrintsJson = False


class ConfigOptions(JobOptions):
    """Model, layout and job from a config of any software, instead of the arguments."""

    from_file: ConfigFile = None
    gpus: ConfigMachine = None
    ignore: IgnoredKeys = ()


class MachineRequest(JobRequest):
    """A job of a model on a machine."""

    model: ModelName
    machine: MachineName


class LayoutRequest(MachineRequest):
    """A job of a model on a machine in a layout."""

    layout: LayoutText


class PictureOptions(Request):
    """A step over time, on the terminal and as files."""

    over_time: Annotated[bool, Field(description="Also draw the pipeline and the memory over time.")] = False
    charts: Annotated[
        Path | None, Field(description="Write pipeline.svg, memory.svg and their .html into this folder.")
    ] = None
    trace: Annotated[Path | None, Field(description="Write the step as a trace for Perfetto (.json).")] = None


class PredictRequest(LayoutRequest):
    """The fields of ``predict`` on every interface."""


class PredictOptions(PredictRequest, ConfigOptions, PictureOptions, JsonOption):
    """Arguments and options of ``fivefold predict``."""

    command = "predict"
    operations: Annotated[bool, Field(description="Also list every operation.")] = False


class RatiosRequest(LayoutRequest):
    """The fields of ``ratios`` on every interface."""

    layout: Annotated[Line, Field(description="The degrees that stay; each axis is varied alone."), Argument()] = "dp1"


class RatiosOptions(RatiosRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold ratios``."""

    command = "ratios"
    degrees: Annotated[bool, Field(description="Also list every degree.")] = False


class AskRequest(MachineRequest):
    """The fields of ``ask`` on every interface, without the question."""

    layout: Annotated[
        Line | None,
        Field(description="For micro-batch, sequence, batch, run and changes; without it, the fastest that fits."),
        Argument(),
    ] = None
    tokens: Annotated[
        TokenCount,
        Field(description="Of the whole run, for batch and run: 2T."),
        TOKENS,
    ] = 1e12
    price: Prices = ()
    assume: Assumptions = ()
    noise: Annotated[
        Line | None,
        Field(description="Of batch: the gradient noise scale in tokens, or the run folder that has it."),
    ] = None
    risk: Risk = FITS_RISK


class AskOptions(AskRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold ask``."""

    command = "ask"
    question: Annotated[Question, Field(description="What to find out."), Argument(place=-1)]
    chart: Annotated[Path | None, Field(description="Of run and sequence: draw it (.svg or .html).")] = None


class SearchRequest(MachineRequest):
    """The fields of ``search`` on every interface, for layouts of one machine or for one run on several machines."""

    machines: Annotated[
        Lines, Field(description="More machines: one table of the run on each."), Argument(metavar="[MACHINE…]")
    ] = ()
    by: Annotated[
        Objective,
        Field(
            description="The best has least of it; robust: loses least if network, kernels, experts or a rank differ."
        ),
    ] = "time"
    top: ShownLayouts = 10
    also: Annotated[Lines, Field(description="Another precision to try, such as fp8.")] = ()
    where: Where = ""
    memory: Annotated[Line | None, Field(description="Plan for GPUs of so much memory, such as 72GiB.")] = None
    risk: Risk = FITS_RISK
    keep: Annotated[Line | None, Field(description="Change one thing at a time from this layout: what helps most?")] = (
        None
    )
    within: Annotated[
        float | None,
        Field(ge=0, le=1, description="Layouts so near to the best are alike; the simplest is proposed."),
        Option(shown_default=f"{ALIKE:g}"),
    ] = None
    exact: Annotated[bool, Field(description="The ranking alone, without a proposal.")] = False
    front: FrontLevels = 1
    two: Annotated[
        bool, Field(description="Also tensor parallelism in two dimensions, which is not run."), Option(("--2d",))
    ] = False
    tokens: Annotated[
        TokenCount | None,
        Field(description="Of the run, with several machines or ranks: such as 2T."),
        TOKENS,
    ] = None
    price: Prices = ()
    deadline: Annotated[
        Line | None, Field(description="The fewest ranks of each machine whose run takes at most this: 30d.")
    ] = None
    ranks: Annotated[Line | None, Field(description="Numbers of ranks to try, from FEW-MANY: 64-512.")] = None
    assume: Assumptions = ()

    @property
    def is_of_run(self) -> bool:
        """Tell whether the answer is one run on several machines or numbers of ranks, not layouts of one machine."""
        words = (self.machines, self.tokens, self.deadline, self.ranks, self.assume)
        return self.by == "energy" or any(word not in (None, ()) for word in words)


class SearchOptions(SearchRequest, ConfigOptions, JsonOption):
    """Arguments and options of ``fivefold search``."""

    command = "search"
    chart: Annotated[Path | None, Field(description="Draw the front (.svg or .html).")] = None
    measure: Annotated[
        int, Field(ge=0, description="Also train so many of the best for a few steps each, on this computer.")
    ] = 0
    write: Annotated[Path | None, Field(description="Write the best as the config of --stack: file or folder.")] = None


class PlanRequest(MachineRequest):
    """The fields of ``plan`` on every interface."""

    tokens: Annotated[TokenCount, Field(description="Of the whole run: 2T."), TOKENS] = 1e12
    batch: Annotated[Batch, Field(description="The batch: by the literature (unless --gbs), or the job's.")] = "advised"
    where: Where = ""
    price: Prices = ()
    assume: Assumptions = ()
    risk: Risk = FITS_RISK


class PlanOptions(PlanRequest, ConfigOptions, JsonOption):
    """Arguments and options of ``fivefold plan``."""

    command = "plan"
    write: Annotated[Path | None, Field(description="Write the run file, which `train` takes.")] = None


class CompareRequest(JobRequest):
    """The fields of ``compare`` on every interface, without models, machines and layouts."""

    stacks: StackNames = ()
    precisions: PrecisionNames = ()
    risk: Risk = FITS_RISK


class CompareOptions(CompareRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold compare``."""

    command = "compare"
    words: Annotated[
        tuple[str, ...],
        Field(description="One model, machines, layouts; or run files."),
        Argument(metavar="MODEL MACHINE… LAYOUT… | RUN.toml…"),
    ] = ()
    from_files: Annotated[
        tuple[Path, ...],
        Field(description="Configs of any software; beside them other layouts, and machines."),
        Option(("--from",)),
    ] = ()
    gpus: ConfigMachine = None
    ignore: IgnoredKeys = ()
    charts: Annotated[Path | None, Field(description="Write time.svg and memory.svg there.")] = None


class SweepRequest(Request):
    """The fields of ``sweep`` on every interface, without its file."""

    measure: Annotated[bool, Field(description="Also run each row that fits for a few steps.")] = False
    steps: Annotated[int, Field(description="Steps of each measured run.")] = 8
    timeout: Annotated[float, Field(description="Seconds after which a measured run is ended.")] = 300.0
    risk: Risk = FITS_RISK


class SweepOptions(SweepRequest, JsonOption):
    """Arguments and options of ``fivefold sweep``."""

    command = "sweep"
    file: Annotated[Path, Field(description="The sweep file (.toml)."), Argument()]
    out: Annotated[
        Path | None,
        Field(description="Where rows go: .parquet, .csv or .jsonl. Without it runs/sweeps/NAME.jsonl."),
    ] = None
    charts: Annotated[Path | None, Field(description="Draw what the sweep varies, as .svg, into this folder.")] = None
    slurm: Annotated[bool, Field(description="Measure by Slurm jobs: submit them, or collect what is done.")] = False
    dry: Annotated[bool, Field(description="Only say how many rows there would be.")] = False


class DryrunRequest(LayoutRequest):
    """The fields of ``dryrun`` on every interface."""


class DryrunOptions(DryrunRequest, ConfigOptions, PictureOptions, JsonOption):
    """Arguments and options of ``fivefold dryrun``."""

    command = "dryrun"
    schedule: Annotated[Path | None, Field(description="A pipeline schedule of one's own (.csv).")] = None
    every_rank: Annotated[bool, Field(description="Rehearse all ranks, not one of each pipeline rank.")] = False
    every_layer: Annotated[bool, Field(description="Run every layer, not one of those that are alike.")] = False
    ranks: Annotated[str | None, Field(description="Ranks for --trace and --snapshot, such as 0,3.")] = None
    snapshot: Annotated[
        Path | None, Field(description="Write the memory for https://pytorch.org/memory_viz (.pickle).")
    ] = None


class ReportOptions(JobOptions):
    """Arguments and options of ``fivefold report``."""

    command = "report"
    what: Annotated[
        tuple[str, ...],
        Field(description="A run's folder; what --json printed; rows of a sweep; or a question, with a job."),
        Argument(metavar="RUN | FILE… | MODEL MACHINE [LAYOUT]"),
    ] = ()
    from_file: ConfigFile = None
    gpus: ConfigMachine = None
    ignore: IgnoredKeys = ()
    risk: Risk = FITS_RISK
    out: Annotated[
        Path | None,
        Field(description="The .html file. Without it report.html, of a run in its folder."),
        Option(("--out", "-o")),
    ] = None


class ReadOptions(JsonOption):
    """Arguments and options of ``fivefold read``."""

    command = "read"
    words: Annotated[
        tuple[str, ...], Field(description="A config, a script, or a launch line."), Argument(metavar="FILE|ARGS…")
    ]
    gpus: ConfigTarget = None
    model: ConfigModel = None
    vocab: Annotated[int | None, Field(ge=1, description="The vocabulary, where a config names none.")] = None


class WriteOptions(JobOptions):
    """Arguments and options of ``fivefold write``."""

    command = "write"
    what: Annotated[
        str,
        Field(description="A layout, a run file, or any config to translate."),
        Argument(metavar="LAYOUT|FILE"),
    ]
    to: Annotated[
        str,
        Field(description="Format to write, such as torchtitan or megatron; shell completion lists all of them."),
        Option(completion="formats"),
    ]
    model: ConfigModel = None
    gpus: ConfigTarget = None
    output: Annotated[Path | None, Field(description="File or folder to write to."), Option(("-o", "--output"))] = None
    ignore: IgnoredKeys = ()


class DrawOptions(JobOptions):
    """Arguments and options of ``fivefold draw``."""

    command = "draw"
    picture: Annotated[Picture, Field(description="What to draw."), Argument()]
    words: Annotated[
        tuple[str, ...],
        Field(description="Of a step (the first four); of a machine (topology, bandwidth); ranks; names of formats."),
        Argument(metavar="[MODEL MACHINE LAYOUT | MACHINE | RANKS | FORMAT…]"),
    ] = ()
    collective: Annotated[Collective, Field(description="For bandwidth.")] = "all_reduce"
    out: Annotated[
        Path | None,
        Field(description=".svg, .png, .pdf or .html. Without it PICTURE.svg."),
        Option(("--out", "-o")),
    ] = None


class CalibrateOptions(JobOptions, JsonOption):
    """Arguments and options of ``fivefold calibrate``."""

    command = "calibrate"
    layout: Annotated[str | None, Field(description="With --for MODEL: the layout to measure."), Argument()] = None
    run: Annotated[
        str | None,
        Field(description="Measure what one run computes and sends: a run file, or a model with LAYOUT."),
        Option(("--for",)),
    ] = None
    ranks: Annotated[str, Field(description="Process counts to measure, such as 1,2.")] = "1,2"
    quick: Annotated[bool, Field(description="Fewer points.")] = False
    out: Annotated[Path | None, Field(description="Machine file to write; without it, what 'local' means.")] = None


class TraceRequest(JobRequest):
    """The fields of ``trace`` on every interface, without its files."""

    step: Annotated[int | None, Field(ge=0, description="Only the ProfilerStep of this number.")] = None
    top: Annotated[int, Field(ge=1, description="How many kernels to list.")] = 10
    machine: Annotated[str | None, Field(description="Whose links the messages use: h100:8, …")] = None
    against: Annotated[
        tuple[str, str, str] | None,
        Field(description="Lay the predicted step beside it; takes a job."),
        Option(metavar="MODEL MACHINE LAYOUT"),
    ] = None


class TraceOptions(TraceRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold trace``."""

    command = "trace"
    files: Annotated[
        tuple[Path, ...],
        Field(description="Traces (.json, .json.gz), one of each rank, or their folder."),
        Argument(metavar="FILE…"),
    ]
    charts: Annotated[
        Path | None,
        Field(description="Write breakdown and critical-path as .svg and .html into this folder."),
    ] = None


class ExplainOptions(JobOptions, JsonOption):
    """Arguments and options of ``fivefold explain``."""

    command = "explain"
    files: Annotated[
        tuple[Path, ...],
        Field(description="Logs, memory snapshots, flight recorders, stacks; or their folder."),
        Argument(metavar="FILE…"),
    ]
    against: Annotated[
        tuple[str, str, str] | None,
        Field(description="What should be there, and what fits; takes a job."),
        Option(metavar="MODEL MACHINE LAYOUT"),
    ] = None
    top: Annotated[int, Field(ge=1, description="How many lines of code to list.")] = 12


class TrainRequest(Request):
    """The fields of ``train`` on every interface, without its run file."""

    layout: Annotated[str | None, Field(description="Instead of the run file's layout.")] = None
    machine: Annotated[str | None, Field(description="Instead of the run file's machine: local:2, …")] = None
    force: Annotated[bool, Field(description="Start although it does not fit, or this host is not the machine's.")] = (
        False
    )
    trace: Annotated[
        int | None,
        Field(ge=1, description="Write what each rank did in so many steps."),
        Option(metavar="STEPS"),
    ] = None


class TrainOptions(TrainRequest, JsonOption):
    """Arguments and options of ``fivefold train``."""

    command = "train"
    run: RunFile
    slurm: Annotated[bool, Field(description="Submit it as a Slurm job instead.")] = False


class DataOptions(JsonOption):
    """Arguments and options of ``fivefold data``."""

    command = "data"
    run: Annotated[Path, Field(description="The run file (.toml) whose [data] is prepared."), Argument()]


class ShowOptions(JsonOption):
    """Arguments and options of ``fivefold show``."""

    command = "show"
    folder: Annotated[Path, Field(description="The folder of a run."), Argument()]
    charts: Annotated[bool, Field(description="Also draw loss, memory and compare (.svg).")] = False


class DoctorOptions(JsonOption):
    """Arguments and options of ``fivefold doctor``."""

    command = "doctor"
    file: Annotated[
        Path,
        Field(description="Python with model(), loss(model), perhaps optimizer(model), step(…)."),
        Argument(),
    ]
    budget: Annotated[
        str | None, Field(description="Memory to stay within, such as 24GiB: advise what to recompute.")
    ] = None
    fsdp: Annotated[int | None, Field(description="What FSDP2 over so many ranks would cost.")] = None
    tp: Annotated[int | None, Field(description="The same of tensor parallelism, by plan(model).")] = None


class GenerateOptions(JsonOption):
    """Arguments and options of ``fivefold generate``."""

    command = "generate"
    source: Annotated[
        Path, Field(description="A run file, a run's or checkpoint's folder, or one of Hugging Face."), Argument()
    ]
    prompt: Annotated[tuple[str, ...], Field(description="Text to go on from; several are read side by side.")] = ()
    tokens: Annotated[int, Field(ge=1, description="At most so many are drawn.")] = 200
    temperature: Annotated[float, Field(ge=0, description="0: always the likeliest token.")] = 0.8
    top_p: Annotated[float, Field(description="Draw from the fewest tokens that have this share.")] = 1.0
    seed: Annotated[int, Field(ge=0, description="Of the draws.")] = 0
    window: Annotated[int | None, Field(ge=2, description="Tokens seen at once; without it, as trained.")] = None
    dtype: Annotated[
        WeightsDtype | None, Field(description="Of the weights; without it, bf16 on a GPU, else fp32.")
    ] = None
    tokenizer: Annotated[Path | None, Field(description="A tokenizer.json, or bytes, instead of the one there.")] = None


class NumericsOptions(JsonOption):
    """Arguments and options of ``fivefold numerics``."""

    command = "numerics"
    run: RunFile
    weights: Annotated[
        Path | None,
        Field(description="A run's, a checkpoint's or a Hugging Face folder; without it, what the run goes on from."),
    ] = None
    precision: PrecisionName = None
    sequences: Annotated[int, Field(ge=1, description="Of the run's first batch.")] = 1
    chart: Annotated[Path | None, Field(description="Draw the errors by layer (.svg, .png, .html).")] = None


class ImportOptions(JsonOption):
    """Arguments and options of ``fivefold import``."""

    command = "import"
    folder: Annotated[Path, Field(description="A Hugging Face folder: config.json and safetensors."), Argument()]
    to: Annotated[Path | None, Field(description="Write a run file that starts from these weights.")] = None


class ExportOptions(JsonOption):
    """Arguments and options of ``fivefold export``."""

    command = "export"
    source: Annotated[
        Path, Field(description="The folder of a run (its newest checkpoint) or of a checkpoint."), Argument()
    ]
    to: Annotated[Path, Field(description="The Hugging Face folder to write.")]
    dtype: Annotated[WeightsDtype, Field(description="Of the weights.")] = "bf16"
    file_size: Annotated[str, Field(description="Largest size of one file.")] = "5GB"


class WebOptions(Request):
    """Arguments and options of ``fivefold web``."""

    command = "web"
    folder: Annotated[Path, Field(description="The folder whose runs and files the page may read."), Argument()] = (
        Path()
    )
    port: Annotated[int, Field(ge=0, le=65535, description="0: any that is free.")] = 8765
    browser: Annotated[bool, Field(description="Open it in the browser."), Option(("--browser/--no-browser",))] = True


COMMANDS: dict[str, type[Request]] = {  # in the order of the help page
    schema.command: schema
    for schema in list(globals().values())
    if isinstance(schema, type) and issubclass(schema, Request) and schema.__dict__.get("command")
}
