"""Lists the catalogs of models, machines and stacks, in full or the entries that contain a word."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

from fivefold.errors import UserError
from fivefold.record import Record
from fivefold.results.catalog import CatalogFamily, CatalogLink, CatalogMachine, CatalogModel, CatalogStack
from fivefold.units import GIB

Entry = TypeVar("Entry", bound=Record)


def list_models(word: str | None = None) -> list[CatalogModel]:
    """Return the models of the catalog, or those that contain ``word``."""
    from fivefold.model.catalog import build_model, list_names
    from fivefold.model.published import CATALOG
    from fivefold.model.vision_weights import count_vision

    entries = []
    for model in map(build_model, list_names()):
        experts = {"experts": model.moe.experts, "experts_per_token": model.moe.topk} if model.moe else {}
        entries.append(
            CatalogModel(
                name=model.name,
                parameters=model.parameters,
                active_parameters=model.active_parameters,
                vision_parameters=count_vision(model.vision) if model.vision else None,
                layers=model.layers,
                width=model.width,
                heads=model.heads,
                kv_heads=model.kv_heads,
                vocab=model.vocab,
                positions=model.positions,
                source=model.source,
                huggingface=CATALOG[model.name].repository,
                **experts,
            )
        )
    return _select(entries, word, kind="model")


def list_families(word: str | None = None) -> list[CatalogFamily]:
    """Return the families of Hugging Face that are read, and the causal language models of transformers that are not.

    ``word``: only those that contain it.
    """
    from fivefold.model.huggingface.families import FAMILIES, WRAPPERS
    from fivefold.model.huggingface.model_types import LACKING_TYPES

    entries = [
        CatalogFamily(name=name, architecture=architecture, status="unsupported", needs=reason)
        for name, (architecture, reason) in LACKING_TYPES.items()
    ]
    needs = {name: _list_untrained(name) for name in FAMILIES}
    types = [(name, family.architecture, "") for name, family in FAMILIES.items()]
    types += [(name, wrapper.architecture, wrapper.text) for name, wrapper in WRAPPERS.items()]
    for name, architecture, text in types:
        needed = needs[text or name]
        status: Literal["trained", "predicted"] = "predicted" if needed else "trained"
        entries.append(CatalogFamily(name=name, architecture=architecture, status=status, needs=needed, text=text))
    return _select(sorted(entries, key=lambda entry: entry.name), word, kind="family", flag="models --families")


def _list_untrained(model_type: str) -> str:
    """Return what is missing to train the default config of a family, "" if nothing is.

    A default config that its own class in transformers cannot build either tells nothing.
    """
    from fivefold.model.huggingface.read import from_config
    from fivefold.trainer.supported_models import list_unsupported

    try:
        model = from_config({"model_type": model_type}, name=model_type)
    except UserError:
        return ""
    lacking = ", ".join(unsupported.removesuffix(" yet") for unsupported, _ in list_unsupported(model))
    return f"training: {lacking}" if lacking else ""


def list_machines(word: str | None = None) -> list[CatalogMachine]:
    """Return the machines of the catalog, or those that contain ``word``, or have that memory: 24 or 24gb."""
    from fivefold.machine.catalog import list_names, resolve

    entries = []
    for name in list_names():
        machine = resolve(name, local=Path())  # no file: the catalog's names come first
        chip = machine.chip
        entries.append(
            CatalogMachine(
                name=name,
                ranks_per_node=machine.ranks_per_node,
                memory_bytes=chip.memory_bytes,
                memory_bandwidth=chip.memory_bandwidth,
                peak_flops={**chip.peak_flops},
                power_watts=chip.power_watts,
                links=tuple(CatalogLink(name=link.name, bandwidth=link.bandwidth) for link in machine.links),
                instances=_list_instances(name, machine.ranks_per_node),
                source=chip.source,
            )
        )
    with_memory = [entry for entry in entries if word is not None and _has_memory(entry, word)]
    if word is None or not with_memory:
        return _select(entries, word, kind="machine")
    return [entry for entry in entries if entry in with_memory or word in entry.name]


def _list_instances(chip: str, ranks_per_node: int) -> tuple[str, ...]:
    """Return the instances of clouds with a chip, those that are its usual node first."""
    from fivefold.machine.catalog import INSTANCES

    words = (word for word, instance in INSTANCES.items() if instance.chip == chip)
    return tuple(sorted(words, key=lambda word: INSTANCES[word].gpus != ranks_per_node))


def _has_memory(machine: CatalogMachine, word: str) -> bool:
    """Return whether ``word`` is the memory of a GPU as it is sold, of which PyTorch reports up to a tenth less."""
    size = re.fullmatch(r"(\d{1,4}) ?(g|gb|gib)?", word.strip().lower())
    return size is not None and 0.9 * int(size[1]) * GIB <= machine.memory_bytes <= int(size[1]) * GIB


def list_stacks(word: str | None = None) -> list[CatalogStack]:
    """Return the stacks of the catalog, or those that contain ``word``."""
    from fivefold.interop.registry import FORMATS
    from fivefold.stack.catalog import ENTRIES, FIVEFOLD, STACKS

    entries = []
    for stack_entry in ENTRIES:
        stack = STACKS[stack_entry.name]
        runs = stack.runs
        entries.append(
            CatalogStack(
                name=stack.name,
                version=stack.version,
                family=stack.family,
                axes=runs.axes,
                zero=runs.zero,
                schedules=runs.schedules if "pp" in runs.axes else (),
                configs=tuple(
                    form.name for form in FORMATS if form.emit and stack.name in (form.stack, *form.fine_tuning_stacks)
                ),
                examined=stack_entry is FIVEFOLD or bool(stack_entry.runs),
            )
        )
    return _select(entries, word, kind="stack")


def _select(entries: Sequence[Entry], word: str | None, *, kind: str, flag: str | None = None) -> list[Entry]:
    """Return the entries that contain a word in any field; raises ``UserError`` if none does."""
    if word is None:
        return list(entries)
    selected = [entry for entry in entries if any(word.lower() in text.lower() for text in _list_texts(entry))]
    if not selected:
        raise UserError(f"no {kind} contains {word!r}; `fivefold {flag or f'{kind}s'}` lists all {len(entries)}")
    return selected


def _list_texts(value: object) -> list[str]:
    """Return the texts in the fields of a record, without the names of its fields and its source."""
    if isinstance(value, CatalogModel) and value.experts:
        return ["moe", "mixture of experts", *_list_texts(dict(value) | {"experts": None})]
    if isinstance(value, Record):
        return _list_texts(dict(value))
    if isinstance(value, dict):
        return [text for key, inner in value.items() for text in _list_texts(inner) if key != "source"]
    if isinstance(value, tuple):
        return [text for inner in value for text in _list_texts(inner)]
    return [value] if isinstance(value, str) else []


def dump_entries(entries: Sequence[Record]) -> str:
    """Return entries as a JSON list."""
    import json

    return json.dumps([entry.model_dump(mode="json") for entry in entries], indent=2)
