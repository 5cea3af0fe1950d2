"""Resolves machines by name: from the catalog, from a file, or as calibrated on this computer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import UserError

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine


def load_machine(text: str) -> Machine:
    """Return the machine that ``text`` names."""
    from fivefold.machine.catalog import resolve

    return resolve(text, local=find_local_machine_file())


def check_is_model(word: str | None) -> None:
    """Raise ``UserError`` if the word in the place of the model is a machine, as in ``plan h100:64``."""
    from fivefold.machine.catalog import is_named

    if word is not None and is_named(word) and not Path(word).suffix and not Path(word).exists():
        raise UserError(f"{word!r} is a machine; write the model before it, such as llama3-8b {word}")


def find_local_machine_file() -> Path:
    """Return the path of the machine file that ``local`` stands for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fivefold" / "local.toml"
