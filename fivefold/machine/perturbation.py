"""Scale the speed of a machine's kernels or network by factors, along with its measured points."""

from __future__ import annotations

from fivefold.machine.spec import Calibration, Machine


def with_kernels(machine: Machine, *, speed: float) -> Machine:
    """Return ``machine`` with kernels that take 1 / ``speed`` of the time."""
    chip, known = machine.chip, machine.calibration
    faster = chip.replace(
        peak_flops={dtype: rate * speed for dtype, rate in chip.peak_flops.items()},
        flops_per_joule={dtype: rate * speed for dtype, rate in chip.flops_per_joule.items()},
        memory_bandwidth=chip.memory_bandwidth * speed,
    )
    return machine.replace(chip=faster, calibration=None if known is None else _scale_speed(known, speed))


def with_network(machine: Machine, *, bandwidth: float = 1.0, latency: float = 1.0) -> Machine:
    """Return ``machine`` with bandwidth and latency between nodes multiplied by the given factors."""
    links = tuple(
        link
        if link.span <= machine.ranks_per_node
        else link.replace(
            bandwidth=link.bandwidth * bandwidth,
            latency_seconds=link.latency_seconds * latency,
            reduction_bandwidth=link.reduction_bandwidth and link.reduction_bandwidth * bandwidth,
        )
        for link in machine.links
    )
    known = machine.calibration
    if known is not None:
        points = (
            point if point.nodes == 1 else point.replace(seconds=point.seconds / bandwidth)
            for point in known.collectives
        )
        known = known.replace(collectives=tuple(points))
    return machine.replace(links=links, calibration=known)


def _scale_speed(known: Calibration, speed: float) -> Calibration:
    """Return the calibration with all compute ``speed`` times as fast; messages stay as they are."""
    points = {
        name: tuple(point.replace(seconds=point.seconds / speed) for point in getattr(known, name))
        for name in ("matmuls", "kernels", "updates")
    }
    passes = ("forward_seconds", "backward_seconds")
    points |= {
        name: tuple(
            point.replace(**{field: getattr(point, field) / speed for field in fields})
            for point in getattr(known, name)
        )
        for name, fields in (("attentions", passes), ("units", (*passes, "weight_seconds")))
    }
    return known.replace(**points)
