"""Models, machines and layouts in other words, as people write them; each means the same as the text that it is of."""

from __future__ import annotations

import random
import re

from fivefold.machine.catalog import list_names

_COUNTED = re.compile(r"(dp|tp|cp|pp|ep|etp|v|mbs|zero)(\d+)")


def respell_model(rng: random.Random, name: str) -> str:
    """Return a name of the catalog with spaces, or in another case: ``Llama3 8B``."""
    return rng.choice((name.upper(), name.replace("-", " "), name.replace("-", "_"), name.replace("-", " ").title()))


def respell_machine(rng: random.Random, chip: str, ranks: int) -> str:
    """Return a number of GPUs of a chip as ``2x8 H100``, ``16 H100s`` or ``HGX H100:16``."""
    nodes = rng.choice([count for count in (1, 2, 4, 8) if ranks % count == 0])
    forms = (
        f"{chip}x{ranks}",
        f"{ranks}*{chip.upper()}",
        f"{ranks} {chip}" if f"{chip}s" in list_names() else f"{ranks} {chip}s",  # 8 L40S are not the plural of L40
        f"{ranks} {chip.upper()} GPUs",
        f"HGX {chip}:{ranks}",
        f"NVIDIA {chip}:{ranks}",
        f"{nodes}x{ranks // nodes} {chip.upper()}",
        f"{nodes} nodes of {ranks // nodes} {chip}",
    )
    return rng.choice(forms)


def respell_layout(rng: random.Random, text: str) -> str:
    """Return a layout as ``DP 8 TP 2``, ``tp8/pp4``, ``pp4 vpp2`` or ``dp8 + fsdp``."""
    tokens = text.split()
    result = ""
    for place, token in enumerate(tokens):
        if not (match := _COUNTED.fullmatch(token)):
            result += f" {token}"
            continue
        word, number = match.groups()
        spellings = [token, f"{word}={number}", f"{word} {number}", token.upper()]
        spellings += {"v": [f"vpp{number}", f"VPP {number}"], "zero": [f"ZeRO-{number}"]}.get(word, [])
        spellings += {"zero0": ["ddp"], "zero3": ["fsdp", "FSDP2"]}.get(token, [])
        is_joined = place > 0 and _COUNTED.fullmatch(tokens[place - 1])
        result += rng.choice((" ", ", ", *(("/", " / ", "-", " + ") if is_joined else ()))) + rng.choice(spellings)
    return result.removeprefix(",").strip()
