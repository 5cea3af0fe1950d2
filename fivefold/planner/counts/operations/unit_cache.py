"""The operations of units by part, built once; a layer's attention once for all ways to cut its experts, its
feed-forward part once for all micro-batches and cuts of sequences that make as many rows.

attention half (any ep, etp) + feed-forward half (any cp) → block → marked as recomputed → unit
head = norm, modules of multi-token prediction with such a block each, losses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fivefold.job import Job
from fivefold.model.spec import Model
from fivefold.planner.counts.cache import Cache
from fivefold.planner.counts.operations.kernels import in_one_kernel
from fivefold.planner.counts.operations.layer import (
    Kind,
    attention_half,
    block_unit,
    embedding,
    feedforward_half,
    kind_of,
)
from fivefold.planner.counts.operations.linear import sums_itself
from fivefold.planner.counts.operations.local_shapes import Local, Part
from fivefold.planner.counts.operations.mtp import Finish, head_unit
from fivefold.planner.counts.operations.op import Op
from fivefold.planner.counts.operations.recompute import Unit

MARKED = 100  # blocks kept to mark what is recomputed of each


class Built:
    """Operations of one model and job by part; what it returns is shared and must not be changed."""

    def __init__(self, model: Model, job: Job, example: Mapping[Kind, int]) -> None:
        """``example``: a layer of each kind."""
        self.model, self.job, self.example = model, job, example
        self._locals: Cache[Part, Local] = Cache()
        self._halves: Cache[tuple[object, ...], list[Op]] = Cache()
        self._blocks: Cache[tuple[Part, Kind, bool], list[Op]] = Cache(MARKED)
        self._units: Cache[tuple[Part, Kind | str], Unit] = Cache()
        self._heads: Cache[Part, tuple[Op, ...]] = Cache()

    def local(self, part: Part) -> Local:
        """The model's local sizes on one rank."""
        if part not in self._locals:
            self._locals[part] = Local(self.model, self.job, part)
        return self._locals[part]

    def unit(self, part: Part, name: Kind | str) -> Unit:
        """The operations of a unit."""
        key = part, name
        if key not in self._units:
            self._units[key] = self._unit(part, name)
        return self._units[key]

    def in_order(self, part: Part, name: Kind | str) -> tuple[Op, ...]:
        """The operations of a unit in order. In the head tensors have the names that they have in their own block, so
        that what only operations decide is known of equal ones.
        """
        if name != "head" or not self.model.predicted:
            return self.unit(part, name).ops
        if part not in self._heads:
            self._heads[part] = self._head(part, named=False).ops
        return self._heads[part]

    def _unit(self, part: Part, name: Kind | str) -> Unit:
        if isinstance(name, Kind):
            return block_unit(self._block(part, name, layer=self.example[name]), self.local(part))
        if name == "head":
            return self._head(part, named=True)
        return Unit(tuple(map(self._finished(self.local(part)), embedding(self.local(part)))))

    def _head(self, part: Part, *, named: bool) -> Unit:
        def inside(layer: int) -> Unit:
            return block_unit(self._block(part, kind_of(self.model, layer), layer=layer), self.local(part))

        return head_unit(self.local(part), inside=inside, finish=self._finished(self.local(part)), named=named)

    def _block(self, part: Part, kind: Kind, *, layer: int) -> list[Op]:
        """The operations of a block with none marked, which what is recomputed changes only if it is the layer."""
        plain = part._replace(recomputed=part.recomputed & {"layer"}, piped=False)
        local = self.local(plain)
        block = plain, kind, local.narrow_stream(layer)
        if block not in self._blocks:
            any_cut = part._replace(recomputed=frozenset(), piped=False, ep=1, etp=1)
            any_rows = plain._replace(sequences=1, cp=1, ulysses=False)
            attention = self._half(attention_half, any_cut, layer, key=(any_cut, *block[1:]))
            rest = self._half(feedforward_half, plain, layer, key=(any_rows, local.rows, *block[1:]))
            self._blocks[block] = [*attention, *rest]
        return self._blocks[block]

    def _half(self, half: Callable[..., list[Op]], part: Part, layer: int, *, key: tuple[object, ...]) -> list[Op]:
        """The operations of half a block, which are the same for all parts of one ``key``."""
        if key not in self._halves:
            local = self.local(part)
            self._halves[key] = [*map(self._finished(local), half(local, layer=layer))]
        return self._halves[key]

    def _finished(self, local: Local) -> Finish:
        """What is done to every operation that was built."""
        wide = self.job.precision.gradients_bytes == 1

        def finish(op: Op) -> Op:
            op = in_one_kernel(op, local)
            return _with_wide_gradients(op) if wide else op

        return finish


def _with_wide_gradients(op: Op) -> Op:
    """``op`` where gradients of fp8 products have one byte: all others have two, so twice as many elements of one."""
    narrow = sums_itself(op) and op.name != "head.out"
    first = 1 if narrow or op.name == "moe.arrive" else 2
    biases = 1 if op.name == "moe.arrive" else 2
    widths = tuple(size * (biases if at else first) for at, size in enumerate(op.gradient_widths))
    return op._replace(gradient_widths=widths, biases=2 * op.biases)
