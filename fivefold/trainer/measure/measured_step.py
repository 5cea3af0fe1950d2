"""Results of the metered step on one rank: bytes by kind, FLOPs, messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.step import Traffic
from fivefold.trainer.build import Built
from fivefold.trainer.measure.meter import Meter


@dataclass(frozen=True)
class MeasuredStep:
    """The bytes, FLOPs and messages of this rank in the metered step. Bytes are of storages.

    ``kept_bytes``: peak of activations saved for the backward; ``peak_cause``: phase and operation of the peak.
    """

    parameters: float  # this rank's share of the model: a parameter that n ranks hold counts 1/n on each
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    peak_bytes: int
    peak_cause: str
    flops: int
    traffic: tuple[Traffic, ...]


def list_live_tensors(built: Built) -> list[Tensor]:
    """List every persistent tensor: weights, moments, rotary tables, biases and loads of routing."""
    return [*built.weights(), *built.moments(), *built.module.tables, *built.buffers()]


def measure(meter: Meter, *, built: Built, kept_bytes: int) -> MeasuredStep:
    """Read ``meter``; call it after the update and before ``zero_grad``, while the gradients are allocated."""
    gradients = [gradient for unit in built.units if (gradient := unit.gradients.reduced) is not None]
    return MeasuredStep(
        parameters=built.parameters,
        parameters_bytes=sum(tensor.untyped_storage().nbytes() for tensor in built.weights()),
        gradients_bytes=sum(tensor.untyped_storage().nbytes() for tensor in gradients),
        optimizer_bytes=sum(tensor.nbytes for tensor in built.moments()),
        kept_bytes=kept_bytes,
        peak_bytes=torch.cuda.max_memory_allocated() if built.ranks.device.type == "cuda" else meter.peak_bytes,
        peak_cause=meter.peak_cause,
        flops=meter.flops,
        traffic=meter.traffic,
    )
