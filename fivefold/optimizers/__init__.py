"""What each update rule stores, moves, sends and multiplies, and its name in a job.

cost    the interface, and the costs of an optimizer by its name       sharded_weight   a weight and its piece on a rank
costs/  one module for each optimizer, which has its name
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules

# The modules are listed, not imported: the records of a job, which they price, need the names first.
KINDS = tuple(module.name for module in iter_modules([str(Path(__file__).parent / "costs")]))
