"""Optimizer settings as records: update rule, parameter groups, learning-rate schedule, batch-size ramp-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from fivefold.bounded_types import Positive, Sequences, Steps
from fivefold.optimizers import KINDS
from fivefold.record import Record

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[KINDS]  # one for each module of ``optimizers/costs``
Beta = Annotated[float, Field(ge=0, lt=1)]
Natural = Annotated[float, Field(ge=0, le=1e30)]
Part = Literal["embeddings", "head", "router", "experts", "vectors"]  # vectors: norms and biases, also of experts
# adamw8bit: elements that share a scale, and the least elements of a quantised weight (bitsandbytes: arXiv:2110.02861)
QUANTISED_BLOCK, QUANTISED_LEAST = 256, 4096


def quantised(numel: int, *, vector: bool) -> bool:
    """Whether adamw8bit keeps 8-bit moments for a whole weight of ``numel`` elements."""
    return not vector and numel >= QUANTISED_LEAST


FULL_FINE_TUNING = (
    "Fivefold plans full fine-tuning only, for now: all weights are trained, and adapters (LoRA) over frozen or "
    "quantized weights are not modelled"
)
NOT_SUPPORTED = dict.fromkeys(("lora", "dora", "adapter", "peft", "quantiz", "load_in_", "bnb"), FULL_FINE_TUNING)


class Group(Record):
    """Overrides for one part of the weights; ``rate``: a factor on the learning rate."""

    of: Part  # part of the weights
    rate: Natural = 1.0  # factor on the learning rate
    weight_decay: Natural | None = None  # None: the optimizer's; for vectors 0


class Rates(NamedTuple):
    """Factor on the learning rate, and weight decay, of one weight."""

    rate: float
    weight_decay: float


class Optimizer(Record):
    """The update rule. ``clip``: largest global gradient norm; 0: no clipping.

    ``weight_decay`` applies to all weights but vectors, unless a group overrides it.
    """

    kind: Kind = "adamw"  # update rule
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of adamw, also for the weights that muon leaves to adamw
    momentum: Beta = 0.95  # of sgd and muon
    epsilon: Positive = 1e-8  # added to the denominator of the update
    weight_decay: Natural = 0.1  # decoupled; not of norms and biases, unless a group names them
    groups: tuple[Group, ...] = ()  # overrides for parts of the weights
    clip: Natural = 1.0  # largest global gradient norm; 0: no clipping

    @model_validator(mode="after")
    def _one_group_each(self) -> Self:
        parts = [group.of for group in self.groups]
        for part in parts:
            if parts.count(part) > 1:
                raise ValueError(f"{parts.count(part)} groups are of {part}; say all of it in one")
        return self

    def rates(self, part: Part | None) -> Rates:
        """Rate and decay of the weights of ``part``; None: weights that no group can name."""
        group = next((group for group in self.groups if group.of == part), None)
        usual = 0.0 if part == "vectors" else self.weight_decay
        if group is None:
            return Rates(1.0, usual)
        return Rates(group.rate, usual if group.weight_decay is None else group.weight_decay)


class LearningRate(Record):
    """Linear warm-up to ``peak``, then constant, cosine, or WSD (stable, then linear decay) to ``floor`` x peak."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"  # shape after the warm-up; wsd: constant, then linear decay
    peak: Positive = 3e-4  # rate after the warm-up
    floor: float = Field(0.1, ge=0, le=1)  # final rate as a share of ``peak``
    warmup_steps: int = Field(0, ge=0, le=2**40)  # steps of the linear warm-up
    decay_steps: Steps | None = None  # only wsd; None: a fifth of the run


class Ramp(Record):
    """Batch-size ramp-up from ``first`` sequences in increments of ``step`` to the global batch.

    ``every``: optimizer steps per size; ``samples``: sequences over which the sizes are evenly spread, as Megatron-LM's
    ``--rampup-batch-size first step samples`` (NVIDIA/Megatron-LM:megatron/core/num_microbatches_calculator.py).
    """

    first: Sequences  # sequences of the first batch
    step: Sequences  # sequences by which the batch grows
    every: Steps | None = None  # optimizer steps at each size; give this or ``samples``
    samples: Steps | None = None  # sequences over which the sizes are evenly spread

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.every is None) == (self.samples is None):
            raise ValueError("say either every (steps of one size) or samples (until the batch is whole)")
        return self

    def sizes(self, whole: int) -> range:
        """The batch sizes before the ``whole`` batch, in sequences."""
        return range(self.first, whole, self.step)

    def size(self, taken: int, *, whole: int) -> int:
        """Size of the batch read after ``taken`` sequences; depends on these only, not on the step."""
        if self.samples is not None:
            grown = taken * len(self.sizes(whole)) // self.samples
            return whole if taken >= self.samples else self.first + self.step * grown
        for size in self.sizes(whole):
            if taken < size * (self.every or 1):
                return size
            taken -= size * (self.every or 1)
        return whole
