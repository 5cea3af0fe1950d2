"""The bytes that weights and optimizer states take at least: a lower bound of the ranks that hold them."""

from __future__ import annotations

from fivefold.job import Job
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model


def bound_ranks(model: Model, machine: Machine, job: Job) -> float:
    """Return a lower bound of the ranks whose memory holds the model's states."""
    return count_least_state_bytes(model, job) / machine.chip.memory_bytes


def count_least_state_bytes(model: Model, job: Job) -> float:
    """Return the bytes that weights and optimizer states take at least on the devices of all ranks together."""
    precision = job.precision
    offloads_weights = "parameters" in job.offload
    if offloads_weights and job.stack.offloads_with_parameters:
        return 0
    held: float = 0 if offloads_weights else precision.weights_bytes  # of a parameter, over all ranks at least
    if job.optimizer.kind == "adamw" and "optimizer" not in job.offload:
        held += precision.master_bytes + sum(precision.moments_bytes)
    if job.freezes_text:  # frozen weights have no states, and in four bits half a byte
        held = job.base_format.bits / 8 if job.base_format else job.activation_bytes
        held *= not offloads_weights
    return model.parameters * held
