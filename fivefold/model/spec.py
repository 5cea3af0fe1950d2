"""The model as a record: its shape (``shape.py``) with the parameters that follow from it (``weights.py``)."""

from __future__ import annotations

from functools import cached_property

from fivefold.model.shape import ModelShape
from fivefold.model.weights import count


class Model(ModelShape):
    """A decoder-only transformer with its parameter counts."""

    @cached_property
    def parameters(self) -> int:
        """Number of trainable parameters of the whole model."""
        return count(self)

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters used per token: of the experts, only the top-k and the shared ones."""
        return count(self, active=True)
