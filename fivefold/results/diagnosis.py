"""Results of ``fivefold doctor`` on any module's training step: peak memory by category, FLOPs by module, advice.

    parameters + buffers + gradients + optimizer + inputs + activations + temporary = peak

``diagnosis/doctor`` fills them, ``rendering/doctor.py`` prints them; docs/how-to/doctor.md explains them.
"""

from __future__ import annotations

import re

from pydantic import NonNegativeInt, PositiveInt

from fivefold.record import Record
from fivefold.step import Traffic

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "temporary")


def generalize_path(path: str) -> str:
    """Return the pattern that repeated modules share: ``layers.3.mlp`` → ``layers.*.mlp``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


class Holding(Record):
    """Tensors live at the peak that share size, source line and repeated module (``layers.*.mlp``)."""

    bytes: PositiveInt  # of each
    number: PositiveInt
    category: str
    name: str  # of a parameter, its gradient and state: the parameter; else the module; "" outside
    line: str  # file:line function
    operation: str  # such as aten::mm

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all these tensors together."""
        return self.bytes * self.number


class Fullest(Record):
    """Live bytes at the memory peak of one step, by category, and where the peak occurs."""

    parameters_bytes: NonNegativeInt = 0
    buffers_bytes: NonNegativeInt = 0
    gradients_bytes: NonNegativeInt = 0
    optimizer_bytes: NonNegativeInt = 0
    inputs_bytes: NonNegativeInt = 0  # and other tensors that live from step to step
    activations_bytes: NonNegativeInt = 0  # allocated in a forward, freed after it
    temporary_bytes: NonNegativeInt = 0
    phase: str  # forward, backward, recompute, update
    module: str
    line: str
    operation: str
    largest: tuple[Holding, ...]

    @property
    def peak_bytes(self) -> int:
        """Return the sum of all categories, in bytes."""
        return sum(getattr(self, f"{category}_bytes") for category in CATEGORIES)


class ModuleCost(Record):
    """FLOPs and saved activations of one module in one step, its submodules included."""

    module: str  # name as in named_modules; "": the full model
    kind: str  # class name
    parameters: NonNegativeInt
    forward_flops: NonNegativeInt
    backward_flops: NonNegativeInt
    recomputed_flops: NonNegativeInt
    kept_bytes: NonNegativeInt  # activations saved in it for the backward, of one micro-batch


class Advice(Record):
    """The modules to recompute so that the step fits the budget with the fewest extra FLOPs."""

    budget_bytes: PositiveInt
    fits: bool
    modules: tuple[str, ...]  # to wrap in torch.utils.checkpoint; may be empty
    predicted_peak_bytes: NonNegativeInt  # from the recorded allocations of the unchanged step
    peak_bytes: NonNegativeInt  # measured again with these modules wrapped
    extra_flops: NonNegativeInt
    extra_share: float  # of the FLOPs of the unchanged step
    not_recomputable: tuple[str, ...] = ()  # modules that cannot be recomputed, and why
    reason: str = ""  # if it does not fit: what keeps the peak up


class Cost(Record):
    """A variant of the module, named by ``what``, and what one rank holds, computes and sends in a step of it."""

    variant: str
    ranks: PositiveInt
    peak_bytes: NonNegativeInt
    parameters_bytes: NonNegativeInt
    gradients_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt
    kept_bytes: NonNegativeInt  # at the start of a backward pass, beyond the states
    flops: NonNegativeInt
    traffic: tuple[Traffic, ...]

    @property
    def states_bytes(self) -> int:
        """Return the bytes of parameters, gradients and optimizer moments."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


class Diagnosis(Record):
    """Two steps of a user's module: the first, in which the optimizer allocates its states, and a later one."""

    model: str  # class name
    optimizer: str
    parameters: NonNegativeInt
    trainable: NonNegativeInt
    parameters_bytes: NonNegativeInt  # total of all parameters (below: gradients, states), whenever live
    gradients_bytes: NonNegativeInt
    optimizer_bytes: NonNegativeInt
    kept_bytes: NonNegativeInt  # activations at the end of a forward
    first: Fullest
    steady: Fullest
    forward_flops: NonNegativeInt
    backward_flops: NonNegativeInt
    recomputed_flops: NonNegativeInt
    parts: tuple[ModuleCost, ...]
    remarks: tuple[str, ...]
    advice: Advice | None = None
    costs: tuple[Cost, ...] = ()  # sharded or recomputed variants; the first is the unchanged module

    @property
    def peak_bytes(self) -> int:
        """Return the higher peak of the two steps, in bytes."""
        return max(self.first.peak_bytes, self.steady.peak_bytes)
