"""Rows of a batch to their copies in order of expert, and the sum of each row's copies."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` [n] of ``x`` [R, D] → [n, D]."""
    return x.index_select(0, index)


def sum_copies(copies: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sum of the rows ``places[starts[r] : starts[r + 1]]`` of ``copies`` [n, D] for each r → [R, D]: in one pass, in a
    fixed order, so deterministically.
    """
    return F.embedding_bag(places, copies, starts, mode="sum")
