"""The request of each command: ``…Request`` has the fields of every interface, ``…Options`` those of the terminal.

Options of the terminal name files to read or write and select the output; the web page does not have them.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fivefold.layout.batch import choose_gpu_counts
from fivefold.requests.fields import (
    TOKENS,
    AdapterText,
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
from fivefold.requests.schema import PANELS, Argument, Option, Request
from fivefold.results.search_result import Objective
from fivefold.step import FITS_RISK

DEFAULT_TOKENS = 1e12  # of a run whose length is not given
UNRANKABLE_DIFFERENCE = 0.02  # relative difference of step times below which a prediction cannot rank layouts
Question = Literal["micro-batch", "sequence", "gpus", "model", "batch", "run", "changes", "finetune"]
Batch = Literal["advised", "job"]
Picture = Literal[
    "pipeline", "memory", "memory-parts", "roofline", "topology", "bandwidth", "collectives", "masks", "formats"
]
SettingsAction = Literal["set", "get", "unset", "list"]
WeightsDtype = Literal["bf16", "fp32"]
BaseFolder = Annotated[
    Path | None,
    Field(
        description="Hugging Face folder of the base model under adapters. Default: the folder that the adapters name."
    ),
]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class CalibrationOption(Request):
    """The option to fail on a computer that is not calibrated yet, instead of measuring it."""

    no_calibrate: Annotated[
        bool,
        Field(description="On machine 'local' without a calibration: fail, instead of measuring this computer first."),
    ] = False


class JobRequest(Request):
    """A job: the most common fields, and any other by ``set``."""

    stack: StackName = None
    seq: Sequence = None
    gbs: GlobalBatch = None
    precision: PrecisionName = None
    adapter: AdapterText = None
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

    @property
    def run_tokens(self) -> float | None:
        """Return the training tokens if the question is about a complete run, which has the batch advised for them."""
        return None

    @property
    def tried_gpu_counts(self) -> str | None:
        """Return the range of numbers of GPUs to try, if the question has one."""
        return None


class LayoutRequest(MachineRequest):
    """A job of a model on a machine in a layout."""

    layout: LayoutText


class PictureOptions(Request):
    """A step over time, on the terminal and as files."""

    over_time: Annotated[
        bool, Field(description="Also draw the pipeline and the memory over time on the terminal.")
    ] = False
    charts: Annotated[
        Path | None,
        Field(
            description="Draw the pipeline and the memory over time into this folder: pipeline.svg, memory.svg and "
            "their .html."
        ),
    ] = None
    trace: Annotated[Path | None, Field(description="Write the step as a trace for Perfetto (.json).")] = None


class PredictRequest(LayoutRequest):
    """The fields of ``predict`` on every interface."""


class PredictOptions(PredictRequest, ConfigOptions, PictureOptions, CalibrationOption, JsonOption):
    """Arguments and options of ``fivefold predict``."""

    command = "predict"
    panel = "Plan"
    example = "predict llama3-8b h100:64 'dp64 zero3 mbs1' --seq 8192 --gbs 512"
    operations: Annotated[bool, Field(description="Also list every operation with its FLOPs, bytes and seconds.")] = (
        False
    )


class SearchRequest(MachineRequest):
    """The fields of ``search`` on every interface, for layouts of one machine or for one run on several machines."""

    machines: Annotated[
        Lines, Field(description="More machines: compare one run on each."), Argument(metavar="[MACHINE…]")
    ] = ()
    by: Annotated[
        Objective,
        Field(
            description="Objective to minimize: step time, peak memory, energy or cost; robust: the worst-case regret "
            "if links, kernels, "
            "expert balance or one rank are slower than assumed."
        ),
    ] = "time"
    top: ShownLayouts = 10
    also: Annotated[
        Lines,
        Field(description="Another precision to try in addition to --precision, such as fp8; may be repeated."),
        Option(metavar="PRECISION"),
    ] = ()
    where: Where = ""
    memory: Annotated[
        Line | None,
        Field(description="Plan for this much memory per GPU, such as 72GiB. Default: all that the GPU has."),
    ] = None
    risk: Risk = FITS_RISK
    keep: Annotated[
        Line | None,
        Field(
            description="Start from this layout and list what each single change (a degree, schedule, recomputation) "
            "gains or costs, "
            "instead of searching all layouts."
        ),
    ] = None
    within: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            description="Relative time difference up to which layouts count as equal; the simplest of them is "
            f"proposed. Default: {UNRANKABLE_DIFFERENCE:g}.",
        ),
    ] = None
    exact: Annotated[
        bool,
        Field(
            description="Search until the best layout is proven, which may take minutes, and rank by predicted time "
            "only, without the "
            "proposal of a simpler layout that is as fast."
        ),
    ] = False
    front: FrontLevels = 1
    two: Annotated[
        bool,
        Field(description="Also try 2D tensor parallelism (tp4x2), which Fivefold's trainer does not run."),
        Option(("--2d",)),
    ] = False
    tokens: Annotated[
        TokenCount | None,
        Field(
            description="Training tokens of the run, such as 2T, for comparing machines or numbers of GPUs. Default: "
            "1T."
        ),
        TOKENS,
    ] = None
    price: Prices = ()
    deadline: Annotated[
        Line | None,
        Field(
            description="Find the fewest GPUs of each machine, in the range --gpu-counts, that finish --tokens within "
            "this time, such as 30d."
        ),
    ] = None
    gpu_counts: Annotated[
        Line | None,
        Field(
            description="Numbers of GPUs to try, as a range such as 64-512. Default: that of the machine; with "
            "--deadline also fewer, from one node, or 1-16384 for a machine without a number of GPUs."
        ),
    ] = None
    assume: Assumptions = ()

    @property
    def tried_gpu_counts(self) -> str | None:
        """Return the range of numbers of GPUs to try: that of the request, or of a deadline without one."""
        return choose_gpu_counts(self.gpu_counts, self.deadline, (self.machine, *self.machines))

    @property
    def compares_machines(self) -> bool:
        """Tell whether the answer is one run on several machines or numbers of ranks, not layouts of one machine."""
        words = (self.machines, self.tokens, self.deadline, self.gpu_counts, self.assume)
        return self.by == "energy" or any(word not in (None, ()) for word in words)

    @property
    def run_tokens(self) -> float | None:
        """Return the training tokens of the run on several machines or numbers of GPUs, if that is compared."""
        if not self.compares_machines:
            return None
        return DEFAULT_TOKENS if self.tokens is None else self.tokens


class SearchOptions(SearchRequest, ConfigOptions, CalibrationOption, JsonOption):
    """Arguments and options of ``fivefold search``."""

    command = "search"
    panel = "Plan"
    example = "search llama3-70b h100:64 --gbs 512 --where 'cp=1'"
    chart: Annotated[
        Path | None, Field(description="Draw the Pareto front of memory and time into this file (.svg or .html).")
    ] = None
    measure: Annotated[
        int, Field(ge=0, description="Number of best layouts to also train for a few steps each, on this computer.")
    ] = 0
    write: Annotated[
        Path | None,
        Field(
            description="Write the proposed layout, or the first of the ranking that the software can run, as a config "
            "for --stack, to this file or folder."
        ),
    ] = None


class PlanRequest(MachineRequest):
    """The fields of ``plan`` on every interface."""

    tokens: Annotated[TokenCount, Field(description="Training tokens of the run, such as 2T."), TOKENS] = DEFAULT_TOKENS
    gbs: Annotated[
        int | None,
        Field(
            description="Global batch: sequences per optimizer step, over all GPUs. Default: advised for --tokens, or "
            "8 with --batch job."
        ),
    ] = None
    batch: Annotated[
        Batch,
        Field(
            description="Batch size: advised (from published batch-size laws, unless --gbs is given), or job (that of "
            "--gbs or of the --job file)."
        ),
    ] = "advised"
    where: Where = ""
    price: Prices = ()
    assume: Assumptions = ()
    risk: Risk = FITS_RISK


class PlanOptions(PlanRequest, ConfigOptions, JsonOption):
    """Arguments and options of ``fivefold plan``."""

    command = "plan"
    panel = "Plan"
    example = "plan llama3-8b h100:64 --tokens 1T"
    write: Annotated[
        Path | None,
        Field(
            description="Write a run file (.toml) for `fivefold train` here, and with another --stack also its config "
            "next to it."
        ),
    ] = None


class CompareRequest(JobRequest):
    """The fields of ``compare`` on every interface, without models, machines and layouts."""

    stacks: StackNames = ()
    precisions: PrecisionNames = ()
    risk: Risk = FITS_RISK
    price: Prices = ()


class CompareOptions(CompareRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold compare``."""

    command = "compare"
    panel = "Plan"
    example = "compare llama3-8b h100:8 'dp8 zero3 mbs1' 'dp4 tp2 zero1 mbs1' --gbs 64"
    words: Annotated[
        tuple[str, ...],
        Field(description="One or more models, machines and layouts; or run files."),
        Argument(metavar="MODEL… MACHINE… LAYOUT… | RUN.toml…"),
    ] = ()
    from_files: Annotated[
        tuple[Path, ...],
        Field(
            description="Config of any supported software to compare; may be repeated, and combined with layouts and "
            "machines."
        ),
        Option(("--from",), metavar="FILE"),
    ] = ()
    gpus: ConfigMachine = None
    ignore: IgnoredKeys = ()
    charts: Annotated[
        Path | None, Field(description="Draw the step times and the memory into this folder: time.svg and memory.svg.")
    ] = None


class RatiosRequest(LayoutRequest):
    """The fields of ``ratios`` on every interface."""

    layout: Annotated[
        Line,
        Field(description="Layout whose other degrees stay as they are while one axis (dp, tp, cp, ep) is varied."),
        Argument(),
    ] = "dp1"


class RatiosOptions(RatiosRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold ratios``."""

    command = "ratios"
    panel = "Plan"
    example = "ratios llama3-8b h100:64 'dp8 tp8'"
    degrees: Annotated[bool, Field(description="Also list each degree of each axis.")] = False


class AskRequest(MachineRequest):
    """The fields of ``ask`` on every interface, without the question."""

    layout: Annotated[
        Line | None,
        Field(description="Layout, for micro-batch, sequence, batch, run and changes. Default: the fastest that fits."),
        Argument(),
    ] = None
    tokens: Annotated[
        TokenCount,
        Field(description="For batch and run: training tokens of the run, such as 2T."),
        TOKENS,
    ] = DEFAULT_TOKENS
    price: Prices = ()
    assume: Assumptions = ()
    noise: Annotated[
        Line | None,
        Field(description="For batch: gradient noise scale in tokens, or the folder of a run that logged it."),
    ] = None
    risk: Risk = FITS_RISK


class AskOptions(AskRequest, ConfigOptions, JsonOption):
    """Arguments and options of ``fivefold ask``."""

    command = "ask"
    panel = "Plan"
    example = "ask sequence llama3-8b h100:8 --gbs 8"
    question: Annotated[
        Question,
        Field(description="The question: micro-batch, sequence, gpus, model, batch, run, changes or finetune."),
        Argument(place=-1),
    ]
    chart: Annotated[Path | None, Field(description="For run and sequence: draw the answer (.svg or .html).")] = None

    @property
    def run_tokens(self) -> float | None:
        """Return the training tokens if the question is ``run``."""
        return self.tokens if self.question == "run" else None


class SweepRequest(Request):
    """The fields of ``sweep`` on every interface, without its file."""

    measure: Annotated[
        bool,
        Field(
            description="Also train each row that fits for --steps steps on this computer, and record the measured "
            "step time."
        ),
    ] = False
    steps: Annotated[
        int, Field(description="With --measure: optimizer steps of each run; the first ones are not timed.")
    ] = 8
    timeout: Annotated[
        float, Field(description="With --measure: time limit of each run in seconds; a longer one counts as failed.")
    ] = 300.0
    risk: Risk = FITS_RISK


class SweepOptions(SweepRequest, JsonOption):
    """Arguments and options of ``fivefold sweep``."""

    command = "sweep"
    panel = "Plan"
    example = "sweep sweep.toml --out rows.csv"
    file: Annotated[Path, Field(description="The sweep file (.toml)."), Argument()]
    out: Annotated[
        Path | None,
        Field(description="File for the rows: .parquet, .csv or .jsonl. Default: runs/sweeps/NAME.jsonl."),
    ] = None
    charts: Annotated[
        Path | None, Field(description="Draw charts of what the sweep varies, as .svg files in this folder.")
    ] = None
    slurm: Annotated[
        bool,
        Field(
            description="Measure with Slurm jobs: the first call submits them, and the same call later collects their "
            "results."
        ),
    ] = False
    dry: Annotated[
        bool,
        Field(
            description="Only print how many rows the sweep would have; predict and measure nothing. This computer, if "
            "it is among the machines, must be calibrated."
        ),
    ] = False


class DryrunRequest(LayoutRequest):
    """The fields of ``dryrun`` on every interface."""


class DryrunOptions(DryrunRequest, ConfigOptions, PictureOptions, JsonOption):
    """Arguments and options of ``fivefold dryrun``."""

    command = "dryrun"
    panel = "Run"
    example = "dryrun llama3-8b h100:8 'dp8 zero3 mbs1' --gbs 64"
    schedule: Annotated[
        Path | None,
        Field(
            description="A custom pipeline schedule (.csv): a row per rank with actions such as F0.3 (forward of stage "
            "0, micro-batch 3)."
        ),
    ] = None
    every_rank: Annotated[bool, Field(description="Dry-run every rank, instead of one per pipeline rank.")] = False
    every_layer: Annotated[
        bool, Field(description="Execute every layer, instead of one of each group of equal layers.")
    ] = False
    ranks: Annotated[
        str | None,
        Field(
            description="Ranks that --trace and --snapshot write, such as 0,3. Default: all in the trace, and the rank "
            "with the "
            "highest peak in the snapshot."
        ),
    ] = None
    snapshot: Annotated[
        Path | None,
        Field(description="Write a memory snapshot (.pickle) for PyTorch's memory viewer, pytorch.org/memory_viz."),
    ] = None


WORD = "List only the entries that contain this word in a name or value, such as "


class ModelsOptions(JsonOption):
    """Arguments and options of ``fivefold models``."""

    command = "models"
    panel = "Plan"
    example = "models llama3"
    word: Annotated[
        Line | None,
        Field(description=f"{WORD}qwen3; moe lists all mixture-of-experts models."),
        Argument(),
    ] = None
    families: Annotated[
        bool,
        Field(
            description="List the causal language models of Hugging Face transformers instead: which can be trained, "
            "which can only be predicted, and why others are not supported."
        ),
    ] = False


class MachinesOptions(JsonOption):
    """Arguments and options of ``fivefold machines``."""

    command = "machines"
    panel = "Plan"
    example = "machines h100"
    word: Annotated[Line | None, Field(description=f"{WORD}h100, nvlink or 24gb."), Argument()] = None


class StacksOptions(JsonOption):
    """Arguments and options of ``fivefold stacks``."""

    command = "stacks"
    panel = "Plan"
    example = "stacks megatron"
    word: Annotated[Line | None, Field(description=f"{WORD}megatron or fsdp."), Argument()] = None


class ReportOptions(JobOptions):
    """Arguments and options of ``fivefold report``."""

    command = "report"
    panel = "Share"
    example = "report llama3-8b h100:64 --gbs 512 --out report.html"
    what: Annotated[
        tuple[str, ...],
        Field(
            description="A run's folder; files that predict, search, plan or compare --json, or sweep, wrote; or MODEL "
            "MACHINE [LAYOUT] with job options."
        ),
        Argument(metavar="RUN | FILE… | MODEL MACHINE [LAYOUT]"),
    ] = ()
    from_file: ConfigFile = None
    gpus: ConfigMachine = None
    ignore: IgnoredKeys = ()
    risk: Risk = FITS_RISK
    out: Annotated[
        Path | None,
        Field(description="The .html file. Default: report.html, for a run in its folder."),
        Option(("--out", "-o")),
    ] = None


class ReadOptions(JsonOption):
    """Arguments and options of ``fivefold read``."""

    command = "read"
    panel = "Share"
    example = "read train.toml --gpus h100:64"
    words: Annotated[
        tuple[str, ...], Field(description="A config, a script, or a launch command."), Argument(metavar="FILE|ARGS…")
    ]
    gpus: ConfigTarget = None
    model: ConfigModel = None
    vocab: Annotated[int | None, Field(ge=1, description="Vocabulary size, if the config has none.")] = None


class WriteOptions(JobOptions):
    """Arguments and options of ``fivefold write``."""

    command = "write"
    panel = "Share"
    example = "write 'dp8 tp4 zero1 mbs1' --model llama3-8b --to megatron --gbs 512"
    what: Annotated[
        str,
        Field(description="A layout (with --model), a run file, or any config to translate."),
        Argument(metavar="LAYOUT|FILE"),
    ]
    to: Annotated[
        str | None,
        Field(
            description="Format to write. Default: that of --stack, or of the software of your settings. One of "
            "accelerate, axolotl, bridge (Megatron Bridge), deepspeed, fivefold, "
            "kubernetes, llamafactory, megatron, nanotron, skypilot, torchtitan, torchtitan-0.2, torchtune or trl."
        ),
        Option(completion="complete_format"),
    ] = None
    stack: Annotated[
        StackName,
        Field(
            description="Software whose defaults fill the fields of the job that are not given. Seldom needed: by "
            "default that of --to."
        ),
    ] = None
    model: ConfigModel = None
    gpus: ConfigTarget = None
    output: Annotated[
        Path | None, Field(description="File or folder to write to. Default: stdout."), Option(("--out", "-o"))
    ] = None
    ignore: IgnoredKeys = ()


class DrawOptions(JobOptions):
    """Arguments and options of ``fivefold draw``."""

    command = "draw"
    panel = "Understand"
    example = "draw pipeline llama3-8b h100:8 'pp4 dp2 mbs1' --gbs 32"
    picture: Annotated[
        Picture,
        Field(
            description="Picture to draw. pipeline: the schedule over time; memory: memory over a step; memory-parts: "
            "peak memory of each rank by component; roofline: operations against the chip's limits; topology: the "
            "machine's links; bandwidth: a collective's bandwidth by message size; collectives, masks and formats: an "
            "illustration of each."
        ),
        Argument(),
    ]
    words: Annotated[
        tuple[str, ...],
        Field(
            description="What is drawn: MODEL MACHINE LAYOUT (pipeline, memory, memory-parts, roofline), MACHINE "
            "(topology, bandwidth), a number of ranks (collectives, masks), or number formats such as fp8 (formats)."
        ),
        Argument(metavar="[MODEL MACHINE LAYOUT | MACHINE | RANKS | FORMAT…]"),
    ] = ()
    collective: Annotated[
        Collective, Field(description="For bandwidth: the collective whose bandwidth is drawn over the message size.")
    ] = "all_reduce"
    out: Annotated[
        Path | None,
        Field(description="Output file: .svg, .png, .pdf or .html. Default: PICTURE.svg in this folder."),
        Option(("--out", "-o")),
    ] = None


class CalibrateOptions(JobOptions, JsonOption):
    """Arguments and options of ``fivefold calibrate``."""

    command = "calibrate"
    panel = "Run"
    example = "calibrate --quick"
    layout: Annotated[str | None, Field(description="With --for MODEL: the layout to measure."), Argument()] = None
    run: Annotated[
        str | None,
        Field(
            description="Also measure the layers and messages of one run, which its predictions then use: a run file, "
            "or a model with "
            "LAYOUT."
        ),
        Option(("--for",)),
    ] = None
    processes: Annotated[
        str,
        Field(
            description="Numbers of processes to measure with, such as 1,2: kernels with each number, collectives "
            "between two or more."
        ),
    ] = "1,2"
    quick: Annotated[bool, Field(description="Measure fewer points: faster, but predictions are less accurate.")] = (
        False
    )
    out: Annotated[
        Path | None,
        Field(description="Machine file to write. Default: ~/.cache/fivefold/local.toml, the machine 'local'."),
    ] = None


class TraceRequest(JobRequest):
    """The fields of ``trace`` on every interface, without its files."""

    step: Annotated[int | None, Field(ge=0, description="Analyze only the ProfilerStep with this number.")] = None
    top: Annotated[int, Field(ge=1, description="Number of longest kernels to list.")] = 10
    machine: Annotated[
        str | None, Field(description="Machine, such as h100:8: rate each message by the bandwidth of its links.")
    ] = None
    against: Annotated[
        tuple[str, str, str] | None,
        Field(description="Compare with the predicted step of this MODEL, MACHINE and LAYOUT; takes job options."),
        Option(metavar="MODEL MACHINE LAYOUT"),
    ] = None


class TraceOptions(TraceRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold trace``."""

    command = "trace"
    panel = "Understand"
    example = "trace traces/ --machine h100:8"
    files: Annotated[
        tuple[Path, ...],
        Field(description="Traces (.json, .json.gz), one per rank, or their folder."),
        Argument(metavar="FILE…"),
    ]
    charts: Annotated[
        Path | None,
        Field(description="Write breakdown and critical-path as .svg and .html into this folder."),
    ] = None


class ExplainOptions(JobOptions, JsonOption):
    """Arguments and options of ``fivefold explain``."""

    command = "explain"
    panel = "Understand"
    example = "explain train.log"
    files: Annotated[
        tuple[Path, ...],
        Field(
            description="Logs, memory snapshots, flight recorder dumps, stack traces (of py-spy or faulthandler), or "
            "their folder."
        ),
        Argument(metavar="FILE…"),
    ]
    against: Annotated[
        tuple[str, str, str] | None,
        Field(
            description="Compare memory with the prediction for this MODEL, MACHINE and LAYOUT, and find a change that "
            "fits; takes job "
            "options."
        ),
        Option(metavar="MODEL MACHINE LAYOUT"),
    ] = None
    top: Annotated[
        int, Field(ge=1, description="Number of lines of code to list, those that hold the most memory first.")
    ] = 12


class TrainRequest(Request):
    """The fields of ``train`` on every interface, without its run file."""

    layout: Annotated[str | None, Field(description="Layout, instead of the run file's.")] = None
    machine: Annotated[str | None, Field(description="Machine, instead of the run file's, such as local:2.")] = None
    force: Annotated[
        bool, Field(description="Start even if the step does not fit, or this host is not the run file's machine.")
    ] = False
    trace: Annotated[
        int | None,
        Field(
            ge=1, description="Record this many steps of each rank as traces in the run's folder (trace/rank0.json, …)."
        ),
        Option(metavar="STEPS"),
    ] = None


class TrainOptions(TrainRequest, CalibrationOption, JsonOption):
    """Arguments and options of ``fivefold train``."""

    command = "train"
    panel = "Run"
    example = "train run.toml"
    run: RunFile
    slurm: Annotated[
        bool, Field(description="Submit the run as a Slurm job (sbatch), instead of starting it here.")
    ] = False


class DataOptions(JsonOption):
    """Arguments and options of ``fivefold data``."""

    command = "data"
    panel = "Run"
    example = "data run.toml"
    run: Annotated[Path, Field(description="The run file (.toml) whose data is prepared."), Argument()]
    samples: Annotated[
        int,
        Field(ge=0, description="Also print this many training samples, with ⟦ and ⟧ around the text that is trained."),
        Option(("--show",)),
    ] = 0


class ShowOptions(JsonOption):
    """Arguments and options of ``fivefold show``."""

    command = "show"
    panel = "Understand"
    example = "show runs/llama3-8b"
    folder: Annotated[Path, Field(description="The folder of a run."), Argument()]
    charts: Annotated[bool, Field(description="Also draw loss.svg, memory.svg and compare.svg into the folder.")] = (
        False
    )


class DoctorOptions(JsonOption):
    """Arguments and options of ``fivefold doctor``."""

    command = "doctor"
    panel = "Understand"
    example = "doctor model.py"
    file: Annotated[
        Path,
        Field(
            description="Python file that defines model() and either loss(model) or step(model, optimizer); "
            "optimizer(model) is optional. Or a memory snapshot."
        ),
        Argument(),
    ]
    budget: Annotated[str | None, Field(description="Memory budget, such as 24GiB: advise what to recompute.")] = None
    fsdp: Annotated[
        int | None,
        Field(description="Estimate memory and communication of the module under FSDP2 over this many GPUs."),
    ] = None
    tp: Annotated[
        int | None,
        Field(
            description="Estimate memory and communication under tensor parallelism over this many GPUs; FILE defines "
            "plan(model), which returns a style (colwise, rowwise) for each module."
        ),
    ] = None


class GenerateOptions(JsonOption):
    """Arguments and options of ``fivefold generate``."""

    command = "generate"
    panel = "Run"
    example = "generate run.toml --prompt 'Once upon a time'"
    source: Annotated[
        Path,
        Field(
            description="A run file, the folder of a run or checkpoint, a Hugging Face folder or a PEFT adapter folder."
        ),
        Argument(),
    ]
    prompt: Annotated[tuple[str, ...], Field(description="Text to continue; several prompts are batched.")] = ()
    tokens: Annotated[int, Field(ge=1, description="Largest number of tokens to generate for each prompt.")] = 200
    temperature: Annotated[
        float, Field(ge=0, description="Sampling temperature; 0 always takes the most likely token.")
    ] = 0.8
    top_p: Annotated[
        float, Field(description="Nucleus sampling: sample from the fewest tokens with this total probability.")
    ] = 1.0
    seed: Annotated[int, Field(ge=0, description="Random seed of the sampling.")] = 0
    window: Annotated[int | None, Field(ge=2, description="Context length in tokens. Default: as trained.")] = None
    dtype: Annotated[
        WeightsDtype | None, Field(description="Data type of the weights. Default: bf16 on a GPU, else fp32.")
    ] = None
    tokenizer: Annotated[
        Path | None,
        Field(description="A tokenizer.json, or the word bytes (byte-level), instead of the source's tokenizer."),
    ] = None
    base: BaseFolder = None


class NumericsOptions(JsonOption):
    """Arguments and options of ``fivefold numerics``."""

    command = "numerics"
    panel = "Understand"
    example = "numerics run.toml"
    run: RunFile
    weights: Annotated[
        Path | None,
        Field(description="Folder of a run, checkpoint or Hugging Face model. Default: the run's own weights."),
    ] = None
    precision: Annotated[
        Line | None,
        Field(description="Precision recipe to compare with fp32, such as fp8-tiles. Default: the run's own."),
        Option(completion="complete_precision"),
    ] = None
    sequences: Annotated[
        int, Field(ge=1, description="Number of sequences to compare on, from the run's first batch.")
    ] = 1
    chart: Annotated[
        Path | None, Field(description="Draw the errors by layer into this file (.svg, .png or .html).")
    ] = None


class ImportOptions(JsonOption):
    """Arguments and options of ``fivefold import``."""

    command = "import"
    panel = "Share"
    example = "import Llama-3.1-8B --to run.toml"
    folder: Annotated[
        Path,
        Field(description="A Hugging Face folder (config.json and safetensors), or a PEFT adapter folder."),
        Argument(),
    ]
    to: Annotated[Path | None, Field(description="Write a run file that starts from these weights.")] = None
    base: BaseFolder = None


class ExportOptions(JsonOption):
    """Arguments and options of ``fivefold export``."""

    command = "export"
    panel = "Share"
    example = "export runs/llama3-8b --to weights"
    source: Annotated[
        Path, Field(description="The folder of a run (its newest checkpoint) or of a checkpoint."), Argument()
    ]
    to: Annotated[Path, Field(description="The Hugging Face folder to write.")]
    dtype: Annotated[
        WeightsDtype | None, Field(description="Data type of the weights. Default: bf16; of adapters fp32.")
    ] = None
    merge: Annotated[
        bool,
        Field(description="For a run with adapters: write the weights of the base with the adapters merged in."),
    ] = False
    base: BaseFolder = None
    file_size: Annotated[str, Field(description="Maximum size of one safetensors file, such as 5GB.")] = "5GB"


class McpOptions(Request):
    """Arguments and options of ``fivefold mcp``."""

    command = "mcp"
    panel = "Share"
    example = "mcp"
    folder: Annotated[
        Path,
        Field(description="The folder below which tools may write, if --write is given. Default: this folder."),
        Argument(),
    ] = Path()
    write: Annotated[
        bool,
        Field(description="Allow the tool `write` to create new files below FOLDER. Without it, no file is written."),
    ] = False


class SchemaOptions(Request):
    """Arguments and options of ``fivefold schema``."""

    command = "schema"
    panel = "Share"
    example = "schema predict"
    of: Annotated[
        Line,
        Field(description="The command whose output is described, such as predict."),
        Argument(metavar="COMMAND", completion="complete_json_command"),
    ]


class SettingsOptions(JsonOption):
    """Arguments and options of ``fivefold config``."""

    command = "config"
    panel = "Share"
    example = "config set machine h100:64"
    action: Annotated[
        SettingsAction, Field(description="What to do: set, get, unset or list settings. Default: list."), Argument()
    ] = "list"
    key: Annotated[
        Line | None,
        Field(description="The setting: stack, machine, prices.NAME, output.color or output.width."),
        Argument(completion="complete_setting"),
    ] = None
    value: Annotated[Line | None, Field(description="The value to set."), Argument()] = None


class WebOptions(Request):
    """Arguments and options of ``fivefold web``."""

    command = "web"
    panel = "Share"
    example = "web"
    folder: Annotated[Path, Field(description="The folder whose runs and files the page may read."), Argument()] = (
        Path()
    )
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0: any free port.")] = 8765
    browser: Annotated[
        bool, Field(description="Open the page in the browser."), Option(("--browser/--no-browser",))
    ] = True


COMMANDS: dict[str, type[Request]] = {  # in the order of the help page
    schema.command: schema
    for schema in sorted(
        (
            schema
            for schema in list(globals().values())
            if isinstance(schema, type) and issubclass(schema, Request) and schema.__dict__.get("command")
        ),
        key=lambda schema: PANELS.index(schema.panel),
    )
}
