"""The interface that the geometries of all token mixers other than attention have: how they are sharded and scaled."""

from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, Self

from fivefold.record import Record


class ShardedUnits(NamedTuple):
    """The units that parallelism divides among its ranks: their name (heads, groups, channels) and number."""

    name: str
    number: int


class MixerGeometry(Record):
    """The geometry of a token mixer. A kind that tensor parallelism shards overrides both methods.

    ``context_parallel``: how context parallelism shards it. ``heads``: the same units, heads, groups, blocks or
    channels, by Ulysses. ``halo``: the tokens; a rank gets the last few of the rank before it. ``none``: it is not
    supported.

    ``targets``: its linear layers that may have adapters, by the names of their modules in transformers, as peft's
    ``target_modules`` has them; several of one module are in its order of rows. Empty: it has no adapters.
    """

    context_parallel: ClassVar[Literal["none", "heads", "halo"]] = "none"

    @property
    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of linear layers by the module that they are in transformers."""
        return {}

    def get_sharded_units(self, width: int) -> ShardedUnits | None:
        """Return what tensor parallelism divides in a layer of ``width``; None: it is not supported."""
        return None

    def shard(self, ranks: int) -> Self:
        """Return the geometry of one of ``ranks`` ranks."""
        if ranks > 1:
            raise NotImplementedError
        return self

    def scale(self, share: float) -> Self:
        """Return the geometry in a layer of ``share`` times the width. A kind that has heads or channels overrides it.

        The dims of a head or block stay, as do ranks of projections and the number of groups.
        """
        return self


def scale_number(number: int, share: float, *, multiple: int = 1) -> int:
    """Return ``share`` times a number of heads or channels, as the nearest multiple of ``multiple``; at least that."""
    return multiple * max(1, round(number * share / multiple))
