"""The record ``Model``: its shape (``shape.py``) with the parameter counts that follow from it (``weights.py``)."""

from functools import cached_property

from fivefold.model.shape import ModelShape
from fivefold.model.weights import count


class Model(ModelShape):
    """A decoder-only transformer with its parameter counts."""

    @cached_property
    def parameters(self) -> int:
        """Return the number of trainable parameters of the full model."""
        return count(self)

    @cached_property
    def active_parameters(self) -> int:
        """Return the number of parameters used per token: of the experts, only the top-k and the shared ones."""
        return count(self, active=True)
