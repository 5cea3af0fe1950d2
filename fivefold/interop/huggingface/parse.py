"""All keys of a job: of TrainingArguments, of accelerate's YAML, of DeepSpeed's JSON, wherever they are.

A launch line names files, and so do configs: ``--config_file``, ``--deepspeed``, ``deepspeed_config_file``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.interop.files import document as load
from fivefold.interop.format import Asked, Document, ParsedConfig
from fivefold.interop.huggingface.dialects import DIALECTS, SEQUENCE, Dialect
from fivefold.interop.huggingface.keys import OF_WIDTH, TABLE, VERSIONS
from fivefold.interop.keys import Values, flat
from fivefold.interop.shell.launch import keys
from fivefold.record import Mistake

ARGUMENT_SIGNS = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "bf16"})

DEEPSPEED_SIGNS = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"})

LAUNCHED = {"mixed_precision": "accelerate.mixed_precision", "zero_stage": "accelerate.deepspeed_config.zero_stage"}


class CollectedKeys(NamedTuple):
    """Keys with the prefixes of their table; the dialect of the trainer; ranks that a file says."""

    given: dict[str, Any]
    dialect: Dialect | None = None
    ranks: int | None = None


def is_huggingface(document: Document) -> bool:
    """Return whether a file, or what a launch line names, is of a trainer on transformers."""
    if document.kind == "words":
        named = set(keys(document.words))
        files = [word for word in document.words if word.endswith((".yaml", ".yml", ".json"))]
        return bool(
            "per_device_train_batch_size" in named or "config_file" in document.options or "deepspeed" in named
        ) or (
            bool(document.words)
            and any(is_huggingface(_load(word, document)) for word in files if beside(word, document))
        )
    top = set(document.values)
    return bool(
        "distributed_type" in top or (document.kind == "json" and top & DEEPSPEED_SIGNS)
        or len(top & ARGUMENT_SIGNS) >= 2 or any(len(top & each.signs) >= 2 for each in DIALECTS)
    )  # fmt: skip


def parse(document: Document, asked: Asked) -> ParsedConfig:
    """Return the values of all keys of a job, in the names of TrainingArguments, accelerate and DeepSpeed."""
    collected = collect_keys(document)
    given, dialect = collected.given, collected.dialect
    table = dict(TABLE)
    if dialect:
        table |= dialect.table
        table |= {name: table[name]._replace(default=value) for name, value in dialect.defaults.items()}
    strategy = find_strategy(given)
    name = dialect.name if dialect else "deepspeed" if strategy == "deepspeed" else "accelerate"
    version = dialect.version if dialect else VERSIONS[name]
    unset = tuple(key for key, value in given.items() if key in OF_WIDTH and value == "auto")
    given = {key: value for key, value in given.items() if key not in unset}
    values = Values(table, given, origin=document.origin, software=name, version=version)
    document = document._replace(ranks=document.ranks or collected.ranks)
    return ParsedConfig(document, values, model=asked.model, unset=unset)


def collect_keys(document: Document) -> CollectedKeys:
    """The keys of a document and of the files that it names."""
    collected = _of_file(document) if document.kind != "words" else _of_words(document)
    given = collected.given
    for key in ("deepspeed", "accelerate.deepspeed_config.deepspeed_config_file"):
        file = given.get(key)
        if isinstance(file, str) and file.endswith(".json"):
            given |= _deepspeed(_load(file, document).values, document.origin)
    ranks = given.get("accelerate.num_processes")
    given |= {_argument(key): value for key, value in document.given.items()}
    given = {key: value for key, value in given.items() if value is not None}
    return collected._replace(given=given, ranks=collected.ranks or (ranks if isinstance(ranks, int) else None))


def _of_words(document: Document) -> CollectedKeys:
    given: dict[str, Any] = {}
    dialect = None
    for word in document.words[1:]:
        if word.endswith((".yaml", ".yml", ".json")) and not word.startswith("-") and beside(word, document):
            file = _load(word, document)
            if is_huggingface(file) and not file.values.keys() & (DEEPSPEED_SIGNS | {"distributed_type"}):
                inner = _of_file(file)
                given |= inner.given
                dialect = inner.dialect
    said = {_argument(key): value for key, value in keys(document.words[1:]).items()}
    given |= {key: value for key, value in said.items() if key not in ("config", "config_file")}
    options = document.options
    if file_name := options.get("config_file"):
        given |= flat({"accelerate": dict(_load(file_name, document).values)}, origin=document.origin)
    if "use_fsdp" in options:
        given["accelerate.distributed_type"] = "FSDP"
    if "use_deepspeed" in options:
        given["accelerate.distributed_type"] = "DEEPSPEED"
    given |= {LAUNCHED[name]: value for name, value in options.items() if name in LAUNCHED}
    given |= {f"accelerate.fsdp_config.{name}": value for name, value in options.items() if name.startswith("fsdp_")}
    return CollectedKeys(given, dialect)


def _of_file(document: Document) -> CollectedKeys:
    values, origin = dict(document.values), document.origin
    if "distributed_type" in values:
        return CollectedKeys(flat({"accelerate": values}, origin=origin))
    if values.keys() & DEEPSPEED_SIGNS and not values.keys() & {"per_device_train_batch_size"}:
        return CollectedKeys(_deepspeed(values, origin))
    dialect = next((each for each in DIALECTS if len(values.keys() & each.signs) >= 2), None)
    if dialect is None:
        nested = values.pop("deepspeed", None) if isinstance(values.get("deepspeed"), dict) else None
        given = {_argument(key): value for key, value in flat(values, origin=origin).items()}
        return CollectedKeys(given | (_deepspeed(nested, origin) if nested else {}))
    return CollectedKeys(translated(values, dialect, origin=origin), dialect)


def translated(values: dict[str, Any], dialect: Dialect, *, origin: str) -> dict[str, Any]:
    """A dialect's keys in the names of TrainingArguments and accelerate, with what they leave unsaid."""
    found: dict[str, Any] = dict(dialect.unsaid)
    fsdp = values.pop("fsdp_config", None)
    version = values.pop("fsdp_version", None)
    for key, value in flat(values, origin=origin).items():
        if value is None and (key, None) not in dialect.words:  # an empty key is one that is left out
            continue
        name, value = dialect.words.get((key, value) if _hashable(value) else ("", None), (key, value))
        name = dialect.names.get(name, name)
        name, value = dialect.words.get((name, value) if _hashable(value) else ("", None), (name, value))
        found[name] = value
    if fsdp or version:
        found["accelerate.distributed_type"] = "FSDP"
        for key, value in (fsdp or {}).items():
            found[f"accelerate.fsdp_config.{key if key.startswith('fsdp_') else f'fsdp_{key}'}"] = value
        if version:
            found["accelerate.fsdp_config.fsdp_version"] = version
    return found


def _hashable(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | type(None))


def _argument(key: str) -> str:
    """The name of an argument: underscores, and one name for the length of sequences."""
    name = key.replace("-", "_")
    name = {
        "per_device_batch_size": "per_device_train_batch_size",
        "model": "model_name_or_path",
        "use_liger": "use_liger_kernel",
        "evaluation_strategy": "eval_strategy",
    }.get(name, name)
    return "max_length" if name in SEQUENCE else name


def _deepspeed(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """DeepSpeed's keys; ``auto`` is what the trainer says, or follows from the model's width."""
    given = flat({"deepspeed": dict(values)}, origin=origin)
    return {key: value for key, value in given.items() if value != "auto" or key in OF_WIDTH}


def beside(name: str, document: Document) -> Path | None:
    """A file that a config names, beside it, in a folder above, or where the command runs."""
    folders = [document.folder, *list(document.folder.parents)[:3], Path()]
    try:
        return next((folder / name for folder in folders if (folder / name).is_file()), None)
    except (OSError, ValueError):  # a name of five thousand letters, or with a null byte
        return None


def _load(name: str, document: Document) -> Document:
    if (path := beside(name, document)) is None:
        raise Mistake(f"{document.origin}: names {name}, which is not there; put it beside")
    return load(path)


def find_strategy(given: dict[str, Any]) -> str:
    """Return ``deepspeed``, ``fsdp`` or ``ddp``."""
    kind = str(given.get("accelerate.distributed_type", ""))
    if kind == "DEEPSPEED" or given.get("deepspeed") or any(key.startswith("deepspeed.") for key in given):
        return "deepspeed"
    return "fsdp" if kind == "FSDP" or given.get("fsdp") else "ddp"
