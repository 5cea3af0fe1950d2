"""The formats that ``read`` recognizes, in this order, and that ``write`` writes: one folder each."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.interop import huggingface, launch, megatron, megatron_bridge, nanotron, torchtitan, torchtitan_toml
from fivefold.interop.format import Format
from fivefold.record import Mistake, nearest

FORMATS: tuple[Format, ...] = (
    *launch.FORMATS,
    *torchtitan.FORMATS,
    *nanotron.FORMATS,
    *megatron_bridge.FORMATS,
    *megatron.FORMATS,
    *huggingface.FORMATS,
    *torchtitan_toml.FORMATS,
)


def list_written(formats: Sequence[Format] = FORMATS) -> list[str]:
    """Return the formats that ``--to`` names."""
    return [form.name for form in formats if form.emit]


def find_format(name: str, formats: Sequence[Format] = FORMATS) -> Format:
    """Return the format that ``--to`` names."""
    for form in formats:
        if form.name == name and form.emit:
            return form
    raise nearest(name, list_written(formats), kind="format")


def find_stack_format(stack: str) -> str:
    """Return the name of the format in which a stack is told its layout."""
    found = next((form.name for form in FORMATS if form.stack == stack and form.emit), None)
    if found is None:
        known = ", ".join(dict.fromkeys(form.stack for form in FORMATS))
        raise Mistake(f"no config is written for stack {stack}; there is one for {known}")
    return found
