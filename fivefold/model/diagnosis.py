"""What the doctor finds of a training step of any module, as records: memory at its peak, FLOPs by module, advice.

    parameters + buffers + gradients + optimizer + inputs + activations + temporary = peak

``check/doctor`` fills them, ``show/doctor.py`` prints them; docs/doctor.md explains them.
"""

from __future__ import annotations

import re

from pydantic import NonNegativeInt, PositiveInt

from fivefold.record import Record

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "temporary")


def like(path: str) -> str:
    """What like modules share: ``layers.3.mlp`` is a ``layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


class Holding(Record):
    """Tensors of one size from one line that live at the peak, in like modules (``layers.*.mlp``)."""

    bytes: PositiveInt  # of each
    number: PositiveInt
    category: str
    name: str  # of parameters and what belongs to them the parameter, else the module; "" outside of all
    line: str  # file:line function
    operation: str  # such as aten::mm

    @property
    def all_bytes(self) -> int:
        """Of all of them."""
        return self.bytes * self.number


class Fullest(Record):
    """The fullest moment of one step, by category, and what caused it."""

    parameters_bytes: NonNegativeInt = 0
    buffers_bytes: NonNegativeInt = 0
    gradients_bytes: NonNegativeInt = 0
    optimizer_bytes: NonNegativeInt = 0
    inputs_bytes: NonNegativeInt = 0  # and all that is no state but lives from step to step
    activations_bytes: NonNegativeInt = 0  # made by a forward, let go later
    temporary_bytes: NonNegativeInt = 0
    phase: str  # forward, backward, recompute, update
    module: str
    line: str
    operation: str
    largest: tuple[Holding, ...]

    @property
    def peak_bytes(self) -> int:
        """All that lives at once."""
        return sum(getattr(self, f"{category}_bytes") for category in CATEGORIES)


class Part(Record):
    """What one module does and keeps in one step, with all that is inside of it."""

    module: str  # as in named_modules; "" is the whole
    kind: str  # its class
    parameters: NonNegativeInt
    forward_flops: NonNegativeInt
    backward_flops: NonNegativeInt
    recomputed_flops: NonNegativeInt
    kept_bytes: NonNegativeInt  # activations, made in it and kept for the backward, of one micro-batch


class Advice(Record):
    """Which modules to recompute so that the step fits the budget, with the least extra work."""

    budget_bytes: PositiveInt
    fits: bool
    modules: tuple[str, ...]  # to wrap in torch.utils.checkpoint; none: as it is
    predicted_peak_bytes: NonNegativeInt  # from the tape of the step as it is
    peak_bytes: NonNegativeInt  # of the step examined again with these modules wrapped
    extra_flops: NonNegativeInt
    extra_share: float  # of the FLOPs of the step as it is
    refused: tuple[str, ...] = ()  # modules that cannot be run twice, and why
    reason: str = ""  # why not less, where it does not fit


class Diagnosis(Record):
    """Two steps of one's own module: the first, in which the optimizer makes its states, and every later one."""

    model: str  # class
    optimizer: str
    parameters: NonNegativeInt
    trainable: NonNegativeInt
    parameters_bytes: NonNegativeInt  # of all of a kind, whenever it lives
    gradients_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt
    kept_bytes: NonNegativeInt  # activations, at the end of a forward
    first: Fullest
    steady: Fullest
    forward_flops: NonNegativeInt
    backward_flops: NonNegativeInt
    recomputed_flops: NonNegativeInt
    parts: tuple[Part, ...]
    remarks: tuple[str, ...]
    advice: Advice | None = None

    @property
    def peak_bytes(self) -> int:
        """Of the fuller of the two steps."""
        return max(self.first.peak_bytes, self.steady.peak_bytes)
