"""What an update rule stores, reads, sends and multiplies: one file per optimizer, one record in ``OPTIMIZERS``.

cost             the interface       sharded_weight   a weight and its piece on a rank
adamw            AdamW, with moments of any width, and 8-bit AdamW
muon · adafactor · sgd
"""

from __future__ import annotations

from fivefold.planner.counts.optimizers.adafactor import AdafactorCost
from fivefold.planner.counts.optimizers.adamw import AdamW8bitCost, AdamWCost
from fivefold.planner.counts.optimizers.cost import OptimizerCost
from fivefold.planner.counts.optimizers.muon import MuonCost
from fivefold.planner.counts.optimizers.sgd import SgdCost

OPTIMIZERS: dict[str, OptimizerCost] = {
    "adamw": AdamWCost(),
    "adamw8bit": AdamW8bitCost(),
    "muon": MuonCost(),
    "adafactor": AdafactorCost(),
    "sgd": SgdCost(),
}
