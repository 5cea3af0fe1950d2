"""The request of each command: ``…Request`` has the fields of every interface, ``…Options`` those of the terminal.

Options of the terminal name files to read or write and select the output; the web page does not have them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

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
    DollarCount,
    FrontLevels,
    GlobalBatch,
    IgnoredKeys,
    JobFile,
    LayoutText,
    Line,
    Lines,
    MachineName,
    ModelName,
    OptimizerName,
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
from fivefold.requests.schema import PANELS, Argument, Option, Request, make_field
from fivefold.requests.words import parse_dollars
from fivefold.results.search_result import Objective
from fivefold.spelling import make_unknown_name_error
from fivefold.step import FITS_RISK

DEFAULT_TOKENS = 1e12  # of a run whose length is not given
UNRANKABLE_DIFFERENCE = 0.02  # relative difference of step times below which a prediction cannot rank layouts
Question = Literal["micro-batch", "sequence", "gpus", "model", "batch", "run", "tokens", "changes", "finetune"]
QUESTION_SYNONYMS: Mapping[str, Question] = {
    "time": "run",
    "cost": "run",
    "mbs": "micro-batch",
    "seq": "sequence",
    "gbs": "batch",
    "lora": "finetune",
    "qlora": "finetune",
}


def replace_synonym(question: str) -> str:
    """Return the question that a synonym stands for, and any other text as it is."""
    return QUESTION_SYNONYMS.get(question, question)


def parse_question(text: str) -> str:
    """Return the question of ``ask`` that ``text`` names; raises ``UserError`` if there is none."""
    question = replace_synonym(text)
    if question not in get_args(Question):
        raise make_unknown_name_error(text, [*get_args(Question), *QUESTION_SYNONYMS], kind="question")
    return question


AskedQuestion = Annotated[Question, BeforeValidator(replace_synonym)]
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

    no_calibrate: bool = make_field(
        False, "On machine 'local' without a calibration: fail, instead of measuring this computer first."
    )


class JobRequest(Request):
    """A job: the most common fields, and any other by ``set``."""

    stack: StackName = None
    seq: Sequence = None
    gbs: GlobalBatch = None
    precision: PrecisionName = None
    optimizer: OptimizerName = None
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

    searches_layout: ClassVar[bool] = False  # whether the answer is a layout, on any number of GPUs
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

    over_time: bool = make_field(False, "Also draw the pipeline and the memory over time on the terminal.")
    charts: Path | None = make_field(
        None, "Draw the pipeline and the memory over time into this folder: pipeline.svg, memory.svg and their .html."
    )
    trace: Path | None = make_field(None, "Write the step as a trace for Perfetto (.json).")


class PredictRequest(LayoutRequest):
    """The fields of ``predict`` on every interface."""


class PredictOptions(PredictRequest, ConfigOptions, PictureOptions, CalibrationOption, JsonOption):
    """Arguments and options of ``fivefold predict``."""

    command = "predict"
    panel = "Plan"
    example = "predict llama3-8b h100:64 'dp64 zero3 mbs1' --seq 8192 --gbs 512"
    operations: bool = make_field(False, "Also list every operation with its FLOPs, bytes and seconds.")


class SearchRequest(MachineRequest):
    """The fields of ``search`` on every interface, for layouts of one machine or for one run on several machines."""

    machines: Lines = make_field((), "More machines: compare one run on each.", Argument(metavar="[MACHINE…]"))
    by: Objective = make_field(
        "time",
        "Objective to minimize: step time, peak memory, energy or cost; robust: the worst-case regret "
        "if links, kernels, "
        "expert balance or one rank are slower than assumed.",
    )
    top: ShownLayouts = 10
    also: Lines = make_field(
        (),
        "Another precision to try in addition to --precision, such as fp8; may be repeated.",
        Option(metavar="PRECISION"),
    )
    where: Where = ""
    memory: Line | None = make_field(
        None, "Plan for this much memory per GPU, such as 72GiB. Default: all that the GPU has."
    )
    risk: Risk = FITS_RISK
    keep: Line | None = make_field(
        None,
        "Start from this layout and list what each single change (a degree, schedule, recomputation) "
        "gains or costs, "
        "instead of searching all layouts.",
    )
    within: float | None = make_field(
        None,
        "Relative time difference up to which layouts count as equal; the simplest of them is "
        f"proposed. Default: {UNRANKABLE_DIFFERENCE:g}.",
        ge=0,
        le=1,
    )
    exact: bool = make_field(
        False,
        "Search until the best layout is proven, which may take minutes, and rank by predicted time "
        "only, without the "
        "proposal of a simpler layout that is as fast.",
    )
    front: FrontLevels = 1
    two: bool = make_field(
        False, "Also try 2D tensor parallelism (tp4x2), which Fivefold's trainer does not run.", Option(("--2d",))
    )
    tokens: TokenCount | None = make_field(
        None, "Training tokens of the run, such as 2T, for comparing machines or numbers of GPUs. Default: 1T.", TOKENS
    )
    price: Prices = ()
    deadline: Line | None = make_field(
        None,
        "Find the fewest GPUs of each machine, in the range --gpu-counts, that finish --tokens within "
        "this time, such as 30d.",
    )
    gpu_counts: Line | None = make_field(
        None,
        "Numbers of GPUs to try, as a range such as 64-512. Default: that of the machine; with "
        "--deadline also fewer, from one node, or 1-16384 for a machine without a number of GPUs.",
    )
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
    searches_layout = True
    chart: Path | None = make_field(None, "Draw the Pareto front of memory and time into this file (.svg or .html).")
    measure: int = make_field(0, "Number of best layouts to also train for a few steps each, on this computer.", ge=0)
    write: Path | None = make_field(
        None,
        "Write the proposed layout, or the first of the ranking that the software can run, as a config "
        "for --stack, to this file or folder.",
    )


class PlanRequest(MachineRequest):
    """The fields of ``plan`` on every interface."""

    tokens: TokenCount = make_field(DEFAULT_TOKENS, "Training tokens of the run, such as 2T.", TOKENS)
    gbs: int | None = make_field(
        None,
        "Global batch: sequences per optimizer step, over all GPUs. Default: advised for --tokens, or "
        "8 with --batch job.",
    )
    batch: Batch = make_field(
        "advised",
        "Batch size: advised (from published batch-size laws, unless --gbs is given), or job (that of "
        "--gbs or of the --job file).",
    )
    where: Where = ""
    price: Prices = ()
    assume: Assumptions = ()
    risk: Risk = FITS_RISK


class PlanOptions(PlanRequest, ConfigOptions, JsonOption):
    """Arguments and options of ``fivefold plan``."""

    command = "plan"
    panel = "Plan"
    example = "plan llama3-8b h100:64 --tokens 1T"
    searches_layout = True
    write: Path | None = make_field(
        None, "Write a run file (.toml) for `fivefold train` here, and with another --stack also its config next to it."
    )


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
    words: tuple[str, ...] = make_field(
        (),
        "One or more models, machines and layouts; or run files.",
        Argument(metavar="MODEL… MACHINE… LAYOUT… | RUN.toml…"),
    )
    from_files: tuple[Path, ...] = make_field(
        (),
        "Config of any supported software to compare; may be repeated, and combined with layouts and machines.",
        Option(("--from",), metavar="FILE"),
    )
    gpus: ConfigMachine = None
    ignore: IgnoredKeys = ()
    charts: Path | None = make_field(
        None, "Draw the step times and the memory into this folder: time.svg and memory.svg."
    )


class RatiosRequest(LayoutRequest):
    """The fields of ``ratios`` on every interface."""

    layout: Line = make_field(
        "dp1", "Layout whose other degrees stay as they are while one axis (dp, tp, cp, ep) is varied.", Argument()
    )


class RatiosOptions(RatiosRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold ratios``."""

    command = "ratios"
    panel = "Plan"
    example = "ratios llama3-8b h100:64 'dp8 tp8'"
    degrees: bool = make_field(False, "Also list each degree of each axis.")


class AskRequest(MachineRequest):
    """The fields of ``ask`` on every interface, without the question."""

    layout: Line | None = make_field(
        None,
        "Layout, for micro-batch, sequence, batch, run, tokens and changes. Default: the fastest that fits.",
        Argument(),
    )
    tokens: TokenCount = make_field(
        DEFAULT_TOKENS, "For batch and run: training tokens of the run, such as 2T.", TOKENS
    )
    price: Prices = ()
    assume: Assumptions = ()
    deadline: Line | None = make_field(None, "For tokens: the longest that the run may take, such as 30d.")
    budget: DollarCount | None = make_field(
        None,
        "For tokens: the most that the run may cost, in dollars, such as 50k.",
        Option(metavar="DOLLARS", parser=parse_dollars),
    )
    noise: Line | None = make_field(
        None, "For batch: gradient noise scale in tokens, or the folder of a run that logged it."
    )
    risk: Risk = FITS_RISK


class AskOptions(AskRequest, ConfigOptions, JsonOption):
    """Arguments and options of ``fivefold ask``."""

    command = "ask"
    panel = "Plan"
    example = "ask sequence llama3-8b h100:8 --gbs 8"
    question: AskedQuestion = make_field(
        ...,
        "The question: micro-batch, sequence, gpus, model, batch, run (also: time, cost), tokens, changes or finetune.",
        Argument(place=-1, completion="complete_question", parser=parse_question),
    )
    chart: Path | None = make_field(None, "For run and sequence: draw the answer (.svg or .html).")

    @property
    def run_tokens(self) -> float | None:
        """Return the training tokens if the question is about a complete run; ``tokens`` begins with the default."""
        return self.tokens if self.question in ("run", "tokens") else None


class SweepRequest(Request):
    """The fields of ``sweep`` on every interface, without its file."""

    measure: bool = make_field(
        False, "Also train each row that fits for --steps steps on this computer, and record the measured step time."
    )
    steps: int = make_field(8, "With --measure: optimizer steps of each run; the first ones are not timed.")
    timeout: float = make_field(
        300.0, "With --measure: time limit of each run in seconds; a longer one counts as failed."
    )
    risk: Risk = FITS_RISK


class SweepOptions(SweepRequest, JsonOption):
    """Arguments and options of ``fivefold sweep``."""

    command = "sweep"
    panel = "Plan"
    example = "sweep sweep.toml --out rows.csv"
    file: Path = make_field(..., "The sweep file (.toml).", Argument())
    out: Path | None = make_field(None, "File for the rows: .parquet, .csv or .jsonl. Default: runs/sweeps/NAME.jsonl.")
    charts: Path | None = make_field(None, "Draw charts of what the sweep varies, as .svg files in this folder.")
    slurm: bool = make_field(
        False, "Measure with Slurm jobs: the first call submits them, and the same call later collects their results."
    )
    dry: bool = make_field(
        False,
        "Only print how many rows the sweep would have; predict and measure nothing. This computer, if "
        "it is among the machines, must be calibrated.",
    )


class DryrunRequest(LayoutRequest):
    """The fields of ``dryrun`` on every interface."""


class DryrunOptions(DryrunRequest, ConfigOptions, PictureOptions, JsonOption):
    """Arguments and options of ``fivefold dryrun``."""

    command = "dryrun"
    panel = "Run"
    example = "dryrun llama3-8b h100:8 'dp8 zero3 mbs1' --gbs 64"
    schedule: Path | None = make_field(
        None,
        "A custom pipeline schedule (.csv): a row per rank with actions such as F0.3 (forward of stage "
        "0, micro-batch 3).",
    )
    every_rank: bool = make_field(False, "Dry-run every rank, instead of one per pipeline rank.")
    every_layer: bool = make_field(False, "Execute every layer, instead of one of each group of equal layers.")
    ranks: str | None = make_field(
        None,
        "Ranks that --trace and --snapshot write, such as 0,3. Default: all in the trace, and the rank "
        "with the "
        "highest peak in the snapshot.",
    )
    snapshot: Path | None = make_field(
        None, "Write a memory snapshot (.pickle) for PyTorch's memory viewer, pytorch.org/memory_viz."
    )


WORD = "List only the entries that contain this word in a name or value, such as "


class ModelsOptions(JsonOption):
    """Arguments and options of ``fivefold models``."""

    command = "models"
    panel = "Plan"
    example = "models llama3"
    word: Line | None = make_field(None, f"{WORD}qwen3; moe lists all mixture-of-experts models.", Argument())
    families: bool = make_field(
        False,
        "List the causal language models of Hugging Face transformers instead: which can be trained, "
        "which can only be predicted, and why others are not supported.",
    )


class MachinesOptions(JsonOption):
    """Arguments and options of ``fivefold machines``."""

    command = "machines"
    panel = "Plan"
    example = "machines h100"
    word: Line | None = make_field(None, f"{WORD}h100, nvlink or 24gb.", Argument())


class StacksOptions(JsonOption):
    """Arguments and options of ``fivefold stacks``."""

    command = "stacks"
    panel = "Plan"
    example = "stacks megatron"
    word: Line | None = make_field(None, f"{WORD}megatron or fsdp.", Argument())


class ReportOptions(JobOptions):
    """Arguments and options of ``fivefold report``."""

    command = "report"
    panel = "Share"
    example = "report llama3-8b h100:64 --gbs 512 --out report.html"
    what: tuple[str, ...] = make_field(
        (),
        "A run's folder; files that predict, search, plan or compare --json, or sweep, wrote; or MODEL "
        "MACHINE [LAYOUT] with job options.",
        Argument(metavar="RUN | FILE… | MODEL MACHINE [LAYOUT]"),
    )
    from_file: ConfigFile = None
    gpus: ConfigMachine = None
    ignore: IgnoredKeys = ()
    risk: Risk = FITS_RISK
    out: Path | None = make_field(
        None, "The .html file. Default: report.html, for a run in its folder.", Option(("--out", "-o"))
    )


class ReadOptions(JsonOption):
    """Arguments and options of ``fivefold read``."""

    command = "read"
    panel = "Share"
    example = "read train.toml --gpus h100:64"
    words: tuple[str, ...] = make_field(..., "A config, a script, or a launch command.", Argument(metavar="FILE|ARGS…"))
    gpus: ConfigTarget = None
    model: ConfigModel = None
    vocab: int | None = make_field(None, "Vocabulary size, if the config has none.", ge=1)


class WriteOptions(JobOptions):
    """Arguments and options of ``fivefold write``."""

    command = "write"
    panel = "Share"
    example = "write 'dp8 tp4 zero1 mbs1' --model llama3-8b --to megatron --gbs 512"
    what: str = make_field(
        ..., "A layout (with --model), a run file, or any config to translate.", Argument(metavar="LAYOUT|FILE")
    )
    to: str | None = make_field(
        None,
        "Format to write. Default: that of --stack, or of the software of your settings. One of "
        "accelerate, axolotl, bridge (Megatron Bridge), deepspeed, fivefold, "
        "kubernetes, llamafactory, megatron, nanotron, skypilot, torchtitan, torchtitan-0.2, torchtune or trl.",
        Option(completion="complete_format"),
    )
    stack: Annotated[
        StackName,
        Field(
            description="Software whose defaults fill the fields of the job that are not given. Seldom needed: by "
            "default that of --to."
        ),
    ] = None
    model: ConfigModel = None
    gpus: ConfigTarget = None
    output: Path | None = make_field(None, "File or folder to write to. Default: stdout.", Option(("--out", "-o")))
    ignore: IgnoredKeys = ()


class DrawOptions(JobOptions):
    """Arguments and options of ``fivefold draw``."""

    command = "draw"
    panel = "Understand"
    example = "draw pipeline llama3-8b h100:8 'pp4 dp2 mbs1' --gbs 32"
    picture: Picture = make_field(
        ...,
        "Picture to draw. pipeline: the schedule over time; memory: memory over a step; memory-parts: "
        "peak memory of each rank by component; roofline: operations against the chip's limits; topology: the "
        "machine's links; bandwidth: a collective's bandwidth by message size; collectives, masks and formats: an "
        "illustration of each.",
        Argument(),
    )
    words: tuple[str, ...] = make_field(
        (),
        "What is drawn: MODEL MACHINE LAYOUT (pipeline, memory, memory-parts, roofline), MACHINE "
        "(topology, bandwidth), a number of ranks (collectives, masks), or number formats such as fp8 (formats).",
        Argument(metavar="[MODEL MACHINE LAYOUT | MACHINE | RANKS | FORMAT…]"),
    )
    collective: Collective = make_field(
        "all_reduce", "For bandwidth: the collective whose bandwidth is drawn over the message size."
    )
    out: Path | None = make_field(
        None, "Output file: .svg, .png, .pdf or .html. Default: PICTURE.svg in this folder.", Option(("--out", "-o"))
    )


class CalibrateOptions(JobOptions, JsonOption):
    """Arguments and options of ``fivefold calibrate``."""

    command = "calibrate"
    panel = "Run"
    example = "calibrate --quick"
    layout: str | None = make_field(None, "With --for MODEL: the layout to measure.", Argument())
    run: str | None = make_field(
        None,
        "Also measure the layers and messages of one run, which its predictions then use: a run file, "
        "or a model with "
        "LAYOUT.",
        Option(("--for",)),
    )
    processes: str = make_field(
        "1,2",
        "Numbers of processes to measure with, such as 1,2: kernels with each number, collectives between two or more.",
    )
    quick: bool = make_field(False, "Measure fewer points: faster, but predictions are less accurate.")
    out: Path | None = make_field(
        None, "Machine file to write. Default: ~/.cache/fivefold/local.toml, the machine 'local'."
    )


class TraceRequest(JobRequest):
    """The fields of ``trace`` on every interface, without its files."""

    step: int | None = make_field(None, "Analyze only the ProfilerStep with this number.", ge=0)
    top: int = make_field(10, "Number of longest kernels to list.", ge=1)
    machine: str | None = make_field(None, "Machine, such as h100:8: rate each message by the bandwidth of its links.")
    against: tuple[str, str, str] | None = make_field(
        None,
        "Compare with the predicted step of this MODEL, MACHINE and LAYOUT; takes job options.",
        Option(metavar="MODEL MACHINE LAYOUT"),
    )


class TraceOptions(TraceRequest, JobOptions, JsonOption):
    """Arguments and options of ``fivefold trace``."""

    command = "trace"
    panel = "Understand"
    example = "trace traces/ --machine h100:8"
    files: tuple[Path, ...] = make_field(
        ..., "Traces (.json, .json.gz), one per rank, or their folder.", Argument(metavar="FILE…")
    )
    charts: Path | None = make_field(None, "Write breakdown and critical-path as .svg and .html into this folder.")


class ExplainOptions(JobOptions, JsonOption):
    """Arguments and options of ``fivefold explain``."""

    command = "explain"
    panel = "Understand"
    example = "explain train.log"
    files: tuple[Path, ...] = make_field(
        ...,
        "Logs, memory snapshots, flight recorder dumps, stack traces (of py-spy or faulthandler), or their folder.",
        Argument(metavar="FILE…"),
    )
    against: tuple[str, str, str] | None = make_field(
        None,
        "Compare memory with the prediction for this MODEL, MACHINE and LAYOUT, and find a change that "
        "fits; takes job "
        "options.",
        Option(metavar="MODEL MACHINE LAYOUT"),
    )
    top: int = make_field(12, "Number of lines of code to list, those that hold the most memory first.", ge=1)


class TrainRequest(Request):
    """The fields of ``train`` on every interface, without its run file."""

    layout: str | None = make_field(None, "Layout, instead of the run file's.")
    machine: str | None = make_field(None, "Machine, instead of the run file's, such as local:2.")
    force: bool = make_field(False, "Start even if the step does not fit, or this host is not the run file's machine.")
    trace: int | None = make_field(
        None,
        "Record this many steps of each rank as traces in the run's folder (trace/rank0.json, …).",
        Option(metavar="STEPS"),
        ge=1,
    )


class TrainOptions(TrainRequest, CalibrationOption, JsonOption):
    """Arguments and options of ``fivefold train``."""

    command = "train"
    panel = "Run"
    example = "train run.toml"
    run: RunFile
    slurm: bool = make_field(False, "Submit the run as a Slurm job (sbatch), instead of starting it here.")


class DataOptions(JsonOption):
    """Arguments and options of ``fivefold data``."""

    command = "data"
    panel = "Run"
    example = "data run.toml"
    run: Path = make_field(..., "The run file (.toml) whose data is prepared.", Argument())
    samples: int = make_field(
        0,
        "Also print this many training samples, with ⟦ and ⟧ around the text that is trained.",
        Option(("--show",)),
        ge=0,
    )


class ShowOptions(JsonOption):
    """Arguments and options of ``fivefold show``."""

    command = "show"
    panel = "Understand"
    example = "show runs/llama3-8b"
    folder: Path = make_field(..., "The folder of a run.", Argument())
    charts: bool = make_field(False, "Also draw loss.svg, memory.svg and compare.svg into the folder.")


class DoctorOptions(JsonOption):
    """Arguments and options of ``fivefold doctor``."""

    command = "doctor"
    panel = "Understand"
    example = "doctor model.py"
    file: Path = make_field(
        ...,
        "Python file that defines model() and either loss(model) or step(model, optimizer); "
        "optimizer(model) is optional. Or a memory snapshot.",
        Argument(),
    )
    budget: str | None = make_field(None, "Memory budget, such as 24GiB: advise what to recompute.")
    fsdp: int | None = make_field(
        None, "Estimate memory and communication of the module under FSDP2 over this many GPUs."
    )
    tp: int | None = make_field(
        None,
        "Estimate memory and communication under tensor parallelism over this many GPUs; FILE defines "
        "plan(model), which returns a style (colwise, rowwise) for each module.",
    )


class GenerateOptions(JsonOption):
    """Arguments and options of ``fivefold generate``."""

    command = "generate"
    panel = "Run"
    example = "generate run.toml --prompt 'Once upon a time'"
    source: Path = make_field(
        ...,
        "A run file, the folder of a run or checkpoint, a Hugging Face folder or a PEFT adapter folder.",
        Argument(),
    )
    prompt: tuple[str, ...] = make_field((), "Text to continue; several prompts are batched.")
    tokens: int = make_field(200, "Largest number of tokens to generate for each prompt.", ge=1)
    temperature: float = make_field(0.8, "Sampling temperature; 0 always takes the most likely token.", ge=0)
    top_p: float = make_field(1.0, "Nucleus sampling: sample from the fewest tokens with this total probability.")
    seed: int = make_field(0, "Random seed of the sampling.", ge=0)
    window: int | None = make_field(None, "Context length in tokens. Default: as trained.", ge=2)
    dtype: WeightsDtype | None = make_field(None, "Data type of the weights. Default: bf16 on a GPU, else fp32.")
    tokenizer: Path | None = make_field(
        None, "A tokenizer.json, or the word bytes (byte-level), instead of the source's tokenizer."
    )
    base: BaseFolder = None


class NumericsOptions(JsonOption):
    """Arguments and options of ``fivefold numerics``."""

    command = "numerics"
    panel = "Understand"
    example = "numerics run.toml"
    run: RunFile
    weights: Path | None = make_field(
        None, "Folder of a run, checkpoint or Hugging Face model. Default: the run's own weights."
    )
    precision: Line | None = make_field(
        None,
        "Precision recipe to compare with fp32, such as fp8-tiles. Default: the run's own.",
        Option(completion="complete_precision"),
    )
    sequences: int = make_field(1, "Number of sequences to compare on, from the run's first batch.", ge=1)
    chart: Path | None = make_field(None, "Draw the errors by layer into this file (.svg, .png or .html).")


class ImportOptions(JsonOption):
    """Arguments and options of ``fivefold import``."""

    command = "import"
    panel = "Share"
    example = "import Llama-3.1-8B --to run.toml"
    folder: Path = make_field(
        ..., "A Hugging Face folder (config.json and safetensors), or a PEFT adapter folder.", Argument()
    )
    to: Path | None = make_field(None, "Write a run file that starts from these weights.")
    base: BaseFolder = None


class ExportOptions(JsonOption):
    """Arguments and options of ``fivefold export``."""

    command = "export"
    panel = "Share"
    example = "export runs/llama3-8b --to weights"
    source: Path = make_field(..., "The folder of a run (its newest checkpoint) or of a checkpoint.", Argument())
    to: Path = make_field(..., "The Hugging Face folder to write.")
    dtype: WeightsDtype | None = make_field(None, "Data type of the weights. Default: bf16; of adapters fp32.")
    merge: bool = make_field(
        False, "For a run with adapters: write the weights of the base with the adapters merged in."
    )
    base: BaseFolder = None
    file_size: str = make_field("5GB", "Maximum size of one safetensors file, such as 5GB.")


class McpOptions(Request):
    """Arguments and options of ``fivefold mcp``."""

    command = "mcp"
    panel = "Share"
    example = "mcp"
    folder: Path = make_field(
        Path(), "The folder below which tools may write, if --write is given. Default: this folder.", Argument()
    )
    write: bool = make_field(
        False, "Allow the tool `write` to create new files below FOLDER. Without it, no file is written."
    )


class SchemaOptions(Request):
    """Arguments and options of ``fivefold schema``."""

    command = "schema"
    panel = "Share"
    example = "schema predict"
    of: Line = make_field(
        ...,
        "The command whose output is described, such as predict.",
        Argument(metavar="COMMAND", completion="complete_json_command"),
    )


class SettingsOptions(JsonOption):
    """Arguments and options of ``fivefold config``."""

    command = "config"
    panel = "Share"
    example = "config set machine h100:64"
    action: SettingsAction = make_field(
        "list", "What to do: set, get, unset or list settings. Default: list.", Argument()
    )
    key: Line | None = make_field(
        None,
        "The setting: stack, machine, prices.NAME, output.color or output.width.",
        Argument(completion="complete_setting"),
    )
    value: Line | None = make_field(None, "The value to set.", Argument())


class WebOptions(Request):
    """Arguments and options of ``fivefold web``."""

    command = "web"
    panel = "Share"
    example = "web"
    folder: Path = make_field(Path(), "The folder whose runs and files the page may read.", Argument())
    port: int = make_field(8765, "Port to listen on; 0: any free port.", ge=0, le=65535)
    browser: bool = make_field(True, "Open the page in the browser.", Option(("--browser/--no-browser",)))


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
