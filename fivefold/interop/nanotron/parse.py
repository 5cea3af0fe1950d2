"""Parse nanotron's YAML into values of its keys; names of 0.4 become those of its main branch."""

from __future__ import annotations

from fivefold.interop.format import Document, Overrides, ParsedConfig
from fivefold.interop.keys import Values, flatten
from fivefold.interop.nanotron.keys import FACTORY, OPTIMIZER, TABLE, VERSION, F

TABLES = {"parallelism", "tokens", "optimizer", "model", "general"}


def is_nanotron(document: Document) -> bool:
    """Return whether a YAML has nanotron's tables."""
    if document.kind != "yaml" or "parallelism" not in document.values:
        return False
    model = document.values.get("model")
    has_model_config = isinstance(model, dict) and "model_config" in model
    return has_model_config or len(document.values.keys() & TABLES) >= 4


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the values of a YAML's keys."""
    given = {_rename_key(key): value for key, value in flatten(document.values, origin=document.origin).items()}
    values = Values(TABLE, given, origin=document.origin, software="nanotron", version=VERSION)
    return ParsedConfig(document, values, model=overrides.model)


def _rename_key(key: str) -> str:
    """Return the main branch's name of a key of 0.4."""
    name = key.removeprefix(OPTIMIZER)
    return f"{F}{name}" if key.startswith(OPTIMIZER) and name in FACTORY else key
