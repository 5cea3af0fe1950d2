"""Records of the JSON that some commands print and no other function returns. They state its schema."""

from __future__ import annotations

from pydantic import ConfigDict, NonNegativeInt, RootModel

from fivefold.record import Record
from fivefold.results.explanation import AgainstPrediction, Explanation
from fivefold.step import StageMemory, Step


class ExplainOutput(Record):
    """The output of ``explain``: what the files tell, and the prediction compared with their memory."""

    explanations: tuple[Explanation, ...]
    against: AgainstPrediction | None


class StepPair(Record):
    """The output of ``train``: the predicted step and the measured one. A watched loop may have no prediction."""

    model_config = ConfigDict(extra="allow")  # step.json also holds what the run measured of itself

    predicted: Step
    measured: Step


class SweepSize(Record):
    """The output of ``sweep --dry``: the number of rows at most, and of settings of model, machine, ranks and job."""

    rows: NonNegativeInt
    settings: NonNegativeInt


class HeldBytes(Record):
    """Storages that are live at the peak of a dry run, of one line of code."""

    bytes: NonNegativeInt
    number: NonNegativeInt
    largest_bytes: NonNegativeInt
    category: str
    allocated_in: str
    module: str
    line: str


class DryrunPeak(Record):
    """The moment of highest memory on the rank with the highest peak: bytes by kind, and the largest tensors."""

    rank: NonNegativeInt
    bytes: dict[str, int]
    largest: tuple[HeldBytes, ...]


class DryrunOutput(Record):
    """The output of ``dryrun``; a job that would raise or hang has only ``findings``."""

    findings: tuple[str, ...]
    predicted: Step | None = None
    dry_run: Step | None = None
    first_step: tuple[StageMemory, ...] = ()
    peak: DryrunPeak | None = None
    assumed: tuple[str, ...] = ()


class GeneratedText(Record):
    """One continued prompt of ``generate``."""

    prompt: str
    text: str
    tokens: NonNegativeInt
    ended: bool  # by an end token, not at the limit


class GenerateOutput(Record):
    """The output of ``generate``: the texts and the speed."""

    source: str
    seconds: float
    tokens_per_second: float
    samples: tuple[GeneratedText, ...]


class ImportOutput(Record):
    """The output of ``import``: the family and size of a Hugging Face folder."""

    folder: str
    family: str
    parameters: NonNegativeInt
    tensors: NonNegativeInt
    bytes: NonNegativeInt
    dtypes: tuple[str, ...]
    ignored: tuple[str, ...]
    run: str | None


class ExportOutput(Record):
    """The output of ``export``: what was written."""

    folder: str
    family: str
    step: NonNegativeInt
    tensors: NonNegativeInt
    files: NonNegativeInt
    bytes: NonNegativeInt
    dtype: str


class SettingValues(RootModel[dict[str, str | float]]):
    """The output of ``config``: values by key."""
