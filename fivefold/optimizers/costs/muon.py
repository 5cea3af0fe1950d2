"""Muon for hidden matrices (arXiv:2502.16982), AdamW for the rest.

messages   per round of one matrix per rank: all_to_all of bf16 shards over shards and tp (etp), and back
products   Newton-Schulz of [r, c], r <= c: 5 (4 r^2 c + 2 r^3) FLOPs, counted as hardware, not model FLOPs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from fivefold.job import Job
from fivefold.model.weights import Weight
from fivefold.optimizers.cost import OptimizerCost, Payloads, Product, count_fp32_bytes, count_local_numel
from fivefold.optimizers.costs.adamw import COST as ADAMW
from fivefold.optimizers.sharded_weight import ShardedWeight, split_families

SENT_BYTES = 2  # per element that Muon sends (bf16)


class MuonCost(OptimizerCost):
    """Muon; one moment for matrices, and AdamW's states for the rest."""

    title = "Muon"
    elementwise = False
    fp32_states = True
    counts_2d_tp = False
    updates_flat_buffer = False

    def state_bytes(self, weights: Sequence[Weight], *, shards: int, quantised: frozenset[str], job: Job) -> int:
        """Return the bytes of one moment per hidden matrix, and of AdamW's states for the rest."""
        hidden = [weight for weight in weights if weight.is_hidden]
        rest = [weight for weight in weights if not weight.is_hidden]
        momentum = sum(count_local_numel(weight, shards) for weight in hidden) * job.precision.moments_bytes[0]
        return momentum + ADAMW.state_bytes(rest, shards=shards, quantised=quantised, job=job)

    def moved_bytes(self, job: Job) -> float:
        """Return the bytes of one moment."""
        return job.precision.moments_bytes[0]

    def scratch_bytes(self, weights: Iterable[ShardedWeight], job: Job) -> int:
        """Return the peak bytes of temporary tensors: of Muon or of AdamW, whichever needs more.

        Muon updates one matrix per rank at a time (``list_rounds``). With low-precision weights AdamW converts up to
        ``FP32_ELEMENTS`` of a weight to fp32 at a time.
        """
        weights = list(weights)
        adamw = count_fp32_bytes([cut for cut in weights if not cut.weight.is_hidden], job)
        return max(
            adamw,
            0,
            *(_round_bytes(matrices) for family in split_families(weights) for matrices in list_rounds(family)),
        )

    def payloads(self, family: list[ShardedWeight]) -> Payloads:
        """Return the all_to_alls: send the shards of all matrices, and send back those of this rank's matrices."""
        over_shards, over_pieces = [], []
        for matrices in list_rounds(family):
            own_matrices = matrices[:: matrices[0].shards]
            over_shards += [SENT_BYTES * sum(cut.chunk * cut.columns for cut in matrices)]
            over_shards += [SENT_BYTES * sum(cut.shards * cut.chunk * cut.columns for cut in own_matrices)]
            over_pieces += [SENT_BYTES * sum(prod(cut.shape) for cut in own_matrices)]
            over_pieces += [
                SENT_BYTES * sum(cut.pieces * prod(cut.shape) for cut in own_matrices[:: matrices[0].pieces])
            ]
        return Payloads("all_to_all", over_shards, over_pieces)

    def products(self, family: list[ShardedWeight]) -> list[Product]:
        """Return the products of the largest matrix of every round, which the first rank has."""
        return [product for matrices in list_rounds(family) for product in list_newton_schulz_products(matrices[0])]

    def weight_products(self, weight: ShardedWeight) -> list[Product]:
        """Return the products of one hidden matrix."""
        return list_newton_schulz_products(weight) if weight.weight.is_hidden else []


def list_rounds(family: list[ShardedWeight]) -> Iterator[list[ShardedWeight]]:
    """Yield Muon's matrices in rounds of one per rank, the largest first."""
    hidden = [cut for cut in family if cut.weight.is_hidden]
    hidden.sort(key=lambda cut: -prod(cut.shape))
    ranks = family[0].shards * family[0].pieces
    return (hidden[first : first + ranks] for first in range(0, len(hidden), ranks))


def list_newton_schulz_products(cut: ShardedWeight) -> list[Product]:
    """Return the products of one Newton-Schulz iteration on the full matrix, or on those of this rank's experts."""
    low, high = sorted(cut.weight.shape[-2:])
    return [
        Product(low, low, high, cut.experts),
        Product(low, low, low, cut.experts),
        Product(low, high, low, cut.experts),
    ]


def _round_bytes(matrices: list[ShardedWeight]) -> int:
    """Return the peak bytes of one round.

    Its shards as sent and as received, and for the full matrix two copies (input and result of an iteration) with the
    two square products.
    """
    first = matrices[0]
    own_matrices = matrices[:: first.shards]
    full_elements = first.experts * prod(first.weight.shape[-2:])
    shards = sum(cut.chunk * cut.columns for cut in matrices)
    if first.shards > 1:
        shards += sum(cut.shards * cut.chunk * cut.columns for cut in own_matrices)
    if first.pieces > 1:
        shards += first.pieces * prod(first.shape) + (full_elements if first.dim is not None else 0)
    return SENT_BYTES * (shards + 2 * full_elements + 2 * first.experts * min(first.weight.shape[-2:]) ** 2)


COST = MuonCost()
