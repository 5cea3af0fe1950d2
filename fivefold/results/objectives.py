"""What a search minimises, as words."""

from __future__ import annotations

from typing import Literal

By = Literal["time", "cost", "memory"]  # of a step
Aim = Literal[By, "robust"]  # ... or what it loses if the run is otherwise than predicted
Goal = Literal["time", "cost", "energy"]  # of a whole run
Objective = Literal[By, "energy", "robust"]  # all of them
