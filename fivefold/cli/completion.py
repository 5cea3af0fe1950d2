"""Shell completion: names of the catalogs, formats and settings, and keywords of a layout.

``fivefold --install-completion [SHELL]`` installs it for bash, zsh, fish or PowerShell, by default the current shell.
"""

from __future__ import annotations

from typing import get_args


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a model of the catalog."""
    from fivefold.model.published import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def complete_machine(incomplete: str) -> list[str]:
    """Complete the name of a machine of the catalog, or ``local``."""
    from fivefold.machine.catalog import ROWS

    return [name for name in (*ROWS, "local") if name.startswith(incomplete)]


def complete_question(incomplete: str) -> list[str]:
    """Complete a question of ``ask``."""
    from fivefold.requests.commands import QUESTION_SYNONYMS, Question

    return [name for name in (*get_args(Question), *QUESTION_SYNONYMS) if name.startswith(incomplete)]


def complete_precision(incomplete: str) -> list[str]:
    """Complete the name of a precision recipe."""
    from fivefold.job import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def complete_adapter(incomplete: str) -> list[str]:
    """Complete an adapter of a usual rank."""
    from fivefold.adapter import ADAPTERS

    names = [f"{kind}:{rank}" for kind in ADAPTERS for rank in (8, 16, 32, 64)]
    return [name for name in names if name.startswith(incomplete)]


def complete_optimizer(incomplete: str) -> list[str]:
    """Complete the name of an optimizer."""
    from fivefold.optimizers import KINDS

    return [name for name in KINDS if name.startswith(incomplete)]


def complete_stack(incomplete: str) -> list[str]:
    """Complete the name of a stack."""
    from fivefold.stack.catalog import STACKS

    return [name for name in STACKS if name.startswith(incomplete)]


def complete_format(incomplete: str) -> list[str]:
    """Complete the name of a format that ``write`` supports."""
    from fivefold.interop.registry import list_written

    return [name for name in list_written() if name.startswith(incomplete)]


def complete_layout(incomplete: str) -> list[str]:
    """Complete the last keyword of a layout."""
    from fivefold.layout.schedule.pipeline_schedule import SCHEDULES

    previous_keywords, space, typed = incomplete.rpartition(" ")
    keywords = [
        *(f"{axis}{degree}" for axis in ("dp", "tp", "pp", "cp", "ep") for degree in (2, 4, 8, 16, 32, 64)),
        *(f"zero{stage}" for stage in (1, 2, 3)),
        *(f"mbs{size}" for size in (1, 2, 4, 8)),
        "v2",
        "v4",
        "ac=selective",
        "ac=full",
        "cp=ulysses",
        "nosp",
        *SCHEDULES,
    ]
    return [previous_keywords + space + keyword for keyword in keywords if keyword.startswith(typed)]


def complete_setting(incomplete: str) -> list[str]:
    """Complete the key of a user setting."""
    from fivefold.machine.catalog import ROWS
    from fivefold.requests.settings import KEYS

    keys = [*(key for key in KEYS if key != "prices.NAME"), *(f"prices.{name}" for name in ROWS)]
    return [key for key in keys if key.startswith(incomplete)]


def complete_json_command(incomplete: str) -> list[str]:
    """Complete the name of a command that prints JSON."""
    from fivefold.requests.output_schemas import OUTPUTS

    return [name for name in OUTPUTS if name.startswith(incomplete)]
