"""The gradients of one ZeRO unit: accumulated, and reduced to this rank's shard once a step or more often.

    gradients → accumulation buffer [ranks, numel] ── reduce_scatter over the shard group ──> reduced [numel]
    with the last of them: all_reduce over replicas and over ranks that hold copies of some weights (``ExtraReduce``)

``reduced`` is accumulated over the step in the dtype of the buffer: before a reduction this rank adds it to its own
row. Reductions that overlap with compute: those of kept gradients run until the step's end, since no memory waits for
them; of the others at most one is in flight on a rank (``InFlightReduction``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fivefold.trainer.model.float8.cast import Cast, add_cast_
from fivefold.trainer.model.linear import GradBuffer
from fivefold.trainer.parallel.collectives import Pending, all_reduce, reduce_scatter
from fivefold.trainer.parallel.mesh import AxisGroup
from fivefold.trainer.parallel.shard import WeightShard


@dataclass(frozen=True)
class ExtraReduce:
    """An all_reduce over ``axis`` of the gradients of some weights, given by their index in the unit.

    ``runs_at_step_end``: run it at the end of the step, because those ranks follow another schedule.
    """

    axis: AxisGroup
    weights: tuple[int, ...]
    runs_at_step_end: bool = False


class Watch(Protocol):
    """An observer of a rank's accumulated gradients before they are reduced."""

    def add(self, gradients: Gradients, columns: tuple[Tensor, ...]) -> None:
        """Observe the ``columns`` [ranks, padded numel] of each weight."""


class InFlightReduction:
    """The reduction that is in flight on this rank. It ends when another has started, or with the next pass."""

    def __init__(self) -> None:
        self._gradients: Gradients | None = None
        self._new = False  # started in the current pass

    def begin(self, gradients: Gradients) -> None:
        """Record that a reduction of ``gradients`` has started, and finish the one before it."""
        self.finish()
        self._gradients, self._new = gradients, True

    def finish(self) -> None:
        """Wait for the reduction in flight, if any."""
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            gradients.finish_reduce()

    def pass_ended(self) -> None:
        """Record that a forward, backward or W has ended, and finish a reduction that started before it."""
        if not self._new:
            self.finish()
        self._new = False


class Gradients:
    """The gradients of ``shards``; none if all weights of the unit are frozen.

    ``keeps_full_gradients``: full gradients are kept until the update; ``every_micro_batch``: gradients are reduced
    after every backward; ``dtype``: dtype of the accumulation buffer; ``in_flight_reduction``: None if every reduction
    is waited for at once.

    ``expected``: gradients of each weight before a reduction; ``reductions_per_step``: set in ``placement.py``.
    """

    def __init__(
        self,
        shards: Sequence[WeightShard],
        *,
        shard: AxisGroup,
        replica: AxisGroup,
        sums: Sequence[ExtraReduce],
        keeps_full_gradients: bool,
        every_micro_batch: bool,
        dtype: torch.dtype,
        device: torch.device,
        in_flight_reduction: InFlightReduction | None,
    ) -> None:
        self.shards, self.shard, self.replica, self.extra_reduces = shards, shard, replica, tuple(sums)
        self.keeps_full_gradients, self.every_micro_batch, self.dtype, self.device, self.in_flight_reduction = (
            keeps_full_gradients,
            every_micro_batch,
            dtype,
            device,
            in_flight_reduction,
        )
        self.sizes = [weight_shard.padded_numel for weight_shard in shards]
        self.numel = sum(self.sizes)
        self.expected = [int(shard.local_weight.weight.has_gradient) for shard in shards]
        self.reductions_per_step = int(bool(shards))
        self.reduced: Tensor | None = None
        self._sums: Tensor | None = None  # the accumulation buffer
        self._columns: tuple[Tensor, ...] = ()  # views of _sums, one per weight
        self._received = [0] * len(shards)  # since the last reduction
        self._n_reductions = 0  # reductions of this step
        self._reducing: Pending | None = None
        self._runs_to_step_end = keeps_full_gradients and in_flight_reduction is not None
        self.squares: Watch | None = None  # observes each sum before it is reduced

    def transient_tensors(self) -> list[Tensor]:
        """Return the tensors that are allocated only within a step."""
        return [buffer for buffer in (self._sums, self.reduced) if buffer is not None]

    def repeat(self, passes: int, *, before: int) -> None:
        """Expect the gradients of ``passes`` micro-batches instead of ``before``."""
        if self.every_micro_batch:
            self.reductions_per_step = self.reductions_per_step * passes // before
        else:
            self.expected = [count * passes // before for count in self.expected]

    def on_optimizer_step(self) -> None:
        """Drop the gradients, which the optimizer has used."""
        self._sums = self.reduced = None
        self._columns, self._n_reductions = (), 0
        self._received = [0] * len(self.shards)
        for shard in self.shards:
            shard.gradient = None

    def grad_buffer(self, index: int, weight: Tensor) -> GradBuffer | None:
        """Return the buffer into which the next gradient of ``weight`` may be written.

        None if its sums are sharded over ranks or have another dtype.
        """
        if self.shard.size > 1 or self.dtype != weight.dtype:
            return None
        return GradBuffer(self._get_sums(index).view(weight.shape), fresh=not self._received[index])

    def add(self, index: int, gradient: Tensor | Cast | None) -> None:
        """Add a gradient of one weight, or None if it was written into its ``grad_buffer``.

        The last of the expected gradients starts the reduction.
        """
        self.accumulate(index, gradient)
        self._received[index] += 1
        if self._received == self.expected:
            self._received = [0] * len(self.shards)
            self._reduce()

    def _get_sums(self, index: int) -> Tensor:
        """Return the columns [ranks, padded numel] of one weight in the reduce_scatter buffer, once it is writable."""
        if self._reducing is not None and self.in_flight_reduction is not None:
            self.in_flight_reduction.finish()  # the reduction of the previous micro-batch
        if self._sums is None:
            self._sums = torch.empty(self.shard.size, self.numel, dtype=self.dtype, device=self.device)
            self._columns = self._sums.split(self.sizes, dim=1)
            for columns, shard in zip(self._columns, self.shards, strict=True):
                if not shard.local_weight.weight.has_gradient:
                    columns.zero_()
        return self._columns[index]

    def has_sum(self, index: int) -> bool:
        """Return whether the next gradient of a weight is added to earlier ones."""
        return self._received[index] > 0

    def accumulate(self, index: int, gradient: Tensor | Cast | None) -> None:
        """Add one weight's gradient to the reduce_scatter buffer [ranks, numel], whose row r is rank r's chunk.

        A ``Cast`` is a gradient in fp8 with its scales.
        """
        if gradient is None:
            return
        columns = self._get_sums(index)
        if isinstance(gradient, Cast):
            add_cast_(columns, gradient, fresh=not self._received[index])
            return
        full, rest = divmod(gradient.numel(), self.sizes[index])  # rows that are filled, and numbers of the next one
        targets = ([columns[:full]] if full else []) + ([columns[full, :rest]] if rest else [])
        parts = [gradient] if len(targets) == 1 else gradient.reshape(-1).split([targets[0].numel(), rest])
        for target, part in zip(targets, parts, strict=True):
            same_shape = part.reshape(target.shape)
            target.add_(same_shape) if self._received[index] else target.copy_(same_shape)

    def _reduce(self) -> None:
        """Start the reduce_scatter (all_reduce if nothing is sharded) of the gradients added since the last one."""
        sums = self._sums
        assert sums is not None
        self._n_reductions += 1
        if self.squares is not None:
            self.squares.add(self, self._columns)
        if self.keeps_full_gradients:
            self.reduced = sums[self.shard.rank]
        elif self.reduced is None:
            self.reduced = torch.empty(self.numel, dtype=sums.dtype, device=self.device)
        else:
            sums[self.shard.rank].add_(self.reduced)
        unsharded = self.shard.size == 1
        self._reducing = (
            all_reduce(self.reduced, self.replica)
            if unsharded
            else reduce_scatter(sums.view(-1), self.shard, out=self.reduced)
        )
        if self.in_flight_reduction is None:
            self.finish_reduce()
        elif not self._runs_to_step_end:
            self.in_flight_reduction.begin(self)

    def finish_reduce(self) -> None:
        """Wait for the reduction that was started; the last one of the step is also summed over replicas and copies."""
        assert self._reducing is not None
        assert self._sums is not None
        assert self.reduced is not None
        self._reducing.wait()
        self._reducing = None
        if not self.keeps_full_gradients:
            resize(self._sums, 0)
            self._sums, self._columns = None, ()
        if self._n_reductions < self.reductions_per_step:
            return
        if self.shard.size > 1:
            all_reduce(self.reduced, self.replica).wait()
        for extra_reduce in self.extra_reduces:
            if not extra_reduce.runs_at_step_end:
                self._sum(extra_reduce)

    def finish(self) -> None:
        """End the step's backward: wait for the reduction, run the last all_reduces, set the shards' gradients."""
        if self._runs_to_step_end and self._reducing is not None:
            self.finish_reduce()
        elif self._reducing is not None and self.in_flight_reduction is not None:
            self.in_flight_reduction.finish()
        assert self._n_reductions == self.reductions_per_step, (
            f"{self._n_reductions} reductions of {self.shards[0].name}, not {self.reductions_per_step}"
        )
        for extra_reduce in self.extra_reduces:
            if extra_reduce.runs_at_step_end:
                self._sum(extra_reduce)
        if self.shards:
            self._set_grads()

    def _sum(self, extra_reduce: ExtraReduce) -> None:
        assert self.reduced is not None
        parts = self.reduced.split(self.sizes)
        if len(extra_reduce.weights) == len(parts):
            all_reduce(self.reduced, extra_reduce.axis).wait()
            return
        selected = [parts[index] for index in extra_reduce.weights]
        summed = all_reduce(torch.cat(selected), extra_reduce.axis).wait()
        torch._foreach_copy_(selected, list(summed.split([part.numel() for part in selected])))

    def _set_grads(self) -> None:
        assert self.reduced is not None
        for shard, chunk in zip(self.shards, self.reduced.split(self.sizes), strict=True):
            shard.gradient = shard.view_local(chunk).to(shard.weight.dtype)


def resize(tensor: Tensor, numel: int) -> None:
    """Resize the storage of ``tensor`` to ``numel`` elements at once, even if gloo's threads still refer to it."""
    torch.ops.inductor.resize_storage_bytes_(tensor, numel * tensor.element_size())
