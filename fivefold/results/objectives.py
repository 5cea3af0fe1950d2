"""The objectives that a search can minimize, as keywords."""

from __future__ import annotations

from typing import Literal

By = Literal["time", "cost", "memory"]  # per step
Aim = Literal[By, "robust"]  # robust: the regret if the run differs from the prediction
Goal = Literal["time", "cost", "energy"]  # of a full run
Objective = Literal[By, "energy", "robust"]  # all of them
