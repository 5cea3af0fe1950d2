"""Machines in words: of the catalog, of a file, or what was calibrated here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.machine.spec import Machine


def load_machine(text: str) -> Machine:
    """The machine that ``text`` names."""
    from fivefold.machine.catalog import resolve

    return resolve(text, local=local_file())


def local_file() -> Path:
    """The file that ``local`` means."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fivefold" / "local.toml"
