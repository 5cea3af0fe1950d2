"""Norms: one record each, with what the planner counts of it. ``trainer/model/norm.py`` has the modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormName = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm over the last dim, with a weight for each element of it."""

    name: NormName
    statistics: (
        int  # fp32 numbers of each row that are saved for the backward pass, and summed over ranks that share it
    )
    has_bias: bool  # unless the model leaves it out
    is_one_kernel: bool  # of PyTorch, without scratch; others are computed by several kernels


# fmt: off
_NORMS = (
    Norm(name="rmsnorm", statistics=1, has_bias=False, is_one_kernel=False),
    Norm(name="layernorm", statistics=2, has_bias=True, is_one_kernel=True),
)
# fmt: on
NORMS: dict[NormName, Norm] = {norm.name: norm for norm in _NORMS}
