"""The record ``Model``: its shape (``shape.py``) with the parameter counts that follow from it (``weights.py``)."""

from functools import cached_property

from fivefold.model.shape import ModelShape
from fivefold.model.weights import count

CONFIG_SOURCE = "Hugging Face config.json of"  # how the source of a catalog model begins, before its repository


class Model(ModelShape):
    """A decoder-only transformer with its parameter counts."""

    @cached_property
    def parameters(self) -> int:
        """Return the number of trainable parameters of the full model."""
        return count(self)

    @property
    def has_published_weights(self) -> bool:
        """Tell whether a Hugging Face repository is known that has weights of this model."""
        return bool(self.repository) or self.source.startswith(CONFIG_SOURCE)

    @cached_property
    def active_parameters(self) -> int:
        """Return the number of parameters used per token: of the experts, only the top-k and the shared ones."""
        return count(self, active=True)
