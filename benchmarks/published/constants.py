"""The registry of the planner's constants: value, bounds, the published sources on which it was set, how it is varied.

Those of the time model are fields of ``planner/time/constants.py``, those of the allocator of ``AllocatorConstants``;
the others are figures that the catalog gives to a chip or a link, and are varied on the machine's record. ``set_on``
and ``between`` are ``fitted_to`` and ``between`` of ``ConstantInfo``. In words:
docs/explanation/how-a-step-costs/constants.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fivefold.machine import kernel_efficiency, spec
from fivefold.machine.catalog import GRACE_LAUNCH_SECONDS, NIC_200, NVLINK3, PCIE4
from fivefold.machine.spec import WIDENING, Chip, Machine
from fivefold.planner.counts.memory.allocator import AllocatorConstants
from fivefold.planner.time.constants import ALL, PUBLISHED, Constants, describe_constant
from fivefold.units import MIB

Change = Callable[[Machine, float], Machine]
AMPERE, HOPPER, BLACKWELL = ("a100",), ("h100", "h200", "h800", "gh200"), ("b200", "b300", "gb200", "gb300")
GRACE = ("gh200", "gb200", "gb300")
CDNA3, CDNA4 = ("mi300x", "mi325x"), ("mi350x", "mi355x")
BRIDGE, SIMUMAX = ("megatron_bridge_perf",), ("simumax_b200",)


class Constant(NamedTuple):
    """``machine`` varies a figure that the catalog gives a chip or link; without it a field of a record is varied."""

    name: str
    value: Any
    between: tuple[float, float]
    machine: Change | None = None
    scale: Callable[[Any, float], Any] | None = None  # of a field, where not every number of it is varied
    set_on: tuple[str, ...] = ()

    @property
    def factors(self) -> tuple[float, float]:
        """Return the bounds as factors of the value."""
        low, high = self.between
        table = isinstance(self.value, dict | tuple)
        return (low, high) if table else (low / self.value, high / self.value)

    @property
    def is_integer(self) -> bool:
        """Return whether only integers are valid values."""
        return isinstance(self.value, int)

    def is_independent_of(self, source: str) -> bool:
        """Return whether the value stays the same when ``source`` is left out."""
        return source not in self.set_on and self.set_on != ALL


def _joule(chips: tuple[str, ...], dtype: str) -> Change:
    """Return a change of the FLOPs per joule in ``dtype`` of chips whose names begin with one of ``chips``."""

    def change(machine: Machine, factor: float) -> Machine:
        chip = machine.chip
        if not chip.name.startswith(chips):
            return machine
        joule = {key: flops * (factor if key == dtype else 1) for key, flops in chip.flops_per_joule.items()}
        return machine.replace(chip=chip.replace(flops_per_joule=joule))

    return change


def _chip(field: str, *, chips: tuple[str, ...] = ("",)) -> Change:
    """Return a change of a ``field`` of chips whose names begin with one of ``chips``; of all values of a table."""

    def change(machine: Machine, factor: float) -> Machine:
        chip = machine.chip
        if not chip.name.startswith(chips):
            return machine
        value = getattr(chip, field)
        scaled = {key: entry * factor for key, entry in value.items()} if isinstance(value, dict) else value * factor
        return machine.replace(chip=chip.replace(**{field: scaled}))

    return change


def _scale_unmeasured_share(machine: Machine, factor: float) -> Machine:
    """Return ``MATMUL_SHARE``: of the number formats for which a chip has no measurement, nor for a wider one."""
    chip = machine.chip
    shares = {
        dtype: spec.MATMUL_SHARE * factor
        for dtype in WIDENING
        if not set(WIDENING[WIDENING.index(dtype) :]) & set(chip.matmul_share)
    }
    return machine.replace(chip=chip.replace(matmul_share={**shares, **chip.matmul_share}))


def _link(index: int, field: str) -> Change:
    """Return a change of a ``field`` of the link with this index; a sustained share stays at most 1."""

    def change(machine: Machine, factor: float) -> Machine:
        links = list(machine.links)
        value = getattr(links[index], field) * factor
        links[index] = links[index].replace(**{field: min(1.0, value) if field == "sustained" else value})
        return machine.replace(links=tuple(links))

    return change


def _scale_smaller_tiles(tiles: Any, factor: float) -> Any:
    """Return the speeds of all but the largest tile."""
    return tuple((*tile[:3], tile[3] * (1 if tile[3] == 1 else factor)) for tile in tiles)


def times(value: Any, factor: float) -> Any:
    """Return a number, or every number of a table, times ``factor``."""
    if isinstance(value, dict):
        return {key: times(entry, factor) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(times(entry, factor) for entry in value)
    return value * factor


def apply_to_machine(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """Return ``machine`` with its figures among the constants times ``factors`` (by name)."""
    for constant in CONSTANTS:
        if constant.machine is not None and (factor := factors.get(constant.name, 1.0)) != 1.0:
            machine = constant.machine(machine, factor)
    return machine


def scale_constants(factors: Mapping[str, float]) -> Constants:
    """Return the constants of the time model times ``factors`` (by name)."""
    return PUBLISHED.replace(**_changes(CONSTANTS, factors))


def scale_allocator(factors: Mapping[str, float]) -> AllocatorConstants:
    """Return the constants of the allocator times ``factors`` (by name)."""
    return AllocatorConstants()._replace(**_changes(MEMORY_CONSTANTS, factors))


def _changes(constants: tuple[Constant, ...], factors: Mapping[str, float]) -> dict[str, Any]:
    """Return the ``constants`` that are record fields and have a factor other than 1, multiplied by that factor."""
    changed = {}
    for constant in constants:
        if constant.machine is None and (factor := factors.get(constant.name, 1.0)) != 1.0:
            value = (constant.scale or times)(constant.value, factor)
            changed[constant.name] = round(value) if constant.is_integer else value
    return changed


def _default(field: str) -> Any:
    return Chip.model_fields[field].default


def _make_chip_constant(field: str, between: tuple[float, float], **more: Any) -> Constant:
    return Constant(field, _default(field), between, _chip(field), **more)


def _make_time_constant(field: str, **more: Any) -> Constant:
    known = describe_constant(field)
    return Constant(field, getattr(PUBLISHED, field), known.between, set_on=known.fitted_to, **more)


def _make_energy_constant(
    name: str, table: Mapping[Any, float], chips: tuple[str, ...], dtype: str, **more: Any
) -> Constant:
    return Constant(f'{name}["{dtype}"]', table[dtype], machine=_joule(chips, dtype), **more)


A100, H100, B200, B300, MI300X = (
    kernel_efficiency.A100,
    kernel_efficiency.H100,
    kernel_efficiency.B200,
    kernel_efficiency.B300,
    kernel_efficiency.MI300X,
)

CONSTANTS: tuple[Constant, ...] = (
    _make_chip_constant("launch_seconds", (7e-6, 80e-6), set_on=("vtrain",)),
    Constant("GRACE_LAUNCH_SECONDS", GRACE_LAUNCH_SECONDS, (90e-6, 100e-6), _chip("launch_seconds", chips=GRACE)),
    _make_time_constant("compiled_launch_share"),
    _make_time_constant("host_device_exponent"),
    _make_time_constant("hidden_message_slowdown"),
    _make_time_constant("chip_spread"),
    _make_energy_constant("AMPERE_JOULE", kernel_efficiency.AMPERE_JOULE, AMPERE, "bf16",
              between=(0.54e12, 0.65e12), set_on=ALL),
    _make_energy_constant("HOPPER_JOULE", kernel_efficiency.HOPPER_JOULE, HOPPER, "bf16", between=(0.85e12, 1.06e12),
             set_on=ALL),
    _make_energy_constant("HOPPER_JOULE", kernel_efficiency.HOPPER_JOULE, HOPPER, "fp8", between=(1.4e12, 1.9e12),
             set_on=ALL),
    _make_energy_constant("BLACKWELL_JOULE", kernel_efficiency.BLACKWELL_JOULE, BLACKWELL, "bf16",
              between=(1.1e12, 1.35e12)),
    _make_energy_constant("BLACKWELL_JOULE", kernel_efficiency.BLACKWELL_JOULE, BLACKWELL, "fp8",
              between=(2.0e12, 2.8e12), set_on=BRIDGE),
    _make_energy_constant("BLACKWELL_JOULE", kernel_efficiency.BLACKWELL_JOULE, BLACKWELL, "fp4",
              between=(3e12, 6e12), set_on=BRIDGE),
    _make_energy_constant("CDNA3_JOULE", kernel_efficiency.CDNA3_JOULE, CDNA3, "bf16", between=(0.73e12, 0.89e12)),
    _make_energy_constant("CDNA3_JOULE", kernel_efficiency.CDNA3_JOULE, CDNA3, "fp8", between=(1.3e12, 1.62e12)),
    _make_energy_constant("CDNA4_JOULE", kernel_efficiency.CDNA4_JOULE, CDNA4, "bf16", between=(0.95e12, 1.34e12)),
    _make_energy_constant("CDNA4_JOULE", kernel_efficiency.CDNA4_JOULE, CDNA4, "fp8", between=(2.0e12, 2.68e12)),
    Constant("SUSTAINED", kernel_efficiency.SUSTAINED, (0.84, 0.99), _chip("matmul_share")),
    Constant("MATMUL_SHARE", spec.MATMUL_SHARE, (0.5, 0.85), _scale_unmeasured_share),
    _make_chip_constant("bandwidth_share", (0.75, 0.95)),
    Constant("A100.bandwidth_share", A100.bandwidth_share, (0.8, 0.9), _chip("bandwidth_share", chips=AMPERE)),
    Constant("H100.bandwidth_share", H100.bandwidth_share, (0.8, 0.94), _chip("bandwidth_share", chips=HOPPER),
             set_on=ALL),
    Constant("B200.bandwidth_share", B200.bandwidth_share, (0.75, 0.95), _chip("bandwidth_share", chips=BLACKWELL),
             set_on=ALL),
    Constant("MI300X.bandwidth_share", MI300X.bandwidth_share, (0.5, 0.7), _chip("bandwidth_share", chips=CDNA3)),
    _make_chip_constant("attention_share", (0.65, 0.9)),
    _make_chip_constant("attention_backward_share", (0.6, 0.8)),
    Constant("B200.attention_share", B200.attention_share, (0.94, 1.04), _chip("attention_share", chips=BLACKWELL)),
    Constant("B200.attention_backward_share", B200.attention_backward_share, (0.8, 0.89),
             _chip("attention_backward_share", chips=BLACKWELL)),
    Constant("B200.fp8_attention_share", B200.fp8_attention_share, (1.2, 1.55),
             _chip("fp8_attention_share", chips=("b200", "gb200"))),
    Constant("B200.fp8_attention_backward_share", B200.fp8_attention_backward_share, (1.0, 1.65),
             _chip("fp8_attention_backward_share", chips=("b200", "gb200"))),
    Constant("B300.fp8_attention_share", B300.fp8_attention_share, (1.4, 1.6),
             _chip("fp8_attention_share", chips=("b300", "gb300"))),
    Constant("B300.fp8_attention_backward_share", B300.fp8_attention_backward_share, (1.1, 1.45),
             _chip("fp8_attention_backward_share", chips=("b300", "gb300"))),
    Constant("B200.hidden_softmax_dim", B200.hidden_softmax_dim, (90, 115),
             _chip("hidden_softmax_dim", chips=BLACKWELL)),
    Constant("H100.flash2_share", H100.flash2_share, (0.5, 0.75), _chip("flash2_share", chips=HOPPER)),
    Constant("B200.flash2_share", B200.flash2_share, (0.26, 0.33), _chip("flash2_share", chips=BLACKWELL)),
    _make_time_constant("unaligned_shares"),
    _make_time_constant("smallest_kernel_seconds"),
    _make_time_constant("tile_fill_seconds"),
    _make_time_constant("last_wave_loss"),
    _make_time_constant("matmul_tiles", scale=_scale_smaller_tiles),
    _make_time_constant("attention_tail_rows"),
    _make_time_constant("attention_diagonal_keys"),
    _make_time_constant("attention_backward_diagonal_keys"),
    _make_time_constant("attention_block_seconds"),
    _make_time_constant("flash1_shares"),
    _make_time_constant("flash1_triton_share"),
    _make_time_constant("softmax_dim"),
    _make_time_constant("wide_backward_share"),
    _make_time_constant("column_cast_share"),
    _make_time_constant("compiled_norm_share"),
    _make_time_constant("head_norm_block_seconds"),
    _make_time_constant("rowwise_matmul_share"),
    _make_time_constant("block_scales_share"),
    _make_time_constant("hidden_sums_share"),
    _make_time_constant("permutation_bytes"),
    _make_time_constant("scatter_add_elements_per_second"),
    _make_time_constant("scan_flops_per_second"),
    _make_time_constant("convolved_elements_per_second"),
    _make_time_constant("gated_elements_per_second"),
    _make_time_constant("loss_bytes_per_second"),
    _make_time_constant("moe_kernels"),
    _make_time_constant("expert_bias_bytes"),
    _make_time_constant("expert_kernels"),
    _make_time_constant("experts_per_launch"),
    _make_time_constant("collective_launch_seconds"),
    _make_time_constant("simple_step_seconds"),
    _make_time_constant("low_latency_share"),
    _make_time_constant("low_latency_far_share"),
    _make_time_constant("low_latency_rates"),
    _make_time_constant("tree_rate_share"),
    _make_time_constant("tree_shares"),
    _make_time_constant("crowding"),
    _make_time_constant("gloo_gather_factor"),
    _make_time_constant("gloo_exchange_factor"),
    Constant("near latency", NVLINK3.latency_seconds, (2e-6, 5e-6), _link(0, "latency_seconds")),
    Constant("far latency", NIC_200.latency_seconds, (3e-6, 8e-6), _link(-1, "latency_seconds")),
    Constant("near sustained", PCIE4.sustained, (0.6, 0.9), _link(0, "sustained")),
    Constant("far sustained", NIC_200.sustained, (0.8, 0.97), _link(-1, "sustained")),
    _make_time_constant("host_link_share"),
    _make_time_constant("host_link_bandwidth"),
    _make_time_constant("host_memory_bandwidth"),
)  # fmt: skip

_ALLOCATOR = AllocatorConstants()
MEMORY_CONSTANTS: tuple[Constant, ...] = (
    Constant("context_bytes", _ALLOCATOR.context_bytes, (1000 * MIB, 1600 * MIB), set_on=("bloom_prequel",)),
    Constant("connection_bytes", _ALLOCATOR.connection_bytes, (12 * MIB, 14 * MIB)),
    Constant("far_connection_bytes", _ALLOCATOR.far_connection_bytes, (12 * MIB, 20 * MIB)),
    Constant("max_channels", _ALLOCATOR.max_channels, (16, 32)),
    Constant("peer_channels", _ALLOCATOR.peer_channels, (8, 32)),
    Constant("split_later", _ALLOCATOR.split_later, (1, 4), set_on=ALL),
    Constant("bucket_elements", _ALLOCATOR.bucket_elements, (5e8, 5e8)),
    Constant("unreclaimable", _ALLOCATOR.unreclaimable, (0.1, 1.25)),
)
