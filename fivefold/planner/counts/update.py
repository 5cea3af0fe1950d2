"""Messages, FLOPs and temporary bytes of the optimizer's update on a stage's first rank.

    Muon        per round of as many matrices as ranks, all_to_all of bf16 shards over shard and tp (etp), and back;
                Newton-Schulz of [r, c], r ≤ c: 5 (4 r² c + 2 r³) FLOPs, counted as hardware, not model FLOPs
    Adafactor   all_reduces of sums of squares, means over rows, update norm, over shard and over tp (etp)
    8-bit AdamW no message; both moments and the codes of one, 4 bytes each, for a block of rows
Implemented in ``trainer/optimizers/``; reasons in docs/decisions/017 and 020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from fivefold.layout.local_weight import padded_vocab
from fivefold.layout.schedule import schedule
from fivefold.layout.sharding import chunk_rows, local_weight
from fivefold.layout.spec import Layout
from fivefold.model.weights import Weight
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.message import Message
from fivefold.update import quantised

ITERATIONS = 5  # of Newton-Schulz
WIDENED = 2**22  # elements that are fp32 at once
SENT_BYTES = 2  # per element that Muon sends (bf16)


class ShardedWeight(NamedTuple):
    """A weight and its piece on a rank: ZeRO cuts the piece into ``shards``, tp (etp) the weight into ``pieces``."""

    weight: Weight
    shape: tuple[int, ...]
    shards: int
    pieces: int

    @property
    def expert(self) -> bool:
        """Whether it holds experts' weights, stacked along the first dim."""
        return self.weight.kind.startswith("expert")

    @property
    def experts(self) -> int:
        """Number of stacked experts on this rank; 1 for other weights."""
        return self.shape[0] if self.expert else 1

    @property
    def is_matrix(self) -> bool:
        """Whether the weight (of one expert) has two dims."""
        return len(self.shape) == 2 + self.expert

    @property
    def dim(self) -> int | None:
        """The dim that tp (etp) cuts; None: the weight is replicated over it."""
        sizes = enumerate(zip(self.shape, self.weight.shape, strict=True))
        return next((dim for dim, (here, whole) in sizes if dim >= self.expert and here != whole), None)

    @property
    def columns(self) -> int:
        """Elements of a row; ZeRO shards by rows."""
        return prod(self.shape[2:] if len(self.shape) == 3 else self.shape[1:])

    @property
    def chunk(self) -> int:
        """Rows of a ZeRO shard, padding included."""
        return chunk_rows(prod(self.shape) // self.columns, shards=self.shards)

    @property
    def rows(self) -> int:
        """Rows of the first shard."""
        return min(self.chunk, prod(self.shape) // self.columns)

    @property
    def each(self) -> int:
        """Rows of the piece of one matrix (one expert)."""
        return prod(self.shape) // self.columns // self.experts

    @property
    def group(self) -> tuple[str, str, str]:
        """Group over shards; axis and group over pieces."""
        return ("expert_shard", "etp", "etp") if self.expert else ("shard", "tp", "tp")


def sharded_weights(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> list[ShardedWeight]:
    """All weights of the stages ``chunks``, as they are sharded."""
    vocab, work, found = padded_vocab(counts.model, counts.job, tp=layout.tp), counts.stage_work(layout), []
    for chunk in chunks:
        for run, times in work[chunk]:
            for weight in counts.weights(layout, run.name):
                local = local_weight(weight, model=counts.model, layout=layout, vocab=vocab)
                experts = weight.kind.startswith("expert")
                sizes = (layout.expert_shards, layout.etp) if experts else (layout.shards, layout.tp)
                found += [ShardedWeight(weight, local.shape, *sizes)] * times
    return found


def update_messages(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> Iterator[Message]:
    """Every message of the update; only Muon and Adafactor send any."""
    if counts.job.optimizer.kind not in ("muon", "adafactor"):
        return
    found = sharded_weights(counts, layout, chunks=chunks)
    for family in ([cut for cut in found if cut.expert == expert] for expert in (False, True)):
        if not family:
            continue
        (shard, axis, pieces), shards, parts = family[0].group, family[0].shards, family[0].pieces
        muon = counts.job.optimizer.kind == "muon"
        collective, payloads = ("all_to_all", _muon_payloads) if muon else ("all_reduce", _adafactor_payloads)
        over_rows, over_pieces = payloads(family)
        if shards > 1:
            yield from (Message("dp", collective, 1, size, shards, shard) for size in over_rows if size)
        if parts > 1:
            yield from (Message(axis, collective, 1, size, parts, pieces) for size in over_pieces if size)


def rounds(family: list[ShardedWeight]) -> Iterator[list[ShardedWeight]]:
    """Muon's matrices in rounds of one per rank, the largest first."""
    hidden = [cut for cut in family if cut.weight.is_hidden]
    hidden.sort(key=lambda cut: -prod(cut.shape))
    ranks = family[0].shards * family[0].pieces
    return (hidden[first : first + ranks] for first in range(0, len(hidden), ranks))


def _muon_payloads(family: list[ShardedWeight]) -> tuple[list[int], list[int]]:
    """Muon's payloads in bytes, over shards and over pieces: shards of all matrices out, those of this rank's back."""
    over_rows, over_pieces = [], []
    for each in rounds(family):
        mine = each[:: each[0].shards]
        over_rows += [SENT_BYTES * sum(cut.chunk * cut.columns for cut in each)]
        over_rows += [SENT_BYTES * sum(cut.shards * cut.chunk * cut.columns for cut in mine)]
        over_pieces += [SENT_BYTES * sum(prod(cut.shape) for cut in mine)]
        over_pieces += [SENT_BYTES * sum(cut.pieces * prod(cut.shape) for cut in mine[:: each[0].pieces])]
    return over_rows, over_pieces


def _adafactor_payloads(family: list[ShardedWeight]) -> tuple[list[int], list[int]]:
    """Adafactor's payloads in bytes, over shards and over pieces: statistics that tp does not cut are not sent over it.

    Means over columns are sharded as the rows are.
    """
    rows, pieces = [0, 0, 0], [0, 0, 0]
    for cut in family:
        column, across = cut.experts * cut.columns * cut.is_matrix, cut.dim is not None and cut.dim < len(cut.shape) - 1
        rows[0] += column + cut.experts
        rows[1] += cut.experts * cut.is_matrix
        rows[2] += cut.experts
        if cut.dim is not None:
            row = 0 if across else cut.rows
            pieces[0] += cut.experts + (column if across else row) * cut.is_matrix
            pieces[1] += cut.experts * cut.is_matrix * across
            pieces[2] += cut.experts
    return [4 * size for size in rows], [4 * size for size in pieces]


class Product(NamedTuple):
    """Products of the update: ``number`` of [rows, inner] @ [inner, columns], each ``times`` times."""

    rows: int
    columns: int
    inner: int
    number: int
    times: int = ITERATIONS

    @property
    def flops(self) -> int:
        """FLOPs of all of them."""
        return 2 * self.rows * self.columns * self.inner * self.number * self.times


def _newton_schulz(cut: ShardedWeight) -> list[Product]:
    """The products of one Newton-Schulz iteration on the full matrix, or on those of this rank's experts."""
    low, high = sorted(cut.weight.shape[-2:])
    return [Product(low, low, high, cut.experts), Product(low, low, low, cut.experts),
            Product(low, high, low, cut.experts)]  # fmt: skip


def update_products(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> list[Product]:
    """Muon's products on the first rank, which has the largest matrix of every round."""
    if counts.job.optimizer.kind != "muon":
        return []
    found = sharded_weights(counts, layout, chunks=chunks)
    families = [family for expert in (False, True) if (family := [cut for cut in found if cut.expert == expert])]
    return [product for family in families for each in rounds(family) for product in _newton_schulz(each[0])]


def update_flops(counts: Counts, layout: Layout) -> int:
    """Muon's FLOPs over all ranks: each matrix once per group of shards and pieces, repeated by every replica."""
    if counts.job.optimizer.kind != "muon":
        return 0
    ranks, total = layout.dp * layout.cp * layout.tp, 0
    for held in stages_held(layout):
        for cut in sharded_weights(counts, layout, chunks=held):
            if cut.weight.is_hidden:
                total += ranks // (cut.shards * cut.pieces) * sum(each.flops for each in _newton_schulz(cut))
    return total


def stages_held(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Stages of each pipeline rank; they do not depend on the number of micro-batches."""
    if layout.pp == 1:
        return ((0,),)
    few = layout.pp * max(2, layout.pipeline.min_rounds)
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=few).rank_stages


def scratch_bytes(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> int:
    """Peak bytes that the update holds beside states and gradients."""
    job = counts.job
    kind, narrow = job.optimizer.kind, job.precision.updated_bytes < 4
    if kind == "sgd" or (kind == "adamw" and job.precision.moments_bytes == (4, 4)):
        return 0
    found = sharded_weights(counts, layout, chunks=chunks)
    if kind == "muon":
        families = [family for expert in (False, True) if (family := [cut for cut in found if cut.expert == expert])]
        rest = [min(WIDENED, cut.rows * cut.columns) for cut in found if not cut.weight.is_hidden]
        return max(
            8 * max(rest, default=0) if narrow else 0,  # AdamW widens weight and gradient of the rest
            *(_muon_scratch(each) for family in families for each in rounds(family)), 0,
        )  # fmt: skip
    if kind == "adafactor":
        sums = sum(3 * cut.experts + (cut.rows + cut.experts * cut.columns) * cut.is_matrix for cut in found)
        return 4 * sums + 4 * max(
            cut.columns * ((2 if narrow else 1) * cut.rows + min(cut.rows, cut.each)) for cut in found
        )
    scaled = kind == "adamw8bit" or any(job.precision.scaled_moments)
    sizes = [
        cut.columns * min(cut.rows, max(1, WIDENED // cut.columns)) for cut in found
        if not scaled or quantised(cut.weight.numel, vector=cut.weight.is_vector)
    ]  # fmt: skip
    wide = 16 if narrow else 8  # both moments and, if narrow, weight and gradient
    return max(wide, 12 if kind == "adamw8bit" else 0) * max(sizes, default=0)


def _muon_scratch(each: list[ShardedWeight]) -> int:
    """Peak bytes of one round of Muon: its shards as sent and as received, and for the full matrix two copies (input
    and result of an iteration) with the two square products.
    """
    first = each[0]
    mine, whole = each[:: first.shards], first.experts * prod(first.weight.shape[-2:])
    parts = sum(cut.chunk * cut.columns for cut in each)
    if first.shards > 1:
        parts += sum(cut.shards * cut.chunk * cut.columns for cut in mine)
    if first.pieces > 1:
        parts += first.pieces * prod(first.shape) + (whole if first.dim is not None else 0)
    return SENT_BYTES * (parts + 2 * whole + 2 * first.experts * min(first.weight.shape[-2:]) ** 2)
