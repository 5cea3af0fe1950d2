"""The costs of each optimizer: what its update stores, moves, sends and multiplies.

cost    the interface, and the costs of an optimizer by name       sharded_weight   a weight and its piece on a rank
costs/  one module for each optimizer, with the name that a job uses
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules

# The modules are listed, not imported: they import the records of a job, which need these names first.
KINDS = tuple(module.name for module in iter_modules([str(Path(__file__).parent / "costs")]))
