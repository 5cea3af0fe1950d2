"""Parse torchtitan 0.2's TOML files into values of its keys."""

from __future__ import annotations

from fivefold.interop.format import Document, Overrides, ParsedConfig
from fivefold.interop.keys import Values, flatten
from fivefold.interop.torchtitan_toml.keys import RENAMED_KEYS, TOML, VERSION

TABLES = {"training", "parallelism", "activation_checkpoint", "lr_scheduler", "model", "job", "optimizer"}


def is_torchtitan_toml(document: Document) -> bool:
    """Return whether a TOML file has torchtitan's tables."""
    tables = {key for key, value in document.values.items() if isinstance(value, dict)}
    if document.kind != "toml" or "model" not in tables:
        return False
    return "flavor" in document.values["model"] or len(tables & TABLES) >= 3


def parse(document: Document, overrides: Overrides) -> ParsedConfig:
    """Return the values of a TOML file's keys."""
    origin = document.origin
    given = {RENAMED_KEYS.get(key, key): value for key, value in flatten(document.values, origin=origin).items()}
    for key in [key for key in given if key == "model.converters" or key.endswith("fqns")]:
        if isinstance(names := given[key], str):
            given[key] = [name.strip() for name in names.split(",") if name.strip()]
    values = Values(TOML, given, origin=origin, software="torchtitan", version=VERSION)
    return ParsedConfig(document, values, model=overrides.model)
