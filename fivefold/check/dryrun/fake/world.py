"""A fake world for one rank: torch's "fake" process group of any size, and fake tensors without storage.

    with fake_rank(layout, rank=3): …build, Engine.step…      collectives return at once, tensors have only shapes

What would depend on values is made even: each expert gets as many rows as every other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.check.dryrun.fake.collectives import Group
from fivefold.layout.mesh import group
from fivefold.layout.spec import Layout
from fivefold.train.model.attention import LatentAttention
from fivefold.train.model.flash_attention import Flash
from fivefold.train.model.moe import Moe
from fivefold.train.parallel.expert import AllToAllDispatcher, DispatchPlan
from fivefold.train.parallel.mesh import Ranks


@contextmanager
def fake_rank(layout: Layout, *, rank: int) -> Iterator[None]:
    """Make this process ``rank`` of the layout's world, with fake tensors on the CPU."""
    if dist.is_initialized():
        raise RuntimeError("a rehearsal makes a world of its own, but this process is in one")
    hook = sys.excepthook  # init_process_group wraps it, and destroy_process_group does not restore it
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def representatives(layout: Layout) -> tuple[int, ...]:
    """Return the first rank of each pipeline rank: of the ranks with the same stages its shards are the largest."""
    pp = group(layout, "pp")
    return tuple(place * pp.stride for place in range(pp.ranks))


def even_experts(module: nn.Module) -> None:
    """Make every MoE layer of ``module`` route the same number of rows to each expert."""
    for layer in (part for part in module.modules() if isinstance(part, Moe)):
        layer.experts.ends = even_ends
        if isinstance(layer.dispatcher, AllToAllDispatcher):
            layer.dispatcher = dispatcher = EvenDispatcher(
                layer.dispatcher.ep, layer.dispatcher.etp, narrow=layer.dispatcher.narrow
            )
            layer.experts.meanwhile = dispatcher.meanwhile


def even_ends(offsets: Tensor, rows: int) -> list[int]:
    """Return the end row of each expert, without reading ``offsets``."""
    return [rows * (place + 1) // len(offsets) for place in range(len(offsets))]


class EvenDispatcher(AllToAllDispatcher):
    """An all-to-all dispatcher whose plans assume even row counts."""

    def plan(self, counts: Tensor) -> DispatchPlan:
        """Start the exchange of counts, as the real dispatcher does."""
        return EvenDispatchPlan(counts, self.ep, self.etp, meanwhile=self.meanwhile, narrow=self.narrow)


class EvenDispatchPlan(DispatchPlan):
    """A dispatch plan with rows spread over ranks as evenly as possible, the same on all ranks."""

    def read(self, numbers: Tensor, copies: int) -> list[int]:
        """Return the rows to send to each rank, then those to receive, without reading ``numbers``."""
        shares = [copies // self.ep.size + (place < copies % self.ep.size) for place in range(self.ep.size)]
        return [*shares, *[shares[self.ep.rank]] * (self.ep.size * self.etp.size)]


def gpu_attention(module: nn.Module) -> None:
    """Replace latent attention's flash core by the GPU's kernel, which needs no padding where v is narrower than k."""
    for layer in (part for part in module.modules() if isinstance(part, LatentAttention)):
        if isinstance(layer.core, Flash):
            layer.core = GpuFlash(scale=layer.core.scale)


class GpuFlash(Flash):
    """Memory-efficient attention: what ``scaled_dot_product_attention`` takes on GPUs if dims of k and v differ."""

    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Return [B, T, N, H of v]."""
        heads = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        found = torch.ops.aten._scaled_dot_product_efficient_attention(*heads, None, True, 0.0, True, scale=self.scale)
        out_BNTH: Tensor = found[0]
        return out_BNTH.transpose(1, 2)


def groups_of(ranks: Ranks) -> Callable[[str], Group]:
    """Return a function from the name of a process group of ``ranks`` to its ``Group``."""
    members: dict[str, tuple[int, ...]] = {}
    members |= {axis.group.group_name: axis.ranks for axis in ranks.axes.values() if axis.group is not None}
    return lambda name: Group(ranks.axis(name), members[name])
