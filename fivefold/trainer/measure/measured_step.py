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

    ``kept_bytes``: peak of activations saved for the backward; ``peak_cause``: phase and operation of the peak;
    ``host_peak_bytes``: peak of offloaded tensors.
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
    host_peak_bytes: int = 0


def list_live_tensors(built: Built) -> list[Tensor]:
    """List every persistent tensor on the device: weights, moments, rotary tables, biases and loads of routing."""
    return [*built.weights(), *_list_device_moments(built), *built.module.tables, *built.buffers()]


def _list_device_moments(built: Built) -> list[Tensor]:
    return [] if built.host_tensors() else built.moments()


def measure(meter: Meter, *, built: Built, kept_bytes: int) -> MeasuredStep:
    """Read ``meter``; call it after the update and before ``zero_grad``, while the gradients are allocated."""
    gradients = [gradient for unit in built.units if (gradient := unit.gradients.reduced) is not None]
    return MeasuredStep(
        parameters=built.parameters,
        parameters_bytes=sum(tensor.untyped_storage().nbytes() for tensor in built.weights()),
        gradients_bytes=sum(tensor.untyped_storage().nbytes() for tensor in gradients),
        optimizer_bytes=sum(tensor.nbytes for tensor in _list_device_moments(built)),
        kept_bytes=kept_bytes,
        peak_bytes=torch.cuda.max_memory_allocated() if built.ranks.device.type == "cuda" else meter.peak_bytes,
        peak_cause=meter.peak_cause,
        flops=meter.flops,
        traffic=meter.traffic,
        host_peak_bytes=meter.host_peak_bytes,
    )
