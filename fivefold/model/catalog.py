"""Models by name: of the catalog, a file, or a Hugging Face repository with the config of a catalog model.

Models are built on demand from the entries of ``published.py``, so that importing the catalog is cheap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, warn
from fivefold.model.huggingface.read import describe_remark, from_config
from fivefold.model.published import CATALOG, VERSIONS, CatalogEntry, is_repository
from fivefold.model.spec import CONFIG_SOURCE, Model
from fivefold.spelling import find_spelling, join_names, make_unknown_name_error
from fivefold.text_files import locate, read_file

# Endings of repositories whose config.json has the sizes of the model without them, as they are spelled.
TUNED_ENDINGS = ("", "-hf", "-Base", "-Instruct", "-Chat", "-chat", "-it", "-pt", "-chat-hf", "-Instruct-hf")
# Further endings of those whose weights are quantized, in lower case, and how
QUANTIZED_ENDINGS = {
    "-unsloth-bnb-4bit": "nf4", "-bnb-4bit": "nf4", "-bnb-nf4-bf16": "nf4", "-bnb-8bit": "int8", "-fp8": "fp8",
    "-nvfp4": "nvfp4", "-gptq": "gptq", "-gptq-int4": "gptq", "-gptq-int8": "gptq", "-awq": "awq",
}  # fmt: skip
# How the weights of models of the catalog are stored in their own repositories, where these are in few bits
PUBLISHED_IN_FEW_BITS = {
    "gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "deepseek-v3": "fp8", "deepseek-v3-mtp": "fp8",
    "deepseek-v3-0324": "fp8",
    "deepseek-v3.1": "fp8", "deepseek-r1": "fp8", "deepseek-r1-0528": "fp8",
}  # fmt: skip
THINKING = ("Qwen3-VL-", "Qwen3-Next-")  # whose -Thinking has the config of -Instruct
_ADDRESS = re.compile(r"https?://(www\.)?(huggingface\.co|hf\.co)/(?P<repository>[\w.-]+/[\w.-]+)(/.*)?")


def list_names() -> list[str]:
    """Return the names of the catalog's models, in its order."""
    return list(CATALOG)


@cache
def build_model(name: str) -> Model:
    """Build the catalog model ``name``; a ``UserError`` suggests the nearest names."""
    if name not in CATALOG:
        raise make_unknown_name_error(name, _list_family(name), kind="model")
    entry = CATALOG[name]
    source = f"{CONFIG_SOURCE} {entry.source}" if entry.repository else entry.source
    source += f"; as written in {entry.also}" if entry.also else ""
    return from_config(entry.config, name=name, source=source)


def resolve(text: str, *, find: Callable[[str], Path] = Path) -> Model:
    """Build the model that ``text`` names: of the catalog, a file, or a Hugging Face repository of a catalog model.

    A repository's name is enough without its owner, and so is the beginning of a name that fits models of one size; the
    address of a repository, or of a file in it, is its name. ``find`` maps a path in ``text`` to the file. A ``.json``
    with ``architectures`` or ``model_type`` is a Hugging Face config (a folder: its ``config.json``); any other
    ``.json`` or ``.toml`` holds the fields of ``Model``. Raises ``UserError``; warns (``UsageWarning``) which model the
    beginning of a name stands for, and about keys that may change the model but that its family does not read.
    """
    if text in CATALOG:
        return build_model(text)
    if address := _ADDRESS.fullmatch(text):
        text = address["repository"]
    path = find(text)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError:  # such as a name that is longer than a file's can be
        is_folder = is_file = False
    if text and is_folder:
        path /= "config.json"
    if path.suffix not in (".json", ".toml"):
        if is_file:
            raise UserError(f"{text}: a model file ends in .json or .toml")
        if published := find_published(text) or find_published(_find_spoken_name(text)) or _complete_name(text):
            return published
        if not is_repository(text):
            error = make_unknown_name_error(text, _list_family(text), kind="model")
            raise UserError(f"{error}; or name the folder of its config.json")
        similar = f" (similar: {join_names(close, 'and')})" if (close := list_similar(text)) else ""
        raise UserError(
            f"unknown model {text!r}: not a repository of the catalog{similar}, and Fivefold downloads nothing. Save "
            f"its config by `hf download {text} config.json --local-dir DIR` and name DIR/config.json"
        )
    return from_values(read_file(path), name=name_model(path), source=text)


def name_model(path: Path) -> str:
    """Return the name of the model in a file, or of a catalog name or repository: a config.json has its folder's."""
    if path.name == "config.json":
        return path.resolve().parent.name
    return path.stem if path.suffix in (".json", ".toml") else path.name


def find_name(model: Model) -> str | None:
    """Return the catalog name or the repository by which ``resolve`` returns this model; None if there is none."""
    names = filter(None, (model.repository, model.name))
    return next((name for name in names if find_published(name) == model), None)


def find_published(text: str) -> Model | None:
    """Return the model that a catalog name, or the name of a Hugging Face repository with its config, stands for.

    Any owner may hold a copy. Base and instruction-tuned versions have the same sizes; ``Model.repository`` keeps which
    of them was named. Returns None for all other names, however close.
    """
    if text in CATALOG:
        return build_model(text)
    owner, _, tail = text.rstrip("/").rpartition("/")
    name = find_repository(tail)
    if name is None:
        return _find_quantized(owner, tail)
    entry, model = CATALOG[name], build_model(name)
    if version := next((version for version in VERSIONS if tail.lower() in _list_versions(version)), None):
        model = model.replace(name=version, positions=VERSIONS[version].positions or model.positions)
    repository = f"{owner}/{tail}" if owner else _list_spellings(name, entry)[tail.lower()]
    return model if repository.lower() == (entry.repository or "").lower() else model.replace(repository=repository)


def find_stored_format(model: Model) -> str:
    """Return how the repository of a model stores its weights, as ``Model.quantization``; empty if in 16 bits."""
    return model.quantization or ("" if model.repository else PUBLISHED_IN_FEW_BITS.get(model.name, ""))


def _find_quantized(owner: str, tail: str) -> Model | None:
    """Return the model of a repository that is named like that of a catalog model, with an ending of its quantization.

    Such as ``unsloth/Llama-3.2-3B-Instruct-bnb-4bit``. Returns None if there is none.
    """
    ending = next((ending for ending in QUANTIZED_ENDINGS if tail.lower().endswith(ending)), None)
    base = find_published(tail[: -len(ending)]) if ending and owner else None
    if base is None or ending is None:
        return None
    return base.replace(repository=f"{owner}/{tail}", quantization=QUANTIZED_ENDINGS[ending])


def find_repository(text: str) -> str | None:
    """Return the catalog's name of the model with the config of the Hugging Face repository ``text``, or None."""
    tail = text.rstrip("/").rpartition("/")[2].lower()
    return next((name for name, entry in CATALOG.items() if tail in _list_spellings(name, entry)), None)


def _find_spoken_name(text: str) -> str:
    """Return the name of a model or of its repository that ``text`` is but for spaces and dashes, or ``text``.

    ``Llama 3 8B`` is llama3-8b, and ``Llama 3.1 405B Instruct`` is llama-3.1-405b-instruct.
    """
    name = find_spelling(text, CATALOG)
    if name in CATALOG:
        return name
    return find_spelling(text, [spelling for key, entry in CATALOG.items() for spelling in _list_spellings(key, entry)])


def _complete_name(text: str) -> Model | None:
    """Return the model whose name begins with ``text``, up to a dash, and warn which it is; None if there is no one.

    ``smollm3`` is smollm3-3b, and ``command-a`` is command-a-111b. Of models of one size it is the first:
    ``qwen3-235b`` is qwen3-235b-a22b.
    """
    beginnings = _spell_version(text)
    names = [
        name
        for name in (*CATALOG, *VERSIONS)
        if any(spelling.startswith(f"{beginning}-") for spelling in _spell_version(name) for beginning in beginnings)
        or _read_family(name) in beginnings
    ]
    models = [model for name in names if (model := find_published(name))]
    if len({(model.parameters, model.layers) for model in models}) != 1:
        return None
    others = [name for name in names[1:] if name in CATALOG or names[0] in VERSIONS]
    size = f"{join_names(others, 'and')} have the same size" if others[1:] else f"{''.join(others)} has the same size"
    warn(f"{text!r} is taken as {names[0]}" + (f" ({size})" if others else ", the only model whose name begins so"))
    return models[0]


def _spell_version(name: str) -> set[str]:
    """Return the name in lower case, with dashes for spaces, and without a dash before its version: ``gpt3``."""
    dashed = re.sub(r"[\s_]", "-", name.lower())
    return {dashed, re.sub(r"^([a-z.]+)-(?=\d)", r"\1", dashed)}


def _list_family(text: str) -> list[str]:
    """Return the models of the family that ``text`` begins with, or else of those that are spelled most like it."""
    families: dict[str, list[str]] = {}
    for name in (*CATALOG, *VERSIONS):
        if name in CATALOG or _read_family(name) != _read_family(VERSIONS[name].model):
            families.setdefault(_read_family(name), []).append(name)
    family = _read_family(text.rpartition("/")[2])
    similar = [family] if family in families else get_close_matches(family, families, cutoff=0.7)
    return [name for spelling in similar for name in families[spelling]]


def _read_family(name: str) -> str:
    """Return the first word of a model's name without its version: ``qwen3.5-35b-a3b`` is a ``qwen``."""
    return re.split(r"[\s_-]", name.lower())[0].rstrip(".0123456789")


def list_similar(text: str) -> list[str]:
    """Return the up to three catalog models of the family of ``text`` whose names or repositories are nearest to it."""
    word = text.rstrip("/").rpartition("/")[2].lower()
    family = set(_list_family(word))
    spellings = {
        spelling: name for name in CATALOG if name in family for spelling in _list_spellings(name, CATALOG[name])
    }
    close = get_close_matches(word, spellings, n=12, cutoff=0.6)
    return list(dict.fromkeys(spellings[spelling] for spelling in close))[:3]


def _list_versions(version: str) -> list[str]:
    """Return the names of repositories of a version and of what was tuned from it."""
    return [f"{version}{ending.lower()}" for ending in TUNED_ENDINGS]


def _list_spellings(name: str, entry: CatalogEntry) -> dict[str, str]:
    """Return the names, in lower case and without an owner, of repositories with the config of a catalog model.

    Each comes with the repository that it means when no owner is given; an empty one if the catalog names none.
    """
    if name in ("nano", "tiny"):  # Fivefold's own
        return {}
    owner, _, tail = (entry.repository or name).rpartition("/")
    base = re.sub(r"-(hf|base|instruct|pt)$", "", tail, flags=re.IGNORECASE)
    stem = base.lower().removeprefix("meta-")
    stems = {name, stem, re.sub(r"^([a-z]+)-(?=\d)", r"\1", stem)}
    prefixes = ("", "meta-") if stem.startswith("llama-") else ("",)
    spellings: dict[str, str] = {}
    for ending in (*TUNED_ENDINGS, *(["-Thinking"] if base.startswith(THINKING) else [])):
        repository = f"{owner}/{base}{ending}" if owner and ending else entry.repository or ""
        spellings |= {f"{prefix}{stem}{ending.lower()}": repository for prefix in prefixes for stem in stems}
    for kind in ("Base", "Instruct", "Thinking"):  # such as Qwen3-4B-Instruct-2507
        dated = re.sub(r"-(Base|Instruct)-(?=\d)", f"-{kind}-", tail)
        spellings[dated.lower()] = f"{owner}/{dated}" if owner else ""
    for version, (first, _) in VERSIONS.items():
        if first == name:
            spellings |= dict.fromkeys(_list_versions(version), "")
    return spellings | {tail.lower(): entry.repository or ""}


def locate_model(text: str, *, named_in: Path) -> str:
    """Resolve a model named in the file ``named_in``: a catalog name stays, a path is relative to that file."""
    return text if text in CATALOG else locate(text, named_in=named_in)


def from_values(values: dict[str, Any], *, name: str, source: str) -> Model:
    """Build the model of a Hugging Face config, or of our own fields, as ``resolve`` reads them from a file."""
    if "architectures" in values or "model_type" in values:
        model = from_config(values, name=name, source=source)
        if warning := describe_remark(values, name=name):
            warn(warning)
        return model
    return Model.read({"name": name, "source": source, **values}, origin=source)
