"""All stacks by name, and the source of every fact in which they differ from the record's defaults (Fivefold's).

The entries are in ``megatron.py``, ``pytorch.py`` and ``other_software.py``; docs/reference/stacks.md shows a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fivefold.errors import UserError
from fivefold.spelling import find_spelling, join_names, make_unknown_name_error
from fivefold.stack import megatron, other_software, pytorch
from fivefold.stack.entry import Fact, StackEntry
from fivefold.stack.spec import Stack

FIVEFOLD = StackEntry(
    name="fivefold",
    version="",
    family="fivefold",
    facts={},
    runs={"offloads": Fact(("optimizer",), "fivefold/trainer/supported.py, _check_offload")},
)
ENTRIES = (FIVEFOLD, *megatron.ENTRIES, *pytorch.ENTRIES, *other_software.ENTRIES)

STACKS: Mapping[str, Stack] = MappingProxyType({entry.name: entry.stack() for entry in ENTRIES})
SOURCES: Mapping[str, Mapping[str, str]] = MappingProxyType({entry.name: entry.sources() for entry in ENTRIES})
WRAPPED_STACKS = ("ddp", "fsdp2", "deepspeed")  # with which trainers on top of Hugging Face's train
TRAINS_WITH: Mapping[str, tuple[str, ...]] = MappingProxyType(  # names of software without facts of its own
    dict.fromkeys(
        ("accelerate", "axolotl", "hf", "huggingface", "lightning", "llamafactory", "transformers", "trl"),
        WRAPPED_STACKS,
    )
    | {
        "ms-swift": (*WRAPPED_STACKS, "megatron-core"),
        "openrlhf": ("deepspeed",),
        "pytorch": ("ddp", "fsdp2"),
        "torch": ("ddp", "fsdp2"),
        "unsloth": ("ddp",),
        "verl": ("fsdp2", "megatron-core"),
    }
)

OTHER_NAMES = {"megatron": "megatron-core"}  # today's Megatron-LM; megatron-lm is that of 2022


def build_stack(name: str) -> Stack:
    """Return the stack called ``name``, in any case, also with spaces for its dashes."""
    name = find_spelling(name, (*STACKS, *OTHER_NAMES, *TRAINS_WITH))
    if wrapped := TRAINS_WITH.get(name):
        use = "use one of them" if len(wrapped) > 1 else "use that"
        raise UserError(
            f"unknown stack {name!r}: it trains with {join_names(wrapped, 'or')}; {use}, or --from FILE if "
            "`fivefold read` knows its configs"
        )
    name = OTHER_NAMES.get(name, name)
    if name not in STACKS:
        raise make_unknown_name_error(name, list(STACKS), kind="stack")
    return STACKS[name]
