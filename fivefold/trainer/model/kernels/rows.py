"""Copies of rows in order of expert, and the sum of each row's copies."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` [n] of ``x`` [R, D] as [n, D]."""
    return x.index_select(0, index)


def sum_copies(copies: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sum the rows ``places[starts[r] : starts[r + 1]]`` of ``copies`` [n, D] for each r → [R, D].

    It is one pass in a fixed order, so it is deterministic.
    """
    return F.embedding_bag(places, copies, starts, mode="sum")
