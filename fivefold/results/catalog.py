"""Rows of the catalogs that ``fivefold models``, ``fivefold machines`` and ``fivefold stacks`` list."""

from __future__ import annotations

from typing import Literal

from fivefold.record import Record


class CatalogModel(Record):
    """A model of the catalog: its name, size and shape, and where its shape was published."""

    name: str
    parameters: int
    active_parameters: int  # used per token: of the experts, only those that a token visits
    vision_parameters: int | None = None  # of the vision tower, which ``parameters`` leaves out; None: there is none
    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int
    experts: int | None = None
    experts_per_token: int | None = None
    vocab: int
    positions: int  # longest supported sequence, in tokens
    source: str
    huggingface: str | None = None  # repository of the published weights, which names the model too


class CatalogFamily(Record):
    """A family of Hugging Face models: whether it is trained, predicted only, or what is missing to support it."""

    name: str  # its ``model_type``
    architecture: str  # the class that transformers builds
    status: Literal["trained", "predicted", "unsupported"]
    needs: str = ""  # what is missing to support it, or to train what is only predicted
    text: str = ""  # the family of its text model, if it is a multimodal model, of which that is read


class CatalogLink(Record):
    """A link of a machine of the catalog."""

    name: str
    bandwidth: float  # bytes/s per rank and direction


class CatalogMachine(Record):
    """A machine of the catalog: one chip of it, and its node. Rates are per GPU and direction, peaks are dense."""

    name: str
    ranks_per_node: int
    memory_bytes: int  # as PyTorch reports it
    memory_bandwidth: float  # bytes/s
    peak_flops: dict[str, float]  # FLOP/s by number format
    power_watts: float | None = None
    links: tuple[CatalogLink, ...]  # from near to far
    instances: tuple[str, ...] = ()  # of clouds with this chip: names of machines too
    source: str


class CatalogStack(Record):
    """A stack of the catalog: a training framework, and the parallelism that it supports."""

    name: str
    version: str  # version or commit that the catalog describes; empty: this version of Fivefold
    family: str  # stacks of one family share code
    axes: tuple[str, ...]  # mesh axes whose degree may exceed 1
    zero: tuple[int, ...]  # ZeRO stages
    schedules: tuple[str, ...]  # pipeline schedules; empty without pipeline parallelism
    configs: tuple[str, ...]  # formats of its configs that ``fivefold write --to`` writes
    examined: bool = True  # False: which layouts it runs was not looked up, so that none is refused
