"""The interface of an optimizer's costs. Every optimizer defines all of them; there are no defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from typing import ClassVar, NamedTuple

from fivefold.job import Job
from fivefold.layout.sharding import shard_numel
from fivefold.model.weights import Weight
from fivefold.optimizers.sharded_weight import ShardedWeight

ITERATIONS = 5  # iterations of Newton-Schulz
FP32_ELEMENTS = 2**22  # elements that an update holds in fp32 at once


class Product(NamedTuple):
    """Matrix products of the update: ``number`` of [rows, inner] @ [inner, columns], each ``times`` times."""

    rows: int
    columns: int
    inner: int
    number: int
    times: int = ITERATIONS

    @property
    def flops(self) -> int:
        """Return the FLOPs of all products."""
        return 2 * self.rows * self.columns * self.inner * self.number * self.times


class Payloads(NamedTuple):
    """Bytes of the messages of one family's update: over the ranks of its shards, and over those of its tp pieces."""

    collective: str
    over_shards: list[int]
    over_pieces: list[int]


class OptimizerCost(ABC):
    """The costs of one update rule: what it stores, moves, sends and multiplies. Bytes are those of one rank.

    title: name in tables.
    elementwise: every element is updated by itself, so the update sends nothing and multiplies no matrices.
    fp32_states: the trainer keeps the states in fp32, and does not support a recipe with lower-precision moments.
    counts_2d_tp: the update is counted under 2D tensor parallelism.
    updates_flat_buffer: software that flattens a rank's shard of all weights to one tensor (DeepSpeed's ZeRO) updates
        that tensor, with one step count.
    """

    title: ClassVar[str]
    elementwise: ClassVar[bool]
    fp32_states: ClassVar[bool]
    counts_2d_tp: ClassVar[bool]
    updates_flat_buffer: ClassVar[bool]

    @abstractmethod
    def state_bytes(self, weights: Sequence[Weight], *, shards: int, quantised: frozenset[str], job: Job) -> int:
        """Return the bytes of moments and step counts of the largest shard.

        ``quantised``: names of weights whose moments may have 8 bits.
        """

    @abstractmethod
    def moved_bytes(self, job: Job) -> float:
        """Return the approximate bytes of state per element that one update reads and writes."""

    @abstractmethod
    def scratch_bytes(self, weights: Iterable[ShardedWeight], job: Job) -> int:
        """Return the peak bytes that the update holds in addition to states and gradients."""

    def payloads(self, family: list[ShardedWeight]) -> Payloads:
        """Return the messages of one family's update."""
        raise NotImplementedError

    def products(self, family: list[ShardedWeight]) -> list[Product]:
        """Return the matrix products on the first rank, which has the largest matrix of every round."""
        raise NotImplementedError

    def weight_products(self, weight: ShardedWeight) -> list[Product]:
        """Return the matrix products of one weight, on whichever rank they are computed."""
        raise NotImplementedError


def count_local_numel(weight: Weight, shards: int) -> int:
    """Return the elements of one shard of a weight."""
    return min(shard_numel(weight, shards=shards), weight.numel)


def is_narrow(job: Job) -> bool:
    """Tell whether the optimizer updates a copy of less than 32 bits, which it converts to fp32 block by block."""
    return job.precision.updated_bytes < 4


def count_fp32_bytes(weights: Iterable[ShardedWeight], job: Job) -> int:
    """Return the bytes of a low-precision weight and its gradient in fp32, of which a block at a time is converted.

    It is 0 where fused kernels convert in registers (``Stack.updates_in_blocks``).
    """
    if not is_narrow(job) or not job.stack.updates_in_blocks:
        return 0
    return 8 * max((min(FP32_ELEMENTS, cut.rows * cut.columns) for cut in weights), default=0)


@cache
def find_cost(kind: str) -> OptimizerCost:
    """Return the costs of an optimizer that a job can name."""
    cost: OptimizerCost = import_module(f"fivefold.optimizers.costs.{kind}").COST
    return cost
