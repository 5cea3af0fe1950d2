"""What each update rule stores, moves, sends and multiplies, and its name in a job.

cost    the interface       sharded_weight   a weight and its piece on a rank
costs/  one module for each optimizer, which has its name
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.optimizers.cost import OptimizerCost

# The modules are listed, not imported: the records of a job, which they price, need the names first.
KINDS = tuple(module.name for module in iter_modules([str(Path(__file__).parent / "costs")]))


@cache
def find_cost(kind: str) -> OptimizerCost:
    """Return the costs of an optimizer that a job can name."""
    cost: OptimizerCost = import_module(f"{__name__}.costs.{kind}").COST
    return cost
