"""The constants of docs/how-a-step-costs/constants.md, and how each is varied: in its module, or on the machine.

The values are read from the code, so that the document's can be held against them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fivefold.machine import reached, spec
from fivefold.machine.catalog import NIC_200, NVLINK3, PCIE4
from fivefold.machine.spec import Chip, Machine
from fivefold.plan.price import compute, network, roofline, timeline, units

Change = Callable[[Machine, float], Machine]
AMPERE, HOPPER, BLACKWELL = ("a100",), ("h100", "h200", "h800", "gh200"), ("b200", "b300", "gb200", "gb300")


class Constant(NamedTuple):
    """``machine`` varies a figure that the catalog gives each chip or link; without it the module's is varied."""

    name: str
    value: Any
    machine: Change | None = None
    scale: Callable[[Any, float], Any] | None = None  # of a module's constant, where not every number of it is varied


def _joule(chips: tuple[str, ...], dtype: str) -> Change:
    def change(machine: Machine, factor: float) -> Machine:
        chip = machine.chip
        if not chip.name.startswith(chips):
            return machine
        joule = {key: each * (factor if key == dtype else 1) for key, each in chip.flops_per_joule.items()}
        return machine.replace(chip=chip.replace(flops_per_joule=joule))

    return change


def _chip(field: str, *, chips: tuple[str, ...] = ("",)) -> Change:
    def change(machine: Machine, factor: float) -> Machine:
        chip = machine.chip
        if not chip.name.startswith(chips):
            return machine
        value = getattr(chip, field)
        scaled = {key: each * factor for key, each in value.items()} if isinstance(value, dict) else value * factor
        return machine.replace(chip=chip.replace(**{field: scaled}))

    return change


def _link(index: int, field: str) -> Change:
    def change(machine: Machine, factor: float) -> Machine:
        links = list(machine.links)
        value = getattr(links[index], field) * factor
        links[index] = links[index].replace(**{field: min(1.0, value) if field == "sustained" else value})
        return machine.replace(links=tuple(links))

    return change


def _smaller_tiles(tiles: Any, factor: float) -> Any:
    """The speeds of all but the largest tile."""
    return tuple((*tile[:3], tile[3] * (1 if tile[3] == 1 else factor)) for tile in tiles)


def _default(field: str) -> Any:
    return Chip.model_fields[field].default


CONSTANTS: tuple[Constant, ...] = (
    Constant("launch_seconds", _default("launch_seconds"), _chip("launch_seconds")),
    Constant("COMPILED_HOST", units.COMPILED_HOST),
    Constant("EVENNESS", units.EVENNESS),
    Constant("CONTENTION", units.CONTENTION),
    Constant('AMPERE_JOULE["bf16"]', reached.AMPERE_JOULE["bf16"], _joule(AMPERE, "bf16")),
    Constant('HOPPER_JOULE["bf16"]', reached.HOPPER_JOULE["bf16"], _joule(HOPPER, "bf16")),
    Constant('HOPPER_JOULE["fp8"]', reached.HOPPER_JOULE["fp8"], _joule(HOPPER, "fp8")),
    Constant('BLACKWELL_JOULE["bf16"]', reached.BLACKWELL_JOULE["bf16"], _joule(BLACKWELL, "bf16")),
    Constant('BLACKWELL_JOULE["fp8"]', reached.BLACKWELL_JOULE["fp8"], _joule(BLACKWELL, "fp8")),
    Constant('BLACKWELL_JOULE["fp4"]', reached.BLACKWELL_JOULE["fp4"], _joule(BLACKWELL, "fp4")),
    Constant("SUSTAINED", reached.SUSTAINED, _chip("matmul_share")),
    Constant("MATMUL_SHARE", spec.MATMUL_SHARE),
    Constant("bandwidth_share", _default("bandwidth_share"), _chip("bandwidth_share")),
    Constant("A100.bandwidth_share", reached.A100.bandwidth_share, _chip("bandwidth_share", chips=AMPERE)),
    Constant("H100.bandwidth_share", reached.H100.bandwidth_share, _chip("bandwidth_share", chips=HOPPER)),
    Constant("attention_share", _default("attention_share"), _chip("attention_share")),
    Constant("attention_backward_share", _default("attention_backward_share"), _chip("attention_backward_share")),
    Constant("B200.attention_share", reached.B200.attention_share, _chip("attention_share", chips=BLACKWELL)),
    Constant(
        "B200.attention_backward_share",
        reached.B200.attention_backward_share,
        _chip("attention_backward_share", chips=BLACKWELL),
    ),
    Constant("H100.flash2_share", reached.H100.flash2_share, _chip("flash2_share", chips=HOPPER)),
    Constant("KERNEL_SECONDS", roofline.KERNEL_SECONDS),
    Constant("FILL_SECONDS", roofline.FILL_SECONDS),
    Constant("UNEVEN", roofline.UNEVEN),
    Constant("TILES", roofline.TILES, scale=_smaller_tiles),
    Constant("ROWS", roofline.ROWS),
    Constant("DIAGONAL", roofline.DIAGONAL),
    Constant("DIAGONAL_BACKWARD", roofline.DIAGONAL_BACKWARD),
    Constant("FLASH1_SHARE", roofline.FLASH1_SHARE),
    Constant("SOFTMAX_DIM", roofline.SOFTMAX_DIM),
    Constant("PLAIN_KERNELS", compute.PLAIN_KERNELS),
    Constant("PLAIN_BYTES", compute.PLAIN_BYTES),
    Constant("HIDDEN_SUMS", compute.HIDDEN_SUMS),
    Constant("SCATTERED_BYTES", compute.SCATTERED_BYTES),
    Constant("LOSS_RATE", compute.LOSS_RATE),
    Constant("MOE_KERNELS", compute.MOE_KERNELS),
    Constant("BIAS_BYTES", compute.BIAS_BYTES),
    Constant("EXPERT_KERNELS", compute.EXPERT_KERNELS),
    Constant("EXPERTS_PER_LAUNCH", compute.EXPERTS_PER_LAUNCH),
    Constant("LAUNCH_SECONDS", network.LAUNCH_SECONDS),
    Constant("BULK_STEP_SECONDS", network.BULK_STEP_SECONDS),
    Constant("QUICK_SHARE", network.QUICK_SHARE),
    Constant("CROWDING", network.CROWDING),
    Constant("GATHER_ONE_WAY", network.GATHER_ONE_WAY),
    Constant("EXCHANGE_ONE_WAY", network.EXCHANGE_ONE_WAY),
    Constant("near latency", NVLINK3.latency_seconds, _link(0, "latency_seconds")),
    Constant("far latency", NIC_200.latency_seconds, _link(-1, "latency_seconds")),
    Constant("near sustained", PCIE4.sustained, _link(0, "sustained")),
    Constant("far sustained", NIC_200.sustained, _link(-1, "sustained")),
    Constant("HOST_LINK", timeline.HOST_LINK),
    Constant("HOST_BANDWIDTH", timeline.HOST_BANDWIDTH),
    Constant("HOST_MEMORY", timeline.HOST_MEMORY),
)
