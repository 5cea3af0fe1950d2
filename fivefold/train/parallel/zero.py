"""Data parallelism with ZeRO 0-3 in one mechanism; the stages differ in what a unit keeps (``layout/sharding.py``).

Sharded: the rows of every local weight over the shard group, in the copy that the optimizer updates.
Per unit: all_gather of the weights when they are stale or were released; after the last micro-batch reduce_scatter of
the summed gradients over the shard group, all_reduce over its replicas, and over ranks that hold copies of some
weights (``ExtraReduce``).
FSDP2 is not used: it copies the weights even where nothing is sharded (``docs/decisions/001-own-zero.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fivefold.layout.sharding import Policy
from fivefold.train.model.linear import accumulate_grad
from fivefold.train.model.precision import Dtypes
from fivefold.train.parallel.collectives import Pending, all_gather, all_reduce, reduce_scatter
from fivefold.train.parallel.fp8_gather import Payload
from fivefold.train.parallel.mesh import Axis
from fivefold.train.parallel.shard import LocalWeight, Shard


@dataclass(frozen=True)
class ExtraReduce:
    """An all_reduce over ``axis`` of the gradients of some weights, given by their index in the unit.

    ``late``: run it at the end of the step, because those ranks follow another schedule.
    """

    axis: Axis
    weights: tuple[int, ...]
    late: bool = False


class ZeroUnit:
    """The weights of one unit, as in FSDP: gathers weights, sums and reduces gradients, keeps the optimizer's shards.

    ``expected_grads``: gradients of each weight per step, set by ``placement.py``; the last one starts the reduce.
    """

    def __init__(
        self, module: nn.Module, held: Sequence[LocalWeight], *, shard: Axis, replica: Axis,
        sums: Sequence[ExtraReduce] = (), policy: Policy, dtypes: Dtypes, device: torch.device, ahead: bool = False,
    ) -> None:  # fmt: skip
        self.shard, self.replica, self.also, self.policy, self.dtypes = shard, replica, tuple(sums), policy, dtypes
        self.device, self.ahead = device, ahead
        self.shards = [Shard(each, axis=shard) for each in held]
        self.sizes = [each.padded_numel for each in self.shards]
        self.numel = sum(self.sizes)
        self.expected_grads = [1] * len(self.shards)
        self.neighbours: dict[str, ZeroUnit] = {}  # "forward", "backward": the unit to prefetch next
        self.mates: list[ZeroUnit] = []  # units of the same module, released with this one
        self.follows = False
        self.payload: Payload | None = None  # set if the all_gather sends fp8
        self.reduced: Tensor | None = None
        self._sums: Tensor | None = None
        self._columns: tuple[Tensor, ...] = ()  # views of _sums, one per weight
        self._grads_received = [0] * len(self.shards)
        self._gathered_is_current = False
        self._gathering: Pending | None = None
        self._reducing: Pending | None = None
        self._allocate(module)

    def _allocate(self, module: nn.Module) -> None:
        """Allocate weights and shards; a shard is a view of the gathered buffer if dtype and policy allow."""
        count = self.shard.size
        self.gathered = torch.zeros(self.numel * count, dtype=self.dtypes.weights, device=self.device)
        self._parts = [part.view(count, -1) for part in self.gathered.split([size * count for size in self.sizes])]
        for index, (shard, part) in enumerate(zip(self.shards, self._parts, strict=True)):
            view = part.view(-1)[: shard.shape.numel()].view(shard.shape)
            # .data: a new all_gather must not count as an in-place change for autograd
            parameter = nn.Parameter(view.data)
            parameter.collect = self._grad_hook(index)  # type: ignore[attr-defined]  # called by linear.accumulate_grad
            parameter.register_post_accumulate_grad_hook(_collected)
            owner, _, attribute = shard.name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
        self.apart = self.dtypes.updated != self.dtypes.weights or not self.policy.weights_stay
        if self.apart:
            self.own = torch.zeros(self.numel, dtype=self.dtypes.updated, device=self.device)
            chunks = list(self.own.split(self.sizes))
        else:
            chunks = [part[self.shard.rank] for part in self._parts]
        self._chunks = chunks
        for shard, chunk in zip(self.shards, chunks, strict=True):
            shard.weight.data = shard.local(chunk)

    # Weights: shards → gathered

    def begin(self) -> None:
        """Start the all_gather of the weights, unless they are current or it is running."""
        if self._gathered_is_current or self._gathering is not None:
            return
        if self.gathered.untyped_storage().size() == 0:
            resize(self.gathered, self.gathered.numel())
        if self.shard.size == 1:
            if self.apart:
                self.gathered.copy_(self.own)
            self._gathered_is_current = True
            return
        self._sent_copied = not self.apart or self.dtypes.updated != self.dtypes.weights
        send = self.own if not self._sent_copied else self._narrowed()
        self._gathering, self._sent = all_gather(send, self.shard), send

    def _narrowed(self) -> Tensor:
        if self.payload is not None:
            return self.payload.pack()
        send = torch.empty(self.numel, dtype=self.dtypes.weights, device=self.device)
        torch._foreach_copy_(list(send.split(self.sizes)), self._chunks)
        return send

    def gather(self, onward: str = "forward") -> None:
        """Wait until the gathered weights are current, and start prefetching the next unit in direction ``onward``."""
        if not self._gathered_is_current:
            self.begin()
        if self._gathering is not None:
            received = self._gathering.wait()
            self._gathering = None
            if self.payload is not None:
                self.payload.unpack(received, self._parts)
            else:
                torch.split_with_sizes_copy(received.view(self.shard.size, -1), self.sizes, dim=1, out=self._parts)
            resize(received, 0)
            if self._sent_copied:
                resize(self._sent, 0)
            del self._sent
            self._gathered_is_current = True
        if self.ahead and onward in self.neighbours:
            self.neighbours[onward].begin()

    def release(self) -> None:
        """Free the gathered weights if the policy says so (ZeRO-3); autograd keeps its view of the empty storage."""
        if not self.policy.weights_stay and self._gathering is None:
            resize(self.gathered, 0)
            self._gathered_is_current = False

    def live_tensors(self) -> list[Tensor]:
        """Tensors that the unit holds between steps."""
        return [self.gathered, self.own] if self.apart else [self.gathered]

    def passing(self) -> list[Tensor]:
        """Tensors that live within a step: gathered weights, buffers of their messages, and gradients."""
        coming = [self._gathering.arriving, self._sent] if self._gathering is not None else []
        return [self.gathered, *coming, *(each for each in (self._sums, self.reduced) if each is not None)]

    def drop(self) -> None:
        """Mark the gathered weights stale, and free them if the policy says so."""
        if self._gathering is not None:
            self.gather("")
        self.release()
        self._stale()

    def _stale(self) -> None:
        self._gathered_is_current = False
        if self.payload is not None:
            self.payload.scales.forget()

    def updated(self) -> None:
        """Call after the optimizer has changed the shards: drops gradients and marks the gathered weights stale."""
        assert self._gathering is None, "weights that were fetched ahead were not used"
        self._sums = self.reduced = None
        self._columns = ()
        self._grads_received = [0] * len(self.shards)
        self._stale()
        for shard in self.shards:
            shard.weight.grad = None

    # Gradients: gathered → shards

    def add_mate(self, mate: ZeroUnit) -> None:
        """Add a unit of the same module, which this one releases together with itself."""
        self.mates.append(mate)
        mate.follows = True

    def _grad_hook(self, index: int) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def collect(gradient: Tensor) -> None:
            self._add(index, gradient)
            self._grads_received[index] += 1
            if index == 0 and not self.follows:  # used first in the forward, so last in the backward: the unit is done
                for unit in (self, *self.mates):
                    unit.release()
            if self._grads_received == self.expected_grads:
                self._reduce()

        return collect

    def _add(self, index: int, grad: Tensor) -> None:
        """Add one weight's gradient to the reduce_scatter buffer [ranks, numel], whose row r is rank r's chunk."""
        count = self.shard.size
        if self._sums is None:
            self._sums = torch.empty(count, self.numel, dtype=self.dtypes.summed, device=self.device)
            self._columns = self._sums.split(self.sizes, dim=1)
        columns = self._columns[index]
        even = grad.numel() == columns.numel()
        rows = [columns] if even else columns.unbind()
        chunks = [grad.reshape(count, -1)] if even else grad.reshape(-1).split(self.sizes[index])
        for row, chunk in zip(rows, chunks, strict=False):  # the last ranks may have no chunk
            target = row if even else row[: chunk.numel()]
            target.add_(chunk) if self._grads_received[index] else target.copy_(chunk)

    def _reduce(self) -> None:
        """Start the reduce_scatter, or all_reduce if nothing is sharded: all gradients of the step have arrived."""
        sums = self._sums
        assert sums is not None
        if self.policy.gradients_stay:
            self.reduced = sums[self.shard.rank]
        else:
            self.reduced = torch.empty(self.numel, dtype=sums.dtype, device=self.device)
        whole = self.shard.size == 1
        self._reducing = (
            all_reduce(self.reduced, self.replica)
            if whole
            else reduce_scatter(sums.view(-1), self.shard, out=self.reduced)
        )
        before = self if not self.ahead else self.neighbours.get("forward")  # at most one runs at a time
        if before is not None and before._reducing is not None:
            before._finish_reduce()

    def _finish_reduce(self) -> None:
        assert self._reducing is not None
        assert self._sums is not None
        assert self.reduced is not None
        self._reducing.wait()
        self._reducing = None
        if not self.policy.gradients_stay:
            resize(self._sums, 0)
            self._sums, self._columns = None, ()
        if self.shard.size > 1:
            all_reduce(self.reduced, self.replica).wait()
        for also in self.also:
            if not also.late:
                self._sum(also)

    def finish(self) -> None:
        """End the step's backward: wait for the reduce, run ``late`` all_reduces, set the shards' ``.grad``."""
        if self._reducing is not None:
            self._finish_reduce()
        for also in self.also:
            if also.late:
                self._sum(also)
        self._set_grads()

    def _sum(self, also: ExtraReduce) -> None:
        assert self.reduced is not None
        parts = self.reduced.split(self.sizes)
        if len(also.weights) == len(parts):
            all_reduce(self.reduced, also.axis).wait()
            return
        chosen = [parts[index] for index in also.weights]
        summed = all_reduce(torch.cat(chosen), also.axis).wait()
        torch._foreach_copy_(chosen, list(summed.split([part.numel() for part in chosen])))

    def _set_grads(self) -> None:
        assert self.reduced is not None
        for shard, chunk in zip(self.shards, self.reduced.split(self.sizes), strict=True):
            shard.weight.grad = shard.local(chunk).to(shard.weight.dtype)


def _collected(weight: nn.Parameter) -> None:
    """Move ``weight.grad`` to the unit's buffer. Autograd also calls this hook without a gradient."""
    gradient, weight.grad = weight.grad, None
    if gradient is not None:
        accumulate_grad(weight, gradient)


def resize(tensor: Tensor, numel: int) -> None:
    """Resize the storage of ``tensor`` to ``numel`` elements at once, even if gloo's threads still refer to it."""
    torch.ops.inductor.resize_storage_bytes_(tensor, numel * tensor.element_size())


def attach(
    module: nn.Module, units: Sequence[ZeroUnit], *, keep: bool = False, backward: bool = True, onward: str = "forward"
) -> None:  # fmt: skip
    """Gather ``units`` before ``module``'s forward, release after it unless ``keep``, gather before its ``backward``.

    ``onward``: the key in ``neighbours`` of the unit to prefetch in the forward; "": none.
    """

    def before(_module: nn.Module, _inputs: object) -> None:
        for unit in units:
            unit.gather(onward)

    def after(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if all(unit.policy.weights_stay for unit in units):
            return
        if not keep:
            for unit in units:
                unit.release()
        if backward and output.requires_grad:
            output.register_hook(re_gather)

    def re_gather(_gradient: Tensor) -> None:
        for unit in units:
            unit.gather("backward")

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
