"""nanotron's YAML as values of its keys: the names of 0.4 become those of its main branch."""

from __future__ import annotations

from fivefold.interop.format import Asked, Document, ParsedConfig
from fivefold.interop.keys import Values, flat
from fivefold.interop.nanotron.keys import FACTORY, OPTIMIZER, TABLE, VERSION, F

TABLES = {"parallelism", "tokens", "optimizer", "model", "general"}


def is_nanotron(document: Document) -> bool:
    """Return whether a YAML has nanotron's tables."""
    if document.kind != "yaml" or "parallelism" not in document.values:
        return False
    model = document.values.get("model")
    named = isinstance(model, dict) and "model_config" in model
    return named or len(document.values.keys() & TABLES) >= 4


def parse(document: Document, asked: Asked) -> ParsedConfig:
    """Return the values of a YAML's keys."""
    given = {_now(key): value for key, value in flat(document.values, origin=document.origin).items()}
    values = Values(TABLE, given, origin=document.origin, software="nanotron", version=VERSION)
    return ParsedConfig(document, values, model=asked.model)


def _now(key: str) -> str:
    """A key of 0.4 as the main branch has it."""
    name = key.removeprefix(OPTIMIZER)
    return f"{F}{name}" if key.startswith(OPTIMIZER) and name in FACTORY else key
