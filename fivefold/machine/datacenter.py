"""Site facts for the cost of a full run: failures, restarts, storage, evaluation, power and the grid.

Each figure has a source and the range of published values; ``--assume NAME=VALUE`` changes one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pydantic import Field, NonNegativeFloat, PositiveFloat

from fivefold.errors import UserError
from fivefold.record import Record
from fivefold.spelling import make_unknown_name_error

# gCO2e per kWh of electricity, life cycle, 2023: Ember, by ourworldindata.org/grapher/carbon-intensity-electricity;
# the world: Ember, by Statista 943137.
GRIDS: Mapping[str, float] = {
    "world": 481, "australia": 549, "austria": 111, "belgium": 138, "brazil": 98, "canada": 170, "chile": 291,
    "china": 582, "denmark": 152, "finland": 79, "france": 56, "germany": 381, "india": 713, "ireland": 291,
    "norway": 30,
}  # fmt: skip


class Site(Record):
    """The site of a run: how often machines fail, how fast a run restarts, and its power besides that of the chips."""

    failures: NonNegativeFloat = 0.47  # unexpected interruptions per 1,000 GPU-days
    restart_seconds: NonNegativeFloat = 600.0  # from a failure until the run resumes training
    storage: PositiveFloat = 1e9  # bytes/s at which a node writes a checkpoint
    to_host: PositiveFloat = 20e9  # bytes/s at which a GPU copies to host memory, while training waits
    pause_seconds: NonNegativeFloat = 1.0  # minimum wait of training at each checkpoint
    checkpoint_seconds: PositiveFloat | None = None  # between checkpoints; None: the interval that loses the least
    evaluation: float = Field(0.01, ge=0, lt=1)  # time of evaluation over that of training
    node_power: float = Field(1.5, ge=1)  # power of a node over that of its chips
    pue: float = Field(1.2, ge=1)  # power usage effectiveness: power of the building over that of its nodes
    grid: str = "world"
    carbon: NonNegativeFloat = GRIDS["world"]  # gCO2e per kWh


class Known(NamedTuple):
    """The source of a figure; ``low`` and ``high``: range of published values."""

    words: str
    low: float | None
    high: float | None
    source: str


SOURCES: Mapping[str, Known] = {
    "failures": Known(
        "failures per 1,000 GPU-days", 0.29, 0.81,
        "419 of 16,384 H100 in 54 days (Llama 3, arXiv:2407.21783 §3.3.4); 2.34 and 6.50 per 1,000 days of nodes of 8 "
        "(two clusters of Meta, arXiv:2410.21680)",
    ),
    "restart": Known(
        "time until training continues after a failure", 300.0, 1500.0,
        "less than 10 min to find and isolate it, 15 min to catch up (MegaScale, arXiv:2402.15627)",
    ),
    "storage": Known(
        "checkpoint bandwidth of a node", 1e9, 3.4e9,
        "2 TB/s sustained, at most 7 TB/s, for 16,384 GPUs (Llama 3, ibid. §3.3.1)",
    ),
    "pause": Known(
        "shortest wait of training for a checkpoint", None, None, "our assumption; a GPU copies 20 GB/s to its host"
    ),
    "evaluation": Known("time of evaluation, relative to training", None, None, "our assumption"),
    "node": Known(
        "power of a node relative to its chips", 1.38, 1.82,
        "eight H100 of 700 W draw at most 8.4 kW in training and are rated 10.2 kW (arXiv:2412.08602); 76 % of "
        "the rating (arXiv:2506.14551)",
    ),
    "pue": Known("power of the building relative to its nodes", 1.1, 1.56, "1.2 at Jean Zay (BLOOM, arXiv:2211.02001)"),
    "grid": Known("gCO2e per kWh", None, None, "Ember, life cycle, 2023"),
}  # fmt: skip


def apply_assumptions(words: str | Sequence[str]) -> Site:
    """Return a site with some figures changed: ``["failures=2", "grid=france", "checkpoint=30min"]``, or one word."""
    values: dict[str, object] = {}
    for word in [words] if isinstance(words, str) else words:
        key, equals, text = word.partition("=")
        if key not in READ:
            raise make_unknown_name_error(key, list(READ), kind="assumption")
        if not equals or not text:
            raise UserError(f"--assume {word!r} is not NAME=VALUE; write for example failures=2 or grid=france")
        try:
            values |= READ[key](text)
        except ValueError as error:
            raise UserError(f"--assume {word} {error}") from None
    return Site.read(values, origin="--assume")


def parse_seconds(text: str) -> float:
    """Parse ``10min`` to seconds; ``ValueError`` for text that is not a time."""
    return _parse_quantity(text, {"s": 1, "min": 60, "h": 3600, "d": 86400}, such="90s, 30min, 2h or 30d")


def _parse_quantity(text: str, units: Mapping[str, float], *, such: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([A-Za-z]+)", text)
    if match is None or match[2] not in units:
        raise ValueError(f"is not a number and a unit; write for example {such}")
    return float(match[1]) * units[match[2]]


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise ValueError("is not a number; write for example 1.2")
    return float(text)


def _parse_checkpoint(text: str) -> dict[str, object]:
    return {"checkpoint_seconds": None if text == "best" else parse_seconds(text)}


def _parse_grid(text: str) -> dict[str, object]:
    if text.lower() in GRIDS:
        return {"grid": text.lower(), "carbon": GRIDS[text.lower()]}
    if not text[:1].isdigit():
        raise ValueError(f"is not a known grid; write gCO2e per kWh, such as 350, or one of {', '.join(GRIDS)}")
    return {"grid": "as stated", "carbon": _number(text)}


READ: Mapping[str, Callable[[str], dict[str, object]]] = {
    "failures": lambda text: {"failures": _number(text)},
    "restart": lambda text: {"restart_seconds": parse_seconds(text)},
    "storage": lambda text: {"storage": _parse_quantity(text, {"MB": 1e6, "GB": 1e9, "TB": 1e12}, such="2GB")},
    "checkpoint": _parse_checkpoint,
    "pause": lambda text: {"pause_seconds": parse_seconds(text)},
    "evaluation": lambda text: {"evaluation": _number(text)},
    "node": lambda text: {"node_power": _number(text)},
    "pue": lambda text: {"pue": _number(text)},
    "grid": _parse_grid,
}
