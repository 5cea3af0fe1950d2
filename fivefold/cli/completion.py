"""What the shell completes: names of models, machines, precisions, stacks and formats, words of a layout.

``fivefold --install-completion`` sets it up for bash, zsh, fish or PowerShell.
"""

from __future__ import annotations


def models(incomplete: str) -> list[str]:
    """Names of the catalog."""
    from fivefold.model.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def machines(incomplete: str) -> list[str]:
    """Names of the catalog, and this computer."""
    from fivefold.machine.catalog import ROWS

    return [name for name in (*ROWS, "local") if name.startswith(incomplete)]


def precisions(incomplete: str) -> list[str]:
    """Names of recipes."""
    from fivefold.job import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def stacks(incomplete: str) -> list[str]:
    """Complete the name of a stack."""
    from fivefold.stack.catalog import STACKS

    return [name for name in STACKS if name.startswith(incomplete)]


def formats(incomplete: str) -> list[str]:
    """Return the names of formats that ``write`` writes."""
    from fivefold.interop.registry import list_written

    return [name for name in list_written() if name.startswith(incomplete)]


def layouts(incomplete: str) -> list[str]:
    """The next word of a layout, after the words that are there."""
    from fivefold.layout.schedule.pipeline_schedule import SCHEDULES

    before, space, word = incomplete.rpartition(" ")
    known = [*(f"{axis}{degree}" for axis in ("dp", "tp", "pp", "cp", "ep") for degree in (2, 4, 8, 16, 32, 64)),
             *(f"zero{stage}" for stage in (1, 2, 3)), *(f"mbs{size}" for size in (1, 2, 4, 8)), "v2", "v4",
             "ac=selective", "ac=full", "cp=ulysses", "nosp", *SCHEDULES]  # fmt: skip
    return [before + space + each for each in known if each.startswith(word)]
