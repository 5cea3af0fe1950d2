"""Norms: one record each, with the facts that the planner counts. ``trainer/model/norm.py`` has the modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormName = Literal["rmsnorm", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm over the last dim, with one weight for each of its elements."""

    name: NormName
    statistics: (
        int  # fp32 numbers per row that are saved for the backward pass, and summed over ranks that share the row
    )
    has_bias: bool  # has a bias, unless the model leaves it out
    is_one_kernel: bool  # one PyTorch kernel without scratch memory; other norms take several kernels


# fmt: off
_NORMS = (
    Norm(name="rmsnorm", statistics=1, has_bias=False, is_one_kernel=False),
    Norm(name="layernorm", statistics=2, has_bias=True, is_one_kernel=True),
)
# fmt: on
NORMS: dict[NormName, Norm] = {norm.name: norm for norm in _NORMS}
