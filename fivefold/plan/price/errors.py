"""The relative error to expect of a prediction, by class of run, from how far predictions were from published runs.

``errors.csv`` is written by ``fivefold published`` (check/published/regimes.py): the mean over sources of each one's
mean absolute relative error. "*" matches anything; the most specific row that matches is used.
"""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from fivefold.layout.spec import Layout
from fivefold.machine.spec import Machine
from fivefold.model.spec import Model

TABLE = Path(__file__).with_name("errors.csv")


class Regime(NamedTuple):
    """A class of runs with one expected error, e.g. ``a100 pipeline dense``."""

    chip: str
    shape: str  # pipeline, flat
    kind: str  # moe, dense

    def wider(self) -> tuple[Regime, ...]:
        """This class and those that include it, the most specific first."""
        return (self, self._replace(chip="*"), Regime("*", "*", self.kind), Regime("*", "*", "*"))


def regime(*, model: Model, machine: Machine, layout: Layout) -> Regime:
    """The class to which a run belongs."""
    return Regime(machine.chip.name, "pipeline" if layout.pp > 1 else "flat", "moe" if model.moe else "dense")


def expected_error(
    *, model: Model, machine: Machine, layout: Layout, quantity: Literal["time", "peak"], path: Path = TABLE
) -> float | None:
    """Relative error to expect of ``quantity``; None on CPUs, for which nothing is published, or without the table."""
    if machine.backend != "nccl":
        return None
    known = _read(path)
    here = regime(model=model, machine=machine, layout=layout)
    return next((known[*words, quantity] for words in here.wider() if (*words, quantity) in known), None)


@lru_cache(maxsize=4)
def _read(path: Path) -> dict[tuple[str, str, str, str], float]:
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["chip"], row["shape"], row["kind"], row["quantity"]): float(row["error"]) for row in rows}
