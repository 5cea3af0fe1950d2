"""Show the catalogs of models, machines and stacks as tables."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from fivefold.rendering.grid import Column, Grid, make_grid
from fivefold.results.catalog import CatalogFamily, CatalogMachine, CatalogModel, CatalogStack
from fivefold.stack.spec import SupportedLayouts
from fivefold.units import GIB, show_count, show_rate


def _show_experts(model: CatalogModel) -> str | None:
    return None if model.experts is None else f"{model.experts_per_token} of {model.experts}"


def _find_peak(machine: CatalogMachine) -> float:
    return max(machine.peak_flops.get("bf16", 0.0), machine.peak_flops.get("fp16", 0.0))


def _show_links(machine: CatalogMachine) -> str:
    return ", ".join(f"{link.name} {show_rate(link.bandwidth)}" for link in machine.links)


def _join(values: Sequence[object], every: Sequence[object] = ()) -> str:
    """Return values in a row; "all" if they are all that there are."""
    return "all" if every and set(values) == set(every) else " ".join(map(str, values))


def _list_supported(stack: CatalogStack, field: Literal["axes", "zero", "schedules"]) -> str:
    """Return what a stack supports, in a row; "?" if it was not looked up."""
    return _join(getattr(stack, field), getattr(SupportedLayouts(), field)) if stack.examined else "?"


MODELS: tuple[Column[CatalogModel], ...] = (
    Column("model", attrgetter("name"), is_text=True),
    Column("parameters", attrgetter("parameters"), show_count),
    Column("active", attrgetter("active_parameters"), show_count),
    Column("layers", attrgetter("layers")),
    Column("heads (KV)", lambda model: f"{model.heads} ({model.kv_heads})"),
    Column("experts", _show_experts, missing=""),
    Column("width", attrgetter("width"), is_wide=True),
    Column("vocabulary", attrgetter("vocab"), "{:,}".format, is_wide=True),
    Column("context", attrgetter("positions"), "{:,}".format),
    Column("source", attrgetter("source"), is_text=True, is_wide=True),
)
FAMILIES: tuple[Column[CatalogFamily], ...] = (
    Column("model_type", attrgetter("name"), is_text=True),
    Column("status", attrgetter("status"), is_text=True),
    Column("text model", lambda family: family.text or None, is_text=True, missing=""),
    Column("why not", lambda family: family.needs or None, is_text=True, missing=""),
    Column("class", attrgetter("architecture"), is_text=True, is_wide=True),
)
MACHINES: tuple[Column[CatalogMachine], ...] = (
    Column("machine", attrgetter("name"), is_text=True),
    Column("memory", attrgetter("memory_bytes"), lambda size: f"{size / GIB:.1f} GiB"),
    Column("bandwidth", attrgetter("memory_bandwidth"), show_rate),
    Column("16-bit peak", _find_peak, lambda rate: f"{rate / 1e12:,.0f} TFLOP/s"),
    Column("node", attrgetter("ranks_per_node"), "{} GPUs".format),
    Column("link/GPU", lambda machine: machine.links[0].bandwidth, show_rate),
    Column("NIC/GPU", lambda machine: machine.links[-1].bandwidth, show_rate),
    Column("links, near to far", _show_links, is_text=True, is_wide=True),
    Column("power", attrgetter("power_watts"), "{:,.0f} W".format, is_wide=True),
    Column("source", attrgetter("source"), is_text=True, is_wide=True),
)
STACKS: tuple[Column[CatalogStack], ...] = (
    Column("stack", attrgetter("name"), is_text=True),
    Column("parallelism", lambda stack: _list_supported(stack, "axes"), is_text=True),
    Column("ZeRO", lambda stack: _list_supported(stack, "zero"), is_text=True),
    Column("pipeline schedules", lambda stack: _list_supported(stack, "schedules"), is_text=True),
    Column("write --to", lambda stack: _join(stack.configs), is_text=True),
    Column("version", attrgetter("version"), is_text=True, is_wide=True),
    Column("family", attrgetter("family"), is_text=True, is_wide=True),
)


def list_models(models: Sequence[CatalogModel]) -> RenderableType:
    """Return the table of models, and what the vision towers add to their parameters."""
    towers = [f"{model.name} {show_count(model.vision_parameters)}" for model in models if model.vision_parameters]
    line = f"vision towers, which the parameters leave out: {', '.join(towers)}"
    return Group(make_grid(MODELS, models), *([Text(line, style="dim", overflow="fold")] if towers else []))


def list_families(families: Sequence[CatalogFamily]) -> Grid:
    """Return the table of families of Hugging Face."""
    return make_grid(FAMILIES, families)


def list_machines(machines: Sequence[CatalogMachine]) -> Grid:
    """Return the table of machines."""
    return make_grid(MACHINES, machines)


def list_stacks(stacks: Sequence[CatalogStack]) -> RenderableType:
    """Return the table of stacks, and which of Megatron's is today's."""
    grid = make_grid(STACKS, stacks)
    lines = []
    if of_years := [stack for stack in stacks if stack.version.startswith("20")]:
        years = ", ".join(f"{stack.name} that of {stack.version}" for stack in of_years)
        lines.append(f"megatron-core is Megatron-LM as it is today (--stack megatron); {years}. All versions: --json")
    if not all(stack.examined for stack in stacks):
        lines.append("?: not looked up; any layout is predicted")
    return Group(grid, *(Text(line, style="dim", overflow="fold") for line in lines))
