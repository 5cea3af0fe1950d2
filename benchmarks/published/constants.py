"""The registry of the planner's constants: value, bounds, the published sources on which it was set, how it is varied.

``set_on``: sources whose rows or measured kernels the value was chosen by; ``ALL``: an estimate, made with every score
in sight; (): a data sheet, a paper or kernels of somebody whose runs are not scored. ``between``: what is known
without those sources, in the constant's unit, of a table as factors. In words: docs/how-a-step-costs/constants.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from fivefold.machine import kernel_efficiency, spec
from fivefold.machine.catalog import NIC_200, NVLINK3, PCIE4
from fivefold.machine.spec import Chip, Machine
from fivefold.planner.counts.memory import allocator
from fivefold.planner.time import compute, data_parallel, network, roofline, timeline, unit_time
from fivefold.units import MIB

Change = Callable[[Machine, float], Machine]
ALL = ("*",)
AMPERE, HOPPER, BLACKWELL = ("a100",), ("h100", "h200", "h800", "gh200"), ("b200", "b300", "gb200", "gb300")
DGXC, BRIDGE, SIMUMAX = ("dgxc_benchmarking",), ("megatron_bridge_perf",), ("simumax_b200",)


class Constant(NamedTuple):
    """``machine`` varies a figure that the catalog gives each chip or link; without it the module's is varied."""

    name: str
    value: Any
    between: tuple[float, float]
    machine: Change | None = None
    scale: Callable[[Any, float], Any] | None = None  # of a module's constant, where not every number of it is varied
    set_on: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[float, float]:
        """The bounds as factors of the value."""
        low, high = self.between
        table = isinstance(self.value, dict | tuple)
        return (low, high) if table else (low / self.value, high / self.value)

    @property
    def whole(self) -> bool:
        """Whether only whole numbers make sense of it."""
        return isinstance(self.value, int)

    def set_without(self, source: str) -> bool:
        """Whether the value stands as it is when ``source`` is left out."""
        return source not in self.set_on and self.set_on != ALL


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


def times(value: Any, factor: float) -> Any:
    """A number, or every number of a table, times ``factor``."""
    if isinstance(value, dict):
        return {key: times(each, factor) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(times(each, factor) for each in value)
    return value * factor


def on_machine(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """``machine`` with its figures among the constants times ``factors`` (by name)."""
    for constant in CONSTANTS:
        if constant.machine is not None and (factor := factors.get(constant.name, 1.0)) != 1.0:
            machine = constant.machine(machine, factor)
    return machine


@contextmanager
def scaled(factors: Mapping[str, float]) -> Iterator[None]:
    """The modules' constants times ``factors`` (by name), wherever they were imported to, until the block ends."""
    ours = [each for name, each in list(sys.modules.items()) if name.startswith("fivefold.") and name != __name__]
    held = [
        (module, constant.name, constant.value, (constant.scale or times)(constant.value, factor))
        for constant in (*CONSTANTS, *OF_MEMORY)
        if constant.machine is None and (factor := factors.get(constant.name, 1.0)) != 1.0
        for module in ours
        if vars(module).get(constant.name) is constant.value
    ]
    try:
        for module, name, value, new in held:
            setattr(module, name, round(new) if isinstance(value, int) else new)
        yield
    finally:
        for module, name, value, _ in held:
            setattr(module, name, value)


def _default(field: str) -> Any:
    return Chip.model_fields[field].default


def _of_chip(field: str, between: tuple[float, float], **more: Any) -> Constant:
    return Constant(field, _default(field), between, _chip(field), **more)


def _of_joule(name: str, table: Mapping[Any, float], chips: tuple[str, ...], dtype: str, **more: Any) -> Constant:
    return Constant(f'{name}["{dtype}"]', table[dtype], machine=_joule(chips, dtype), **more)


A100, H100, B200 = kernel_efficiency.A100, kernel_efficiency.H100, kernel_efficiency.B200

CONSTANTS: tuple[Constant, ...] = (
    _of_chip("launch_seconds", (7e-6, 80e-6), set_on=("vtrain",)),
    Constant("COMPILED_HOST", unit_time.COMPILED_HOST, (0.05, 1.0), set_on=("torchtitan", "kempnerforge")),
    Constant("EVENNESS", unit_time.EVENNESS, (3.0, 8.0), set_on=("vtrain",)),
    Constant("CONTENTION", unit_time.CONTENTION, (0.02, 0.3), set_on=ALL),
    _of_joule("AMPERE_JOULE", kernel_efficiency.AMPERE_JOULE, AMPERE, "bf16",
              between=(0.54e12, 0.65e12), set_on=ALL),
    _of_joule("HOPPER_JOULE", kernel_efficiency.HOPPER_JOULE, HOPPER, "bf16", between=(0.85e12, 1.06e12), set_on=DGXC),
    _of_joule("HOPPER_JOULE", kernel_efficiency.HOPPER_JOULE, HOPPER, "fp8", between=(1.4e12, 1.9e12), set_on=DGXC),
    _of_joule("BLACKWELL_JOULE", kernel_efficiency.BLACKWELL_JOULE, BLACKWELL, "bf16",
              between=(1.0e12, 1.3e12), set_on=SIMUMAX + BRIDGE),
    _of_joule("BLACKWELL_JOULE", kernel_efficiency.BLACKWELL_JOULE, BLACKWELL, "fp8",
              between=(2.0e12, 2.8e12), set_on=BRIDGE),
    _of_joule("BLACKWELL_JOULE", kernel_efficiency.BLACKWELL_JOULE, BLACKWELL, "fp4",
              between=(3e12, 6e12), set_on=BRIDGE),
    Constant("SUSTAINED", kernel_efficiency.SUSTAINED, (0.84, 0.99), _chip("matmul_share")),
    Constant("MATMUL_SHARE", spec.MATMUL_SHARE, (0.5, 0.85)),
    _of_chip("bandwidth_share", (0.75, 0.95)),
    Constant("A100.bandwidth_share", A100.bandwidth_share, (0.8, 0.9), _chip("bandwidth_share", chips=AMPERE)),
    Constant("H100.bandwidth_share", H100.bandwidth_share, (0.8, 0.94), _chip("bandwidth_share", chips=HOPPER),
             set_on=ALL),
    Constant("B200.bandwidth_share", B200.bandwidth_share, (0.75, 0.95), _chip("bandwidth_share", chips=BLACKWELL),
             set_on=ALL),
    _of_chip("attention_share", (0.65, 0.9)),
    _of_chip("attention_backward_share", (0.6, 0.8)),
    Constant("B200.attention_share", B200.attention_share, (0.7, 0.9), _chip("attention_share", chips=BLACKWELL),
             set_on=SIMUMAX),
    Constant("B200.attention_backward_share", B200.attention_backward_share, (0.6, 0.85),
             _chip("attention_backward_share", chips=BLACKWELL), set_on=SIMUMAX),
    Constant("H100.flash2_share", H100.flash2_share, (0.5, 0.75), _chip("flash2_share", chips=HOPPER)),
    Constant("B200.flash2_share", B200.flash2_share, (0.34, 0.42), _chip("flash2_share", chips=BLACKWELL)),
    Constant("UNALIGNED", roofline.UNALIGNED, (0.7, 1.4)),
    Constant("KERNEL_SECONDS", roofline.KERNEL_SECONDS, (2e-6, 5e-6)),
    Constant("FILL_SECONDS", roofline.FILL_SECONDS, (0.5e-6, 2e-6)),
    Constant("UNEVEN", roofline.UNEVEN, (0.05, 1.0)),
    Constant("TILES", roofline.TILES, (0.8, 1.1), scale=_smaller_tiles),
    Constant("ROWS", roofline.ROWS, (8.0, 128.0)),
    Constant("DIAGONAL", roofline.DIAGONAL, (100.0, 600.0)),
    Constant("DIAGONAL_BACKWARD", roofline.DIAGONAL_BACKWARD, (100.0, 800.0)),
    Constant("FLASH1_SHARE", roofline.FLASH1_SHARE, (0.5, 0.77)),
    Constant("SOFTMAX_DIM", roofline.SOFTMAX_DIM, (20.0, 64.0)),
    Constant("PLAIN_KERNELS", compute.PLAIN_KERNELS, (0.67, 1.33)),
    Constant("PLAIN_BYTES", compute.PLAIN_BYTES, (0.75, 1.25)),
    Constant("HIDDEN_SUMS", compute.HIDDEN_SUMS, (0.3, 0.65), set_on=SIMUMAX),
    Constant("SCATTERED_BYTES", compute.SCATTERED_BYTES, (2.0, 5.0), set_on=SIMUMAX),
    Constant("LOSS_RATE", compute.LOSS_RATE, (10e9, 25e9), set_on=SIMUMAX),
    Constant("MOE_KERNELS", compute.MOE_KERNELS, (0.5, 2.0), set_on=BRIDGE),
    Constant("BIAS_BYTES", compute.BIAS_BYTES, (0.75, 1.25)),
    Constant("EXPERT_KERNELS", compute.EXPERT_KERNELS, (0.5, 2.0), set_on=SIMUMAX),
    Constant("EXPERTS_PER_LAUNCH", compute.EXPERTS_PER_LAUNCH, (1.0, 16.0), set_on=ALL),
    Constant("LAUNCH_SECONDS", network.LAUNCH_SECONDS, (10e-6, 30e-6)),
    Constant("BULK_STEP_SECONDS", network.BULK_STEP_SECONDS, (5e-6, 12e-6), set_on=SIMUMAX),
    Constant("QUICK_SHARE", network.QUICK_SHARE, (0.4, 0.6)),
    Constant("FILLED", network.FILLED, (0.8, 1.1)),
    Constant("CROWDING", network.CROWDING, (0.005, 0.05)),
    Constant("PART_SECONDS", data_parallel.PART_SECONDS, (6e-6, 15e-6)),
    Constant("GATHER_ONE_WAY", network.GATHER_ONE_WAY, (1.0, 2.0)),
    Constant("EXCHANGE_ONE_WAY", network.EXCHANGE_ONE_WAY, (1.0, 2.0)),
    Constant("near latency", NVLINK3.latency_seconds, (2e-6, 5e-6), _link(0, "latency_seconds")),
    Constant("far latency", NIC_200.latency_seconds, (3e-6, 8e-6), _link(-1, "latency_seconds")),
    Constant("near sustained", PCIE4.sustained, (0.6, 0.9), _link(0, "sustained")),
    Constant("far sustained", NIC_200.sustained, (0.8, 0.97), _link(-1, "sustained")),
    Constant("HOST_LINK", timeline.HOST_LINK, (0.6, 0.9)),
    Constant("HOST_BANDWIDTH", timeline.HOST_BANDWIDTH, (16e9, 64e9)),
    Constant("HOST_MEMORY", timeline.HOST_MEMORY, (20e9, 80e9)),
)  # fmt: skip

OF_MEMORY: tuple[Constant, ...] = (
    Constant("CONTEXT_BYTES", allocator.CONTEXT_BYTES, (300 * MIB, 1600 * MIB), set_on=("bloom_prequel",)),
    Constant("COMMUNICATOR_BYTES", allocator.COMMUNICATOR_BYTES, (32 * MIB, 256 * MIB), set_on=ALL),
    Constant("SPLIT_LATER", allocator.SPLIT_LATER, (1, 4), set_on=ALL),
    Constant("BUCKET_ELEMENTS", allocator.BUCKET_ELEMENTS, (5e8, 5e8)),
    Constant("UNRECLAIMABLE", allocator.UNRECLAIMABLE, (0.1, 1.25)),
)
