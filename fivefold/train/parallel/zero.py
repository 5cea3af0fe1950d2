"""Data parallelism with ZeRO: one mechanism, whose stages differ in what a unit keeps (``layout/sharding.py``).

Sharded: dim 0 of every weight over the shard group, in the copy that the optimizer updates.
Issued per unit: all_gather of the weights when they are stale or were let go; after the last micro-batch
reduce_scatter of the summed gradients over the shard group and all_reduce over its replicas.

FSDP2 is not used: it copies the weights even where nothing is sharded (``docs/decisions/001-own-zero.md``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.layout.sharding import Policy, chunk_rows
from fivefold.train.parallel.mesh import Ranks
from fivefold.train.precision import Dtypes

if hasattr(dist, "all_gather_single"):  # torch 2.13; 2.11 knows the older names alone
    _all_gather, _reduce_scatter = dist.all_gather_single, dist.reduce_scatter_single
else:
    _all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


class Shard:
    """This rank's part of one weight: the rows that the optimizer updates, and the gradient for them."""

    def __init__(self, name: str, shape: torch.Size, *, ranks: Ranks) -> None:
        self.name, self.shape = name, shape
        self.columns = shape[1:].numel()
        padded_rows = chunk_rows(shape[0], shards=ranks.shard.size())
        self.padded_numel = padded_rows * self.columns
        self.first_row = min(ranks.shard_rank * padded_rows, shape[0])
        self.rows = min(padded_rows, shape[0] - self.first_row)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def local(self, flat: Tensor) -> Tensor:
        """The unpadded rows of a flat padded chunk, in the shape of the weight's rows."""
        return flat[: self.rows * self.columns].view(self.rows, *self.shape[1:])


class ZeroUnit:
    """The weights of one unit: gathered for compute, summed in gradient, sharded for the optimizer."""

    def __init__(self, module: nn.Module, names: list[str], *, ranks: Ranks, policy: Policy, dtypes: Dtypes) -> None:
        self.ranks, self.policy, self.dtypes = ranks, policy, dtypes
        self.shards = [Shard(name, module.get_parameter(name).shape, ranks=ranks) for name in names]
        self.sizes = [shard.padded_numel for shard in self.shards]
        self.numel = sum(self.sizes)
        self.first_micro_batch = self.last_micro_batch = True
        self._sums: Tensor | None = None
        self.reduced: Tensor | None = None
        self._waiting = len(names)
        self._fresh = False
        self._allocate(module)

    def _allocate(self, module: nn.Module) -> None:
        """Give weights and shards their storage; a shard lies within the gathered weights where it can."""
        count, device = self.ranks.shard.size(), self.ranks.device
        self.whole = torch.zeros(self.numel * count, dtype=self.dtypes.weights, device=device)
        self._parts = [part.view(count, -1) for part in self.whole.split([size * count for size in self.sizes])]
        for index, (shard, part) in enumerate(zip(self.shards, self._parts, strict=True)):
            view = part.view(-1)[: shard.shape.numel()].view(shard.shape)
            parameter = nn.Parameter(view.data)  # .data: filling `whole` anew must not look like a change to autograd
            parameter.register_post_accumulate_grad_hook(self._collector(index))
            owner, _, attribute = shard.name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
        self.apart = self.dtypes.updated != self.dtypes.weights or not self.policy.weights_stay
        if self.apart:
            self.own = torch.zeros(self.numel, dtype=self.dtypes.updated, device=device)
            chunks = list(self.own.split(self.sizes))
        else:
            chunks = [part[self.ranks.shard_rank] for part in self._parts]
        self._chunks = chunks
        for shard, chunk in zip(self.shards, chunks, strict=True):
            shard.weight.data = shard.local(chunk)

    # Weights: shards → whole

    def gather(self) -> None:
        """Make the whole weights current: one all_gather if they were let go or the optimizer has run."""
        if self._fresh:
            return
        self._fresh = True
        if self.whole.untyped_storage().size() == 0:
            _resize(self.whole, self.whole.numel())
        count = self.ranks.shard.size()
        if count == 1:
            if self.apart:
                self.whole.copy_(self.own)
            return
        copied = not self.apart or self.dtypes.updated != self.dtypes.weights
        if copied:
            send = torch.empty(self.numel, dtype=self.dtypes.weights, device=self.ranks.device)
            torch._foreach_copy_(list(send.split(self.sizes)), self._chunks)
        else:
            send = self.own
        received = torch.empty(self.numel * count, dtype=self.dtypes.weights, device=self.ranks.device)
        _all_gather(received, send, group=self.ranks.shard)
        torch.split_with_sizes_copy(received.view(count, -1), self.sizes, dim=1, out=self._parts)
        _resize(received, 0)
        if copied:
            _resize(send, 0)

    def release(self) -> None:
        """Let the whole weights go where the policy says so; autograd keeps its view of the empty storage."""
        if not self.policy.weights_stay:
            _resize(self.whole, 0)
            self._fresh = False

    def living(self) -> list[Tensor]:
        """What the unit holds between steps."""
        return [self.whole, self.own] if self.apart else [self.whole]

    def drop(self) -> None:
        """Forget that the whole weights are current, and let them go where the policy says so."""
        self.release()
        self._fresh = False

    def updated(self) -> None:
        """The optimizer has changed the shards: drop gradients, and gather again before the next use."""
        self._sums = self.reduced = None
        self._fresh = False
        for shard in self.shards:
            shard.weight.grad = None

    # Gradients: whole → shards

    def _collector(self, index: int) -> Callable[[nn.Parameter], None]:
        def collect(parameter: nn.Parameter) -> None:
            grad, parameter.grad = parameter.grad, None
            assert grad is not None
            self._add(index, grad)
            self._waiting -= 1
            if self._waiting == 0:
                self._finish()

        return collect

    def _add(self, index: int, grad: Tensor) -> None:
        """Add one weight's gradient into the buffer that is reduced as it lies: row r is rank r's chunk."""
        count = self.ranks.shard.size()
        if self._sums is None:
            self._sums = torch.empty(count, self.numel, dtype=self.dtypes.summed, device=self.ranks.device)
        columns = self._sums.split(self.sizes, dim=1)[index]
        even = grad.numel() == columns.numel()
        rows = [columns] if even else columns.unbind()
        chunks = [grad.reshape(count, -1)] if even else grad.reshape(-1).split(self.sizes[index])
        for row, chunk in zip(rows, chunks, strict=False):  # the last ranks may have no chunk
            target = row if even else row[: chunk.numel()]
            target.copy_(chunk) if self.first_micro_batch else target.add_(chunk)

    def _finish(self) -> None:
        """Every gradient of this micro-batch is in."""
        self._waiting = len(self.shards)
        self.release()
        if self.last_micro_batch:
            self._reduce()

    def _reduce(self) -> None:
        sums, own = self._sums, self.ranks.shard_rank
        assert sums is not None
        if self.policy.gradients_stay:
            reduced = sums[own]
        else:
            reduced = torch.empty(self.numel, dtype=sums.dtype, device=sums.device)
            self._sums = None
        if self.ranks.shard.size() > 1:
            _reduce_scatter(reduced, sums.view(-1), group=self.ranks.shard)
        if self.ranks.replicate.size() > 1:
            dist.all_reduce(reduced, group=self.ranks.replicate)
        if not self.policy.gradients_stay:
            _resize(sums, 0)
        self.reduced = reduced
        for shard, chunk in zip(self.shards, reduced.split(self.sizes), strict=True):
            shard.weight.grad = shard.local(chunk).to(shard.weight.dtype)


def _resize(tensor: Tensor, numel: int) -> None:
    """Give ``tensor`` room for ``numel`` elements now, whoever else still refers to it (gloo's threads let go late)."""
    torch.ops.inductor.resize_storage_bytes_(tensor, numel * tensor.element_size())


def attach(module: nn.Module, unit: ZeroUnit, *, keep: bool, backward: bool) -> None:
    """Gather before ``module``'s forward; let go after it unless ``keep``; gather again before its ``backward``."""

    def before(_module: nn.Module, _inputs: object) -> None:
        unit.gather()

    def after(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if keep or unit.policy.weights_stay:
            return
        unit.release()
        if backward and output.requires_grad:
            output.register_hook(lambda _grad: unit.gather())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
