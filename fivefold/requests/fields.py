"""Fields that several requests share, each with its type, bounds and help text. Defaults are set by the request."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from fivefold.requests.schema import Argument, Option
from fivefold.requests.words import parse_dollars, parse_length, parse_tokens
from fivefold.stack.spec import Attention

MAX_LENGTH = 2000  # characters of a name or a line
MAX_LINES = 32  # entries of a list
MAX_SHOWN_LAYOUTS = 10_000  # largest number of layouts in a table, and of memory limits of a front

Line = Annotated[str, Field(max_length=MAX_LENGTH)]
Lines = Annotated[tuple[Line, ...], Field(max_length=MAX_LINES)]
TokenCount = Annotated[float, BeforeValidator(parse_tokens)]  # 2e12 or 2T
DollarCount = Annotated[float, BeforeValidator(parse_dollars)]  # 50000, 50k or $50,000
TOKENS = Option(metavar="TOKENS", parser=parse_tokens)  # the form on the command line

# Model, machine and layout.
ModelName = Annotated[
    Line,
    Field(description="Catalog name, its Hugging Face repository, or path to a config.json, .toml or .json."),
    Argument(completion="complete_model"),
]
MachineName = Annotated[
    Line,
    Field(description="NAME[:GPUS] such as h100:8 or 'l40s:16 nic=100Gbit/node', a .toml file, or local."),
    Argument(completion="complete_machine"),
]
LayoutText = Annotated[
    Line,
    Field(description="Layout keywords, such as 'dp16 tp8 pp4 v2 zero1 mbs1 ac=selective'."),
    Argument(completion="complete_layout"),
]

# The job.
JobFile = Annotated[Path | None, Field(description="A .toml file of job fields, which the other options override.")]
StackName = Annotated[
    Line | None,
    Field(
        description="Training software: fivefold (default), megatron-core, torchtitan, …; `fivefold stacks` lists all."
    ),
    Option(completion="complete_stack"),
]
Sequence = Annotated[
    int | None,
    BeforeValidator(parse_length),
    Field(description="Tokens per sequence, such as 8192 or 8k. Default: 4096."),
    Option(metavar="TOKENS", parser=parse_length),
]
GlobalBatch = Annotated[
    int | None,
    Field(
        description="Global batch: sequences per optimizer step, over all GPUs. Default: one per GPU, at least 8, at "
        "most 16 M tokens; for a complete run at least the batch that is advised for its tokens."
    ),
]
PrecisionName = Annotated[
    Line | None,
    Field(description="Precision recipe: fp32, bf16 (default), bf16-grad16, fp16, fp8, mxfp8, …"),
    Option(completion="complete_precision"),
]
OptimizerName = Annotated[
    Line | None,
    Field(description="Update rule: adamw (default), adamw8bit, adamw4bit, muon, sgd or adafactor."),
    Option(completion="complete_optimizer"),
]
AdapterText = Annotated[
    Line | None,
    Field(
        description="Train low-rank adapters over frozen weights: lora:RANK or dora:RANK, or qlora:RANK or qdora:RANK "
        "over weights in nf4. Default: train all."
    ),
    Option(completion="complete_adapter"),
]
AttentionKernel = Annotated[
    Attention | None,
    Field(
        description="Attention kernel. flash: the fastest for the GPU; flash2, flash1, flash1_triton: "
        "FlashAttention-2, -1, -1 in Triton; blocks: PyTorch's on CPU, which pads the heads of latent attention (MLA) "
        "to one size; unfused: stores the T x T scores. Default: that of --stack (flash for fivefold)."
    ),
]
Settings = Annotated[
    Lines,
    Field(
        description="Set any other job field, such as loss=chunked, overlap=dp,pp or optimizer.clip=0.5; may be "
        "repeated."
    ),
    Option(metavar="FIELD=VALUE"),
]

# The constraints of a search, and the assumptions on a run.
Risk = Annotated[
    float,
    Field(
        ge=0,
        le=0.99,
        description="Highest acceptable probability that a layout runs out of memory; layouts above it count as not "
        "fitting.",
    ),
]
Where = Annotated[
    Line,
    Field(
        description="Consider only layouts that meet these constraints, such as 'tp<=8 cp=1 zero<=1 ac=none,selective'."
    ),
]
Prices = Annotated[
    Lines,
    Field(
        description="Price in dollars per GPU hour, such as 'h100=2.2/h', or '2.2' for all machines; adds the cost to "
        "the answer; may be repeated."
    ),
    Option(metavar="PRICE"),
]
Assumptions = Annotated[
    Lines,
    Field(
        description="Assumptions on the run, such as failures=2 (per 1,000 GPU days), restart=15min, pue=1.2 or "
        "grid=france; may be repeated."
    ),
    Option(metavar="NAME=VALUE"),
]

ShownLayouts = Annotated[int, Field(ge=1, le=MAX_SHOWN_LAYOUTS, description="Number of layouts to show.")]
FrontLevels = Annotated[
    int,
    Field(
        ge=1,
        le=MAX_SHOWN_LAYOUTS,
        description="Number of memory limits under which to search again, for a complete Pareto front of memory and "
        "time; 1: only the layouts that the first search computed.",
    ),
]

StackNames = Annotated[
    Lines, Field(description="Software to compare, such as fivefold,megatron-core."), Option(separator=",")
]
PrecisionNames = Annotated[Lines, Field(description="Precisions to compare, such as bf16,fp8."), Option(separator=",")]

# Options of the terminal only: files and output formats.
IgnoredKeys = Annotated[
    tuple[str, ...],
    Field(description="Continue although these keys of a config may change memory, FLOPs, communication or time."),
    Option(metavar="KEY[,KEY]"),
]
ConfigFile = Annotated[
    Path | None,
    Field(
        description="Read model, layout and job from the config or launch script of any supported software, instead of "
        "arguments."
    ),
    Option(("--from",)),
]
ConfigMachine = Annotated[str | None, Field(description="With --from: the machine, such as h100:64.")]
ConfigTarget = Annotated[str | None, Field(description="Machine and number of GPUs that run it, such as h100:64.")]
ConfigModel = Annotated[
    str | None, Field(description="Model (catalog name or file), for a layout or a config that names none.")
]
RunFile = Annotated[Path, Field(description="The run file (.toml)."), Argument()]
PrintsJson = Annotated[
    bool, Field(description="Print the answer as JSON to stdout, instead of tables."), Option(("--json",))
]
