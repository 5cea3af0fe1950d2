"""What the update says, multiplies and holds for a moment, beside reading and writing states: of a stage's first rank.

    Muon        for as many matrices as ranks, all_to_all of bf16 parts over shard and tp (etp), there and back;
                Newton-Schulz of [r, c], r ≤ c: 5 (4 r² c + 2 r³) FLOPs, of hardware and not of the model
    Adafactor   all_reduces: sums of squares, means over rows, size of the update, over shard and over tp (etp)
    8-bit AdamW nothing; but it holds both moments and the codes of one, 4 bytes each, for a block of rows

Who says it: ``train/optimizers/``; why: docs/decisions/017 and 020.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

from fivefold.layout.local_weight import padded_vocab
from fivefold.layout.schedule import schedule
from fivefold.layout.sharding import chunk_rows, local_weight
from fivefold.layout.spec import FEWEST_ROUNDS, Layout
from fivefold.model.weights import Weight
from fivefold.plan.count.counts import Counts
from fivefold.plan.count.message import Message
from fivefold.update import quantised

ITERATIONS = 5  # of Newton-Schulz
WIDENED = 2**22  # elements that are fp32 at once
SENT_BYTES = 2  # an element of a direction


class ShardedWeight(NamedTuple):
    """A weight, its piece on a rank, and over how many ranks ZeRO cuts the piece and tp (of experts etp) the weight."""

    weight: Weight
    shape: tuple[int, ...]
    shards: int
    pieces: int

    @property
    def expert(self) -> bool:
        """Whether the first dim counts weights, each with moments of its own."""
        return self.weight.kind.startswith("expert")

    @property
    def experts(self) -> int:
        """How many it counts here."""
        return self.shape[0] if self.expert else 1

    @property
    def is_matrix(self) -> bool:
        """Whether each of them has rows and columns."""
        return len(self.shape) == 2 + self.expert

    @property
    def dim(self) -> int | None:
        """Along which the piece is cut; None: every rank has the whole."""
        sizes = enumerate(zip(self.shape, self.weight.shape, strict=True))
        return next((dim for dim, (here, whole) in sizes if dim >= self.expert and here != whole), None)

    @property
    def columns(self) -> int:
        """Elements of a row, which ZeRO does not cut."""
        return prod(self.shape[2:] if len(self.shape) == 3 else self.shape[1:])

    @property
    def chunk(self) -> int:
        """Rows of a shard, padding included."""
        return chunk_rows(prod(self.shape) // self.columns, shards=self.shards)

    @property
    def rows(self) -> int:
        """Rows of the first shard."""
        return min(self.chunk, prod(self.shape) // self.columns)

    @property
    def each(self) -> int:
        """Rows of one matrix."""
        return prod(self.shape) // self.columns // self.experts

    @property
    def group(self) -> tuple[str, str, str]:
        """Who speaks: ranks of shards, the axis of pieces."""
        return ("expert_shard", "etp", "etp") if self.expert else ("shard", "tp", "tp")


def sharded_weights(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> list[ShardedWeight]:
    """All weights of the stages ``chunks``."""
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
    """Every message of the update."""
    if counts.job.optimizer.kind not in ("muon", "adafactor"):
        return
    found = sharded_weights(counts, layout, chunks=chunks)
    for family in ([cut for cut in found if cut.expert == expert] for expert in (False, True)):
        if not family:
            continue
        (shard, axis, pieces), shards, parts = family[0].group, family[0].shards, family[0].pieces
        collective, speaks = ("all_to_all", _dealt) if counts.job.optimizer.kind == "muon" else ("all_reduce", _met)
        over_rows, over_pieces = speaks(family)
        if shards > 1:
            yield from (Message("dp", collective, 1, size, shards, shard) for size in over_rows if size)
        if parts > 1:
            yield from (Message(axis, collective, 1, size, parts, pieces) for size in over_pieces if size)


def rounds(family: list[ShardedWeight]) -> Iterator[list[ShardedWeight]]:
    """Of the matrices that Muon makes orthogonal as many at a time as there are ranks, large ones first."""
    hidden = [cut for cut in family if cut.weight.is_hidden]
    hidden.sort(key=lambda cut: -prod(cut.shape))
    ranks = family[0].shards * family[0].pieces
    return (hidden[first : first + ranks] for first in range(0, len(hidden), ranks))


def _dealt(family: list[ShardedWeight]) -> tuple[list[int], list[int]]:
    """Payloads over shards and over pieces: parts of all go out and those of the first rank's matrices return."""
    over_rows, over_pieces = [], []
    for each in rounds(family):
        mine = each[:: each[0].shards]
        over_rows += [SENT_BYTES * sum(cut.chunk * cut.columns for cut in each)]
        over_rows += [SENT_BYTES * sum(cut.shards * cut.chunk * cut.columns for cut in mine)]
        over_pieces += [SENT_BYTES * sum(prod(cut.shape) for cut in mine)]
        over_pieces += [SENT_BYTES * sum(cut.pieces * prod(cut.shape) for cut in mine[:: each[0].pieces])]
    return over_rows, over_pieces


def _met(family: list[ShardedWeight]) -> tuple[list[int], list[int]]:
    """Payloads of sums that do not depend on pieces are not said over them; means over columns lie as the rows do."""
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
    """Matrix products of the update: ``number`` of rows × inner by inner × columns, so many ``times``."""

    rows: int
    columns: int
    inner: int
    number: int
    times: int = ITERATIONS

    @property
    def flops(self) -> int:
        """Of all of them."""
        return 2 * self.rows * self.columns * self.inner * self.number * self.times


def _orthogonal(cut: ShardedWeight) -> list[Product]:
    """Newton-Schulz of the whole matrix, or of those of the experts that are here."""
    low, high = sorted(cut.weight.shape[-2:])
    return [Product(low, low, high, cut.experts), Product(low, low, low, cut.experts),
            Product(low, high, low, cut.experts)]  # fmt: skip


def update_products(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> list[Product]:
    """Of the first rank, which has a matrix of every round."""
    if counts.job.optimizer.kind != "muon":
        return []
    found = sharded_weights(counts, layout, chunks=chunks)
    families = [family for expert in (False, True) if (family := [cut for cut in found if cut.expert == expert])]
    return [product for family in families for each in rounds(family) for product in _orthogonal(each[0])]


def update_flops(counts: Counts, layout: Layout) -> int:
    """Of all ranks: each matrix once in its group of shards and pieces, and again in every replica."""
    if counts.job.optimizer.kind != "muon":
        return 0
    ranks, total = layout.dp * layout.cp * layout.tp, 0
    for held in stages_held(layout):
        for cut in sharded_weights(counts, layout, chunks=held):
            if cut.weight.is_hidden:
                total += ranks // (cut.shards * cut.pieces) * sum(each.flops for each in _orthogonal(cut))
    return total


def stages_held(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Stages of each pipeline rank, however many micro-batches there are."""
    if layout.pp == 1:
        return ((0,),)
    few = layout.pp * max(2, FEWEST_ROUNDS.get(layout.schedule, 0))
    return schedule(layout.schedule, pp=layout.pp, v=layout.v, micro_batches=few).rank_stages


def scratch_bytes(counts: Counts, layout: Layout, *, chunks: Iterable[int]) -> int:
    """The most that the update holds at once beside states and gradients."""
    job = counts.job
    kind, narrow = job.optimizer.kind, job.precision.updated_bytes < 4
    if kind in ("adamw", "sgd"):
        return 0
    found = sharded_weights(counts, layout, chunks=chunks)
    if kind == "muon":
        families = [family for expert in (False, True) if (family := [cut for cut in found if cut.expert == expert])]
        rest = [min(WIDENED, cut.rows * cut.columns) for cut in found if not cut.weight.is_hidden]
        return max(
            8 * max(rest, default=0) if narrow else 0,  # of what AdamW updates, weight and gradient are widened
            *(_whole(each) for family in families for each in rounds(family)), 0,
        )  # fmt: skip
    if kind == "adafactor":
        sums = sum(3 * cut.experts + (cut.rows + cut.experts * cut.columns) * cut.is_matrix for cut in found)
        return 4 * sums + 4 * max(
            cut.columns * ((2 if narrow else 1) * cut.rows + min(cut.rows, cut.each)) for cut in found
        )
    sizes = [
        cut.columns * min(cut.rows, max(1, WIDENED // cut.columns)) for cut in found
        if quantised(cut.weight.numel, vector=cut.weight.is_vector)
    ]  # fmt: skip
    return (16 if narrow else 12) * max(sizes, default=0)


def _whole(each: list[ShardedWeight]) -> int:
    """Beside a round's parts, as they were and as they came, the matrix: joined, divided by its norm and one iteration
    later, with the square and its product.
    """
    first = each[0]
    mine, whole = each[:: first.shards], first.experts * prod(first.weight.shape[-2:])
    parts = sum(cut.chunk * cut.columns for cut in each)
    if first.shards > 1:
        parts += sum(cut.shards * cut.chunk * cut.columns for cut in mine)
    if first.pieces > 1:
        parts += first.pieces * prod(first.shape) + (whole if first.dim is not None else 0)
    return SENT_BYTES * (parts + 2 * whole + 2 * first.experts * min(first.weight.shape[-2:]) ** 2)
