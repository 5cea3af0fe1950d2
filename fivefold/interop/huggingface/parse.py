"""Collect all keys of a job: TrainingArguments, accelerate's YAML and DeepSpeed's JSON, from all of its files.

A launch line names files, and so do configs: ``--config_file``, ``--deepspeed``, ``deepspeed_config_file``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import UserError
from fivefold.interop.files import find_file, read_named
from fivefold.interop.format import Document, Overrides, ParsedConfig, resolve_world
from fivefold.interop.huggingface.data import SIGMOID
from fivefold.interop.huggingface.dialects import DIALECTS, SEQUENCE, SWIFT, Dialect
from fivefold.interop.huggingface.keys import (
    DERIVED_FROM_WIDTH,
    FILLED_BY_TRAINER,
    STAGE_3,
    TABLE,
    TRL_DEFAULTS,
    TRL_SIGNS,
    VERSIONS,
)
from fivefold.interop.huggingface.shipped import find_shipped
from fivefold.interop.huggingface.swift import (
    complete_keys,
    compute_defaults,
    count_ranks,
    find_method,
    parse_arguments,
)
from fivefold.interop.keys import Values, flatten, shorten_value
from fivefold.interop.shell.launch import parse_keys
from fivefold.results.reading import ParsedKey

ARGUMENT_SIGNS = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "bf16"})

# Keys of LLaMA-Factory's new trainer (src/llamafactory/v1), which are not read
FACTORY_V1_SIGNS = frozenset({"model_class", "peft_config", "kernel_config", "dist_config", "train_dataset"})

ZERO_SECTION = "deepspeed.zero_optimization."
DEEPSPEED_SIGNS = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"})

LAUNCHER_KEYS = {
    "mixed_precision": "accelerate.mixed_precision",
    "zero_stage": "accelerate.deepspeed_config.zero_stage",
}


class CollectedKeys(NamedTuple):
    """Keys with the prefixes of their table, the dialect of the trainer, and the ranks that a file gives.

    ``assumed``: files that are missing here and were read as the trainer ships them. ``script``: TRL's, if it is one.
    """

    given: dict[str, Any]
    dialect: Dialect | None = None
    ranks: int | None = None
    assumed: tuple[ParsedKey, ...] = ()
    script: str | None = None


TRL_SCRIPT = re.compile(r"(?:.*/)?(?:trl|examples)/scripts/(?:.*/)?(\w+)\.py|trl\.scripts\.(\w+)")


def find_trl_script(words: Sequence[str]) -> str | None:
    """Return which of TRL's scripts a command runs, such as ``sft`` of ``trl sft``; None for other programs."""
    if list(words[:1]) == ["trl"]:
        return words[1] if len(words) > 1 else None
    match = TRL_SCRIPT.fullmatch(words[0]) if words else None
    return (match[1] or match[2]) if match else None


def is_huggingface(document: Document) -> bool:
    """Return whether a file, or a file that a launch line names, is of a trainer on transformers."""
    if document.kind == "words":
        option_names = set(parse_keys(document.words))
        files = [word for word in document.words if word.endswith((".yaml", ".yml", ".json"))]
        return bool(
            "per_device_train_batch_size" in option_names
            or "config_file" in document.options
            or "deepspeed" in option_names
            or find_trl_script(document.words)
            or find_method(document.words)
        ) or (
            bool(document.words)
            and any(is_huggingface(_load(word, document)) for word in files if find_config_file(word, document))
        )
    top_keys = set(document.values)
    return bool(
        "distributed_type" in top_keys
        or (document.kind == "json" and top_keys & DEEPSPEED_SIGNS)
        or len(top_keys & ARGUMENT_SIGNS) >= 2
        or len(top_keys & FACTORY_V1_SIGNS) >= 2
        or any(len(top_keys & dialect.signs) >= 2 for dialect in DIALECTS)
    )


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the values of all keys of a job, by the names of TrainingArguments, accelerate and DeepSpeed."""
    collected = collect_keys(document)
    given, dialect = collected.given, collected.dialect
    table = dict(TABLE)
    if dialect:
        table |= dialect.table
        ranks = resolve_world(document, overrides, stated=document.ranks or collected.ranks)
        defaults = {**dialect.defaults, **(compute_defaults(given, ranks) if dialect is SWIFT else {})}
        table |= {name: table[name]._replace(default=value) for name, value in defaults.items()}
    assumed = (*document.assumed, *collected.assumed)
    if trl_config := _find_trl_config(collected):
        if collected.script is None:
            means = f"TRL's by its keys: with the defaults of `trl {trl_config}` of TRL {VERSIONS['trl']}"
            assumed = (*assumed, ParsedKey(key="(software)", value="TRL", means=means))
        defaults = TRL_DEFAULTS[trl_config] | {"bf16": not given.get("fp16")}
        table |= {name: table[name]._replace(default=value) for name, value in defaults.items()}
    strategy = find_strategy(given)
    name = dialect.name if dialect else "deepspeed" if strategy == "deepspeed" else "accelerate"
    version = dialect.version if dialect else VERSIONS[name]
    if is_other_script := collected.script is not None and collected.script not in TRL_DEFAULTS:
        given["script"] = f"{collected.script}.py"
    unset = tuple(key for key, value in given.items() if key in DERIVED_FROM_WIDTH and value == "auto")
    given = {key: value for key, value in given.items() if key not in unset}
    values = Values(table, given, origin=document.origin, software=name, version=version)
    if is_other_script:
        values.mark_not_modelled(
            "script", "of TRL, with an objective other than those of sft.py and dpo.py; read as sft.py"
        )
    document = document._replace(ranks=document.ranks or collected.ranks, assumed=assumed)
    return ParsedConfig(document, values, model=overrides.model, unset=unset)


def _find_trl_config(collected: CollectedKeys) -> str | None:
    """Return whose config of TRL the keys are of, ``sft`` or ``dpo``: that of the script, or of keys only TRL has."""
    if collected.script in TRL_DEFAULTS:
        return collected.script
    if collected.script is None and (collected.dialect or not collected.given.keys() & TRL_SIGNS):
        return None
    return "dpo" if collected.given.get("loss_type") in SIGMOID else "sft"


def collect_keys(document: Document) -> CollectedKeys:
    """Return the keys of a document and of the files that it names."""
    collected = _parse_file(document) if document.kind != "words" else _parse_words(document)
    given, assumed = collected.given, list[ParsedKey]()
    for key in ("deepspeed", "accelerate.deepspeed_config.deepspeed_config_file"):
        file, dialect = given.get(key), collected.dialect
        shipped = find_shipped(file, dialect) if dialect and isinstance(file, str) else None
        if isinstance(file, str) and (file.endswith(".json") or shipped):
            if dialect is None or shipped is None or find_config_file(file, document):
                given |= _read_deepspeed(_load(file, document).values, document.origin)
            else:
                given |= _read_deepspeed(shipped, document.origin)
                if not file.endswith(".json"):
                    continue
                means = f"not next to the config: read as {dialect.name} {dialect.version} ships it"
                assumed.append(ParsedKey(key=key, value=file, means=means))
    ranks = given.get("accelerate.num_processes")
    given |= {_normalize_argument(key): value for key, value in document.given.items()}
    given = {key: value for key, value in given.items() if value is not None}
    return collected._replace(
        given=given, ranks=collected.ranks or (ranks if isinstance(ranks, int) else None), assumed=tuple(assumed)
    )


def _parse_swift(document: Document) -> CollectedKeys:
    """Collect the keys of a command of ms-swift: its first word may name a config; ``ENV`` there sets variables."""
    values, environment = dict[str, Any](), dict[str, Any](document.environment)
    for word in document.words[1:3]:
        if word.endswith((".yaml", ".yml", ".json")) and not word.startswith("-"):
            values = dict(_load(word, document).values)
    values |= parse_arguments(document.words)
    return _collect_swift(values, document, environment, method=find_method(document.words))


def _collect_swift(
    values: dict[str, Any], document: Document, environment: dict[str, Any], *, method: str | None
) -> CollectedKeys:
    """Return the keys of ms-swift by the names of TrainingArguments, and the ranks of its variables."""
    given_environment = values.get("ENV")
    environment = {**(given_environment if isinstance(given_environment, dict) else {}), **environment}
    environment = {} if document.options else environment  # another launcher starts the ranks
    values = complete_keys(values, method, environment)
    name = values.get("fsdp")
    if isinstance(name, str) and name.endswith(".json"):
        values |= {"fsdp": None, "fsdp_config": dict(_load(name, document).values).get("fsdp_config", {})}
    if isinstance(config := values.get("fsdp_config"), dict) and "fsdp_version" not in config:
        values["fsdp_config"] = {"fsdp_version": 2, **config}
    name = values.get("deepspeed")
    if isinstance(name, str) and not name.endswith(".json") and find_shipped(name, SWIFT) is None:
        raise UserError(
            f"{document.origin}: deepspeed={shorten_value(name)} is no preset of ms-swift; use zero0, zero1, zero2, "
            "zero3, zero2_offload or zero3_offload, or name a .json file"
        )
    return CollectedKeys(translate(values, SWIFT, origin=document.origin), SWIFT, ranks=count_ranks(environment))


def _parse_words(document: Document) -> CollectedKeys:
    """Collect the keys of a launch command: from its options and from the config files that it names."""
    given: dict[str, Any] = {}
    dialect = ranks = None
    is_swift = find_method(document.words) is not None
    if is_swift:
        given, dialect, ranks, *_ = _parse_swift(document)
    for word in document.words[1:] if not is_swift else ():
        if word.endswith((".yaml", ".yml", ".json")) and not word.startswith("-") and find_config_file(word, document):
            file = _load(word, document)
            if is_huggingface(file) and not file.values.keys() & (DEEPSPEED_SIGNS | {"distributed_type"}):
                file_keys = _parse_file(file)
                given |= file_keys.given
                dialect = file_keys.dialect
    arguments = {} if is_swift else parse_keys(document.words[1:])
    line_keys = dict(_read_flag(key, value) for key, value in arguments.items())
    given |= {key: value for key, value in line_keys.items() if key not in ("config", "config_file")}
    options = document.options
    if file_name := options.get("config_file"):
        given |= flatten({"accelerate": dict(_load(file_name, document).values)}, origin=document.origin)
    if "use_fsdp" in options:
        given["accelerate.distributed_type"] = "FSDP"
    if "use_deepspeed" in options:
        given["accelerate.distributed_type"] = "DEEPSPEED"
    given |= {LAUNCHER_KEYS[name]: value for name, value in options.items() if name in LAUNCHER_KEYS}
    given |= {f"accelerate.fsdp_config.{name}": value for name, value in options.items() if name.startswith("fsdp_")}
    return CollectedKeys(given, dialect, ranks, script=find_trl_script(document.words))


def _read_flag(key: str, value: Any) -> tuple[str, Any]:
    """Return the name and value of an option; ``--no_NAME``, which HfArgumentParser adds, turns NAME off."""
    name = _normalize_argument(key)
    off = name.removeprefix("no_")
    return (off, False) if value is True and off != name and name not in TABLE and off in TABLE else (name, value)


def _parse_file(document: Document) -> CollectedKeys:
    """Return the keys of one file under transformers' names, and the dialect that it was written in."""
    values, origin = dict(document.values), document.origin
    if len(values.keys() & FACTORY_V1_SIGNS) >= 2:
        raise UserError(
            f"{origin}: a config of LLaMA-Factory's v1 trainer, whose keys are not read; use those of "
            "`llamafactory-cli train` (model_name_or_path, finetuning_type, cutoff_len, per_device_train_batch_size)"
        )
    if "distributed_type" in values:
        return CollectedKeys(flatten({"accelerate": values}, origin=origin))
    if values.keys() & DEEPSPEED_SIGNS and not values.keys() & {"per_device_train_batch_size"}:
        return CollectedKeys(_read_deepspeed(values, origin))
    dialect = next((known_dialect for known_dialect in DIALECTS if len(values.keys() & known_dialect.signs) >= 2), None)
    if dialect is None:
        nested = values.pop("deepspeed", None) if isinstance(values.get("deepspeed"), dict) else None
        given = {_normalize_argument(key): value for key, value in flatten(values, origin=origin).items()}
        return CollectedKeys(given | (_read_deepspeed(nested, origin) if nested else {}))
    if dialect is SWIFT:
        return _collect_swift(values, document, {}, method=None)
    return CollectedKeys(translate(values, dialect, origin=origin), dialect)


def translate(values: dict[str, Any], dialect: Dialect, *, origin: str) -> dict[str, Any]:
    """Translate a dialect's keys to names of TrainingArguments and accelerate; add its unmodelled defaults."""
    translated_values: dict[str, Any] = dict(dialect.implied_values)
    fsdp = values.pop("fsdp_config") if isinstance(values.get("fsdp_config"), dict) else None  # else not modelled
    version = values.pop("fsdp_version", None)
    for key, value in flatten(values, origin=origin).items():
        if value is None and (key, None) not in dialect.words:  # an empty key counts as left out
            continue
        name, value = dialect.words.get((key, value) if _is_hashable(value) else ("", None), (key, value))
        name = dialect.names.get(name, name)
        name, value = dialect.words.get((name, value) if _is_hashable(value) else ("", None), (name, value))
        translated_values[name] = value
    version = None if str(version).lower() in ("none", "null") else 0 if str(version).lower() == "false" else version
    if version is not None and not version:  # off, as Axolotl reads it: with or without fsdp_config
        translated_values["fsdp_version"] = version
    if fsdp or version:
        translated_values["accelerate.distributed_type"] = "FSDP"
        for key, value in (fsdp or {}).items():
            translated_values[f"accelerate.fsdp_config.{key if key.startswith('fsdp_') else f'fsdp_{key}'}"] = value
        if version:
            translated_values["accelerate.fsdp_config.fsdp_version"] = version
    return translated_values


def _is_hashable(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | type(None))


def _normalize_argument(key: str) -> str:
    """Return the name of an argument with underscores, and with one name for the length of sequences."""
    name = key.replace("-", "_")
    name = {
        "per_device_batch_size": "per_device_train_batch_size",
        "model": "model_name_or_path",
        "use_liger": "use_liger_kernel",
        "evaluation_strategy": "eval_strategy",
    }.get(name, name)
    return "max_length" if name in SEQUENCE else name


def _read_deepspeed(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return DeepSpeed's keys without those that ``auto`` leaves to the trainer; some follow from the model's width.

    Of keys that no trainer fills, DeepSpeed takes its default for ``auto`` in the section of ZeRO (its
    ``DeepSpeedConfigModel`` drops the value), and does not start with it elsewhere, which is a ``UserError``. A
    size of stage 3 has two names there (``populate_by_name``); it is returned under ``stage3_…``, that of the table.
    """
    nested = flatten({"deepspeed": dict(values)}, origin=origin)
    given = {
        key: value
        for key, value in nested.items()
        if value != "auto"
        or not (key in FILLED_BY_TRAINER or (key.startswith(ZERO_SECTION) and key not in DERIVED_FROM_WIDTH))
    }
    for alias, name in STAGE_3.items():
        if (key := f"{ZERO_SECTION}{name}") in given:
            given[f"{ZERO_SECTION}{alias}"] = given.pop(key)
    for key, value in given.items():
        meaning = TABLE.get(key)
        if value == "auto" and key not in DERIVED_FROM_WIDTH and meaning is not None and meaning.default != "auto":
            raise UserError(
                f'{origin}: {key.removeprefix("deepspeed.")}="auto" is filled by neither transformers nor accelerate, '
                "and DeepSpeed does not start with it; give its value or leave the key out"
            )
    return given


def find_file_above(name: str, document: Document) -> Path | None:
    """Return the path of a file that a config names from where it is, from a folder above, or from where it is run."""
    return find_file(document, name, folders=[*list(document.folder.parents)[:3], Path()])


def find_config_file(name: str, document: Document) -> Path | None:
    """Return the path of a config that another one names, as ``find_file_above`` does.

    Else that of one next to it with the last part of the name, of configs that name all files from one folder.
    """
    return find_file_above(name, document) or find_file(document, Path(name).name)


def _load(name: str, document: Document) -> Document:
    """Load a file that a config names; raises ``UserError`` if it is missing."""
    if (path := find_config_file(name, document)) is None:
        raise UserError(f"{document.origin}: names {name}, which does not exist; put it next to this file")
    return read_named(document, path)


def find_strategy(given: dict[str, Any]) -> str:
    """Return ``deepspeed``, ``fsdp`` or ``ddp``."""
    kind = str(given.get("accelerate.distributed_type", ""))
    if kind == "DEEPSPEED" or given.get("deepspeed") or any(key.startswith("deepspeed.") for key in given):
        return "deepspeed"
    return "fsdp" if kind == "FSDP" or given.get("fsdp") else "ddp"
