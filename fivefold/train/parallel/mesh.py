"""The process groups of a layout. Collectives issued here: none, but each group knows its axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fivefold.layout.spec import Layout


@dataclass(frozen=True)
class Ranks:
    """This process among the others. ``shard`` x ``replicate`` = dp: ZeRO cuts over the one, sums over both."""

    rank: int
    world: int
    device: torch.device
    data: dist.ProcessGroup
    shard: dist.ProcessGroup
    replicate: dist.ProcessGroup
    mesh: DeviceMesh  # (replicate, shard)

    @property
    def shard_rank(self) -> int:
        """Which shard of every weight lies here."""
        return self.rank % self.shard.size()

    def axis(self, group_name: str) -> str:
        """The axis over which the group of that name speaks."""
        data = (self.data, self.shard, self.replicate)
        return "dp" if any(group.group_name == group_name for group in data) else "world"


def ranks(layout: Layout, *, device: torch.device) -> Ranks:
    """Process groups of ``layout`` over the initialised world; every rank must call it."""
    shards, everyone = layout.shards, dist.group.WORLD
    assert everyone is not None, "start the process group first"
    mesh = init_device_mesh(device.type, (layout.dp // shards, shards), mesh_dim_names=("replicate", "shard"))
    return Ranks(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=device,
        data=everyone,
        shard=mesh.get_group("shard"),
        replicate=mesh.get_group("replicate"),
        mesh=mesh,
    )
