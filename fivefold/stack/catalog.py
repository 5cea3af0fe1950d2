"""All stacks by name, and the source of every fact in which they differ from the record's defaults (Fivefold's).

The entries are in ``megatron.py``, ``pytorch.py`` and ``other_software.py``; docs/reference/stacks.md shows a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fivefold.record import UserError, find_spelling, make_unknown_name_error
from fivefold.stack import megatron, other_software, pytorch
from fivefold.stack.entry import StackEntry
from fivefold.stack.spec import Stack

FIVEFOLD = StackEntry(name="fivefold", version="", family="fivefold", facts={}, runs={})
ENTRIES = (FIVEFOLD, *megatron.ENTRIES, *pytorch.ENTRIES, *other_software.ENTRIES)

STACKS: Mapping[str, Stack] = MappingProxyType({entry.name: entry.stack() for entry in ENTRIES})
SOURCES: Mapping[str, Mapping[str, str]] = MappingProxyType({entry.name: entry.sources() for entry in ENTRIES})
HUGGING_FACE_TRAINERS = (  # their stack is PyTorch's
    "accelerate",
    "axolotl",
    "hf",
    "huggingface",
    "llamafactory",
    "transformers",
    "trl",
)
WRAPPED_STACKS = ("ddp", "fsdp2", "deepspeed")  # which they train with

OTHER_NAMES = {"megatron": "megatron-core"}  # today's Megatron-LM; megatron-lm is that of 2022


def build_stack(name: str) -> Stack:
    """Return the stack called ``name``, in any case, also with spaces for its dashes."""
    name = find_spelling(name, (*STACKS, *OTHER_NAMES, *HUGGING_FACE_TRAINERS))
    if name in HUGGING_FACE_TRAINERS:
        raise UserError(
            f"unknown stack {name!r}: it trains with ddp, fsdp2 or deepspeed; use one of them, or read its config "
            "with --from FILE"
        )
    if name.lower() in ("pytorch", "torch"):
        raise UserError(f"unknown stack {name!r}: its data parallelism is ddp or fsdp2; use one of them")
    name = OTHER_NAMES.get(name, name)
    if name not in STACKS:
        raise make_unknown_name_error(name, list(STACKS), kind="stack")
    return STACKS[name]
