"""Optimizer settings as records: update rule, parameter groups, learning-rate schedule, batch-size ramp-up."""

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
# adamw8bit: elements per scale, and elements of the smallest quantized weight (bitsandbytes: arXiv:2110.02861)
QUANTISED_BLOCK, QUANTISED_LEAST = 256, 4096


def is_quantized(numel: int, *, vector: bool) -> bool:
    """Tell whether adamw8bit keeps 8-bit moments for a full weight of ``numel`` elements."""
    return not vector and numel >= QUANTISED_LEAST


ADAPTERS_ARE_A_FIELD = (
    "adapters over frozen or quantized weights are the field adapter: lora:16, qlora:16, dora:16, or a table of kind, "
    "rank, alpha, dropout, targets and base"
)
# what PyTorch, Megatron-LM and Hugging Face call fields of a job
SPELLINGS = {
    "lr": "learning_rate.peak", "min_lr": "learning_rate.floor", "warmup": "learning_rate.warmup_steps",
    "lr_scheduler_type": "learning_rate.kind", "beta": "optimizer.betas", "eps": "optimizer.epsilon",
    "clip_grad": "optimizer.clip", "max_grad_norm": "optimizer.clip",
    "gbs": "global_batch", "batch_size": "global_batch", "seq": "sequence", "max_length": "sequence",
}  # fmt: skip
NOT_SUPPORTED = {
    **dict.fromkeys(("lora", "dora", "adapter", "peft", "quantiz", "load_in_", "bnb"), ADAPTERS_ARE_A_FIELD),
    **dict.fromkeys(
        ("gradient_accumulation", "grad_accum"),
        "gradients are accumulated over global_batch / (dp · mbs) micro-batches: set --gbs, and mbs in the layout",
    ),
    "checkpointing": "recomputation is ac in the layout, such as 'dp8 ac=full'",
    **dict.fromkeys(("micro_batch", "mbs", "per_device"), "the micro-batch is mbs in the layout, such as 'dp8 mbs2'"),
}


class Group(Record):
    """A parameter group: overrides for one kind of weights."""

    of: Part  # kind of weights
    rate: Natural = 1.0  # factor on the learning rate
    weight_decay: Natural | None = None  # None: that of the optimizer; 0 for vectors


class Rates(NamedTuple):
    """The factor on the learning rate and the weight decay of one weight."""

    rate: float
    weight_decay: float


class Optimizer(Record):
    """The update rule and its settings.

    ``weight_decay`` applies to all weights but vectors (norms and biases), unless a group overrides it.
    """

    kind: Kind = "adamw"  # update rule
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # for adamw, also for the weights that muon leaves to adamw
    momentum: Beta = 0.95  # for sgd and muon
    epsilon: Positive = 1e-8  # added to the denominator of the update
    weight_decay: Natural = 0.1  # decoupled; not applied to norms and biases, unless a group names them
    groups: tuple[Group, ...] = ()  # overrides for kinds of weights
    clip: Natural = 1.0  # largest global gradient norm; 0: no clipping

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        parts = [group.of for group in self.groups]
        for part in parts:
            if parts.count(part) > 1:
                raise ValueError(f"{parts.count(part)} groups are of {part}; put their settings into one")
        return self

    def reset_unused(self) -> Self:
        """Return the optimizer with the default of each setting that its update does not read."""
        unused = ("betas", "epsilon") if self.kind == "sgd" else () if self.kind == "muon" else ("momentum",)
        return self.model_copy(update={name: type(self).model_fields[name].default for name in unused})

    def rates(self, part: Part | None) -> Rates:
        """Return learning-rate factor and weight decay of weights of ``part``; None: those that no group can name."""
        group = next((group for group in self.groups if group.of == part), None)
        default_decay = 0.0 if part == "vectors" else self.weight_decay
        if group is None:
            return Rates(1.0, default_decay)
        return Rates(group.rate, default_decay if group.weight_decay is None else group.weight_decay)


class LearningRate(Record):
    """Linear warm-up to ``peak``, then constant, cosine, or WSD (stable, then linear decay) to ``floor`` x peak."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"  # shape after the warm-up; wsd: constant, then linear decay
    peak: Positive = 3e-4  # rate after the warm-up
    floor: float = Field(0.1, ge=0, le=1)  # final rate as a share of ``peak``
    warmup_steps: int = Field(0, ge=0, le=2**40)  # steps of the linear warm-up
    decay_steps: Steps | None = None  # only wsd; None: a fifth of the run


class Ramp(Record):
    """Batch-size ramp-up from ``first`` sequences in increments of ``step`` to the global batch.

    Either ``every`` optimizer steps, or evenly over ``samples`` sequences, as Megatron-LM's ``--rampup-batch-size first
    step samples`` (NVIDIA/Megatron-LM:megatron/core/num_microbatches_calculator.py).
    """

    first: Sequences  # sequences in the first batch
    step: Sequences  # sequences by which the batch grows
    every: Steps | None = None  # optimizer steps at each size; give this or ``samples``
    samples: Steps | None = None  # sequences over which the sizes are evenly spread

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if (self.every is None) == (self.samples is None):
            raise ValueError(
                "give either every (optimizer steps at each size) or "
                "samples (sequences until the global batch is reached)"
            )
        return self

    def sizes(self, full_batch: int) -> range:
        """Return the batch sizes before the final batch size ``full_batch``, in sequences."""
        return range(self.first, full_batch, self.step)

    def size(self, taken: int, *, full_batch: int) -> int:
        """Return the batch size after ``taken`` sequences; it depends on these only, not on the step."""
        if self.samples is not None:
            increments = taken * len(self.sizes(full_batch)) // self.samples
            return full_batch if taken >= self.samples else self.first + self.step * increments
        for size in self.sizes(full_batch):
            if taken < size * (self.every or 1):
                return size
            taken -= size * (self.every or 1)
        return full_batch
