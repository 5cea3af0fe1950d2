"""``Family``: everything that Fivefold knows of one ``model_type`` of Hugging Face, in one record.

Each module of ``families/`` holds the records of one family or of close relatives. The generic code reads the records:
``read.py`` (config.json to model), ``write.py`` (model to config.json), ``tensors.py`` (names of weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fivefold.model.huggingface.config import Config
from fivefold.model.spec import Model


class Fused(NamedTuple):
    """One of ``weights`` (our names, in order) that lie in one tensor of the checkpoint called ``name``.

    In each of ``groups`` equal groups of rows lie the rows of the first weight, then of the next. 1: one weight after
    another. 0: the rows of all weights in turn. kv_heads: one group for each key head, its queries first.
    ``transposed``: stored as [in, out].
    """

    name: str
    weights: tuple[str, ...]
    groups: int | Literal["kv_heads"] = 1
    transposed: bool = False


Names = Mapping[str, "str | Fused"]


class Supported(NamedTuple):
    """The supported ``values`` of a key, and the ``operation`` that any other value would need."""

    values: tuple[Any, ...]
    operation: str


def _write_nothing(model: Model) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``: how its ``config.json`` is read and written, and how its tensors are called."""

    model_type: str
    # The class that transformers builds for this model_type, and the one that published files name, if it is another.
    architecture: str
    published_architecture: str = ""
    # Key of config.json: field of ``Config``. Keys of one field are aliases; the last one is written.
    keys: Mapping[str, str]
    # Field of ``Config``: value of a missing key, from the configuration class of transformers.
    defaults: Mapping[str, Any]
    # Keys that the family's code reads, but of which only some values can be represented.
    supported: Mapping[str, Supported] = field(default_factory=dict)
    to_model: Callable[[Config], Model]
    # Keys to write besides those that follow from ``keys``; they take precedence.
    write: Callable[[Model], dict[str, Any]] = _write_nothing
    # Our name of a weight: its name in the checkpoint; in a block relative to the block.
    tensors: Names
    # What differs in models whose ``Model.block`` is the key.
    block_tensors: Mapping[str, Names] = field(default_factory=dict)
    # What differs in a checkpoint that holds all experts of a layer in one tensor.
    stacked_tensors: Names = field(default_factory=dict)
    # Whether the two rows of a rotary pair are neighbors in the checkpoint; here they are half a rotary dim apart.
    interleaved_rotary: bool = False
    # What the names of the whole model have before those of a checkpoint without its head.
    base_prefix: str = ""

    @property
    def has_experts(self) -> bool:
        """Whether models of the family may route tokens to experts."""
        return "num_experts" in self.keys.values()

    @property
    def has_latent_attention(self) -> bool:
        """Whether models of the family have latent attention."""
        return "kv_lora_rank" in self.keys.values()


class Wrapper(NamedTuple):
    """A multimodal ``model_type``, of which only the text model is read: its class and the family of that model."""

    model_type: str
    architecture: str
    text: str
    tied: bool  # meaning of a missing ``tie_word_embeddings``
    flat: bool = False  # published with the keys of the text model next to the others
