"""``Family``: all that Fivefold knows about one ``model_type`` of Hugging Face, in one record.

Each module of ``families/`` holds the records of one family or of close relatives. The generic code reads the records:
``read.py`` (config.json to model), ``write.py`` (model to config.json), ``tensors.py`` (names of weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fivefold.model.huggingface import decoder
from fivefold.model.huggingface.config import Config
from fivefold.model.huggingface.decoder import Names
from fivefold.model.huggingface.mapping import build_model
from fivefold.model.spec import Model


class Supported(NamedTuple):
    """The supported ``values`` of a key, and the ``operation`` that other values would need."""

    values: tuple[Any, ...]
    operation: str


def _write_nothing(model: Model) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``: how its ``config.json`` is read and written, and the names of its tensors."""

    model_type: str
    # The class that transformers builds for this model_type, and the one in published files, if it differs.
    architecture: str
    published_architecture: str = ""
    # Maps keys of config.json to fields of ``Config``. Keys of one field are aliases; the last one is written.
    keys: Mapping[str, str]
    # Keys whose values are tables; a key of a table is called TABLE.KEY in ``keys`` and ``supported``.
    tables: tuple[str, ...] = ()
    # Maps fields of ``Config`` to the value of a missing key, from the configuration class of transformers, where it is
    # not that of ``decoder.DEFAULTS``.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Keys that the family's code reads, but for which only some values can be represented.
    supported: Mapping[str, Supported] = field(default_factory=dict)
    # Keys that its class writes itself, whatever the file says.
    overwritten: tuple[str, ...] = ()
    to_model: Callable[[Config], Model] = build_model
    # Whether a file may give three positions for each token, which are equal in text.
    has_mrope: bool = False
    # Further keys to write, which take precedence over those that follow from ``keys``.
    write: Callable[[Model], dict[str, Any]] = _write_nothing
    # How many of our layers are one block of the checkpoint; "<n>" in a name is the number within it.
    layers_per_block: int = 1
    # Maps our names of weights to those in the checkpoint; in a block both are relative to the block.
    tensors: Names = field(default_factory=lambda: decoder.TENSORS)
    # Names that differ, by the block of a layer (``Model.get_block``).
    block_tensors: Mapping[str, Names] = field(default_factory=dict)
    # Names in a module of multi-token prediction, if they are not those of a layer after the last one; "blocks" is
    # their prefix, "<0>" and "<1>" are the numbers of the module's two layers.
    mtp_tensors: Mapping[str, str] = field(default_factory=dict)
    # Names that differ in a checkpoint that holds all experts of a layer in one tensor.
    stacked_tensors: Names = field(default_factory=dict)
    # Parts of names in published files, and what they are called in ``tensors``.
    renamed: Mapping[str, str] = field(default_factory=dict)
    # Parts of names in ``tensors``, and what transformers calls them in memory, which are the names of peft's folders.
    modules: Mapping[str, str] = field(default_factory=dict)
    # Maps the end of a name in ``tensors`` to those of the published tensors whose rows it joins.
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Maps our name of a weight to the dims of size one that its tensor has in addition.
    ones: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Numbers that a checkpoint holds in each block in addition to the weights, by their name relative to the block.
    # One in a tuple is stored as a vector. The trainer computes the family only with these values.
    constants: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)
    # Whether the two rows of a rotary pair are adjacent in the checkpoint; ours are half a rotary dim apart.
    interleaved_rotary: bool = False
    # Whether they are adjacent in latent attention, unless the file says otherwise.
    interleaved_latent: bool = True
    # Rotary rows of the queries and the key of an indexer: as ours, adjacent pairs, or the last of a head.
    indexer_rows: Literal["ours", "adjacent", "last"] = "ours"
    # Whether the halves of rotary rows are swapped in the checkpoint, whose code rotates backwards.
    swapped_rotary: bool = False
    # Whether the routing bias of a layer is stored as [1, experts], not as [experts].
    bias_is_row: bool = False
    # The prefix of names in a full model, which a checkpoint without its head leaves out.
    base_prefix: str = ""

    def list_defaults(self) -> dict[str, Any]:
        """Return the value of every missing key, by field of ``Config``."""
        return {**decoder.DEFAULTS, **self.defaults}

    @property
    def is_part(self) -> bool:
        """Tell whether transformers builds it only as the text model of a multimodal model."""
        return self.architecture.endswith("TextModel")

    @property
    def has_experts(self) -> bool:
        """Tell whether models of the family may route tokens to experts."""
        return "num_experts" in self.keys.values()

    @property
    def may_lack_experts(self) -> bool:
        """Tell whether models of a family with experts may have none: by a key, or by a pattern of their layers."""
        return not {"enable_moe_block", "layer_pattern"}.isdisjoint(self.keys.values())

    @property
    def has_latent_attention(self) -> bool:
        """Tell whether models of the family have latent attention."""
        return "kv_lora_rank" in self.keys.values()


class Wrapper(NamedTuple):
    """A multimodal ``model_type``, of which only the text model is read: its class, and the family of that model."""

    model_type: str
    architecture: str
    text: str
    tied: bool | None  # default of ``tie_word_embeddings``; None: only that of the text model is read, true if missing
    flat: bool = False  # published files have the keys of the text model at the top level
    ties: bool = True  # its class ties the head to the embedding if the file says so
    inner_ties: bool = False  # it also ties them if its text model's table does, or does not say
    missing: Mapping[str, Any] = MappingProxyType({})  # values of missing keys, where the text family has others
    is_separable: bool = False  # AutoModelForCausalLM loads its text model alone, by the names of that
    any_text: bool = False  # its text model may be of any family that is read; ``text``: if the file does not say
