"""Resolves machines by name: from the catalog, from a file, or as calibrated on this computer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine


def load_machine(text: str) -> Machine:
    """Return the machine that ``text`` names."""
    from fivefold.machine.catalog import resolve

    return resolve(text, local=find_local_machine_file())


def find_local_machine_file() -> Path:
    """Return the path of the machine file that ``local`` stands for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fivefold" / "local.toml"
