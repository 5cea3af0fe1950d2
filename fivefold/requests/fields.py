"""Fields that several requests share, each with its type, bounds and help text. Defaults are set by the request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from fivefold.requests.schema import Argument, Option
from fivefold.requests.words import parse_length, parse_tokens
from fivefold.stack.spec import Attention

MAX_LENGTH = 2000  # characters of a name or a line
MAX_LINES = 32  # entries of a list
MAX_SHOWN_LAYOUTS = 10_000  # largest number of layouts in a table, and of memory limits of a front

Line = Annotated[str, Field(max_length=MAX_LENGTH)]
Lines = Annotated[tuple[Line, ...], Field(max_length=MAX_LINES)]
TokenCount = Annotated[float, BeforeValidator(parse_tokens)]  # 2e12 or 2T
TOKENS = Option(metavar="TOKENS", parser=parse_tokens)  # the form on the command line

# Model, machine and layout.
ModelName = Annotated[
    Line,
    Field(description="Catalog name, or path to a config.json, .toml or .json."),
    Argument(completion="models"),
]
MachineName = Annotated[
    Line,
    Field(description="NAME[:GPUS] such as h100:8 or 'l40s:16 nic=100Gbit/node', a .toml file, or local."),
    Argument(completion="machines"),
]
LayoutText = Annotated[
    Line,
    Field(description="Layout keywords, such as 'dp16 tp8 pp4 v2 zero1 mbs1 ac=selective'."),
    Argument(completion="layouts"),
]

# The job.
JobFile = Annotated[Path | None, Field(description="A .toml file of job fields.")]
StackName = Annotated[
    Line | None,
    Field(description="Training software: fivefold, megatron-core, torchtitan, …"),
    Option(completion="stacks"),
]
Sequence = Annotated[
    int | None,
    BeforeValidator(parse_length),
    Field(description="Tokens per sequence, such as 8192 or 8k."),
    Option(metavar="TOKENS", parser=parse_length),
]
GlobalBatch = Annotated[int | None, Field(description="Sequences per optimizer step.")]
PrecisionName = Annotated[
    Line | None,
    Field(description="Precision recipe: fp32, bf16, bf16-grad16, fp16, fp8, mxfp8, …"),
    Option(completion="precisions"),
]
AdapterText = Annotated[
    Line | None,
    Field(description="Train low-rank adapters over frozen weights: lora:RANK, or qlora:RANK over weights in nf4."),
    Option(completion="adapters"),
]
AttentionKernel = Annotated[Attention | None, Field(description="Attention kernel.")]
Settings = Annotated[
    Lines, Field(description="Any other job field, such as loss=chunked, overlap=dp,pp or optimizer.kind=muon.")
]

# The constraints of a search, and the assumptions on a run.
Risk = Annotated[
    float,
    Field(ge=0, le=0.99, description="Highest acceptable probability that a layout runs out of memory."),
]
Where = Annotated[Line, Field(description="Constraints on layouts, such as 'tp<=8 cp=1 zero<=1 ac=none,selective'.")]
Prices = Annotated[Lines, Field(description="Price in dollars per GPU hour, such as 'h100=2.2/h' or '2.2'.")]
Assumptions = Annotated[
    Lines, Field(description="Assumptions on the run: failures=, restart=, checkpoint=, storage=, pue=, grid=, …")
]

ShownLayouts = Annotated[int, Field(ge=1, le=MAX_SHOWN_LAYOUTS, description="Number of layouts to show.")]
FrontLevels = Annotated[
    int,
    Field(ge=1, le=MAX_SHOWN_LAYOUTS, description="Number of memory limits for the Pareto front of memory and time."),
]

StackNames = Annotated[
    Lines, Field(description="Software to compare, such as fivefold,megatron-core."), Option(separator=",")
]
PrecisionNames = Annotated[Lines, Field(description="Precisions to compare, such as bf16,fp8."), Option(separator=",")]

# Options of the terminal only: files and output formats.
IgnoredKeys = Annotated[
    tuple[str, ...],
    Field(
        description="Ignore these keys of a config, although they may change memory, FLOPs, messages or time.",
    ),
    Option(metavar="KEY[,KEY]"),
]
ConfigFile = Annotated[
    Path | None,
    Field(description="Read model, layout and job from a config of any software, instead of the arguments."),
    Option(("--from",)),
]
ConfigMachine = Annotated[str | None, Field(description="With --from: the machine, such as h100:64.")]
ConfigTarget = Annotated[str | None, Field(description="The machine, such as h100:64.")]
ConfigModel = Annotated[str | None, Field(description="The model, if the config names none.")]
RunFile = Annotated[Path, Field(description="The run file (.toml)."), Argument()]
PrintsJson = Annotated[bool, Field(description="Print data as JSON."), Option(("--json",))]
