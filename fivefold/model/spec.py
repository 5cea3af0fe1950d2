"""The record ``Model``: a consistent shape (``shape.py``) with the parameter counts that follow from it."""

from functools import cached_property
from typing import Self

from pydantic import model_validator

from fivefold.model.consistency import check_consistency
from fivefold.model.shape import ModelShape
from fivefold.model.weights import count

CONFIG_SOURCE = "Hugging Face config.json of"  # how the source of a catalog model begins, before its repository


class Model(ModelShape):
    """A decoder-only transformer with its parameter counts."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        """Raise a ``ValueError`` for fields that contradict each other."""
        check_consistency(self)
        return self

    @cached_property
    def parameters(self) -> int:
        """Return the number of trainable parameters of the full model."""
        return count(self)

    @cached_property
    def stage_parts(self) -> tuple[int, ...]:
        """Return the layers of each part of the model that is in one pipeline stage, in order: one layer, or more.

        Layers are in one part if a later one reads tensors of an earlier one (``find_lender``).
        """
        lends = (self.moe is not None and self.moe.shortcut) or self.shared_kv_layers
        if not lends and (self.mla is None or self.mla.indexer is None):
            return (1,) * self.layers
        starts = list[int]()
        for layer in range(self.layers):
            lender = self.find_lender(layer)
            while lender is not None and starts and starts[-1] > lender[0]:
                starts.pop()
            starts += [layer] if lender is None else []
        return tuple(stop - start for start, stop in zip(starts, (*starts[1:], self.layers), strict=True))

    @property
    def has_published_weights(self) -> bool:
        """Tell whether a Hugging Face repository is known that has weights of this model."""
        return bool(self.repository) or self.source.startswith(CONFIG_SOURCE)

    @cached_property
    def active_parameters(self) -> int:
        """Return the number of parameters used per token: of the experts, only the top-k and the shared ones."""
        return count(self, active=True)
