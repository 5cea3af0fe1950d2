"""A machine whose kernels or links are quicker or slower than its figures say; measured points move with them."""

from __future__ import annotations

from fivefold.machine.spec import Calibration, Machine


def with_kernels(machine: Machine, *, speed: float) -> Machine:
    """``machine`` with kernels that take 1 / ``speed`` of the time."""
    chip, known = machine.chip, machine.calibration
    faster = chip.replace(
        peak_flops={dtype: rate * speed for dtype, rate in chip.peak_flops.items()},
        flops_per_joule={dtype: rate * speed for dtype, rate in chip.flops_per_joule.items()},
        memory_bandwidth=chip.memory_bandwidth * speed,
    )
    return machine.replace(chip=faster, calibration=None if known is None else _quicker(known, speed))


def with_network(machine: Machine, *, bandwidth: float = 1.0, latency: float = 1.0) -> Machine:
    """``machine`` with so many times the bandwidth and the latency between nodes."""
    links = tuple(
        link
        if link.span <= machine.ranks_per_node
        else link.replace(
            bandwidth=link.bandwidth * bandwidth, latency_seconds=link.latency_seconds * latency,
            reduction_bandwidth=link.reduction_bandwidth and link.reduction_bandwidth * bandwidth,
        )
        for link in machine.links
    )  # fmt: skip
    known = machine.calibration
    if known is not None:
        points = (
            each if each.nodes == 1 else each.replace(seconds=each.seconds / bandwidth) for each in known.collectives
        )
        known = known.replace(collectives=tuple(points))
    return machine.replace(links=links, calibration=known)


def _quicker(known: Calibration, speed: float) -> Calibration:
    points = {
        name: tuple(each.replace(seconds=each.seconds / speed) for each in getattr(known, name))
        for name in ("matmuls", "kernels", "updates")
    }
    ways = ("forward_seconds", "backward_seconds")
    points |= {
        name: tuple(
            each.replace(**{way: getattr(each, way) / speed for way in fields}) for each in getattr(known, name)
        )
        for name, fields in (("attentions", ways), ("units", (*ways, "weight_seconds")))
    }
    return known.replace(**points)
