"""Compare a scan and its gradients with its recurrence, token by token in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Side = tuple[Tensor, Sequence[Tensor], Tensor]  # output, inputs, gradient of the output


def check_recurrence(scanned: Side, recurrent: Side, *, bound: float) -> None:
    """Assert that outputs and gradients of all inputs differ by no more than ``bound`` of their norms."""
    assert (scanned[0] - recurrent[0]).norm() <= bound * recurrent[0].norm()
    gradients = torch.autograd.grad(*scanned)
    for gradient, wanted in zip(gradients, torch.autograd.grad(*recurrent, materialize_grads=True), strict=True):
        assert (gradient - wanted).norm() <= bound * wanted.norm()
