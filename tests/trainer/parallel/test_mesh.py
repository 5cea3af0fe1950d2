"""The process groups that ranks make, and their members, in a fake world."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fivefold.dry_run.fake.world import enter_fake_rank
from fivefold.layout.mesh import list_members
from fivefold.layout.spec import Layout
from fivefold.trainer.parallel.mesh import AxisGroup, ProcessGroups, create_ranks

KINDS = ("dp", "cp", "tp", "pp", "shard", "replica", "stage", "ep", "etp", "expert_shard", "expert_replica")


def axes(layout: Layout, *, experts: bool = True, kv_heads: int = 2) -> list[dict[str, AxisGroup]]:
    """Of every rank; a group's members are those that torch knows."""
    results = []
    for rank in range(layout.world):
        with enter_fake_rank(layout, rank=rank):
            made = create_ranks(layout, kv_heads=kv_heads, device=torch.device("cpu"), experts=experts)
            for axis in made.axes.values():
                if axis.group is not None:
                    assert tuple(dist.get_process_group_ranks(axis.group)) == axis.ranks
                else:
                    assert axis.ranks == (rank,)
                assert axis.ranks[axis.rank] == rank
            results.append(dict(made.axes))
    return results


@pytest.mark.parametrize(
    "text",
    [
        "dp2 tp2 pp2 ep2 zero1/2 order=tp-dp-cp-pp", "tp2 pp2 order=dp-pp-tp-cp", "tp4 pp2 ep2 etp2 order=cp-pp-tp-dp",
        "dp2 cp2 tp2 ep4 zero2/2 order=cp-dp-tp-pp", "dp10 ep2 zero1/5", "tp4 dp2 pp2 ep2 order=dp-tp-pp-cp zero3",
    ],
)  # fmt: skip
def test_ranks_communicate_with_the_groups_of_the_layout(text: str) -> None:
    layout = Layout.parse(text)
    for rank, made in enumerate(axes(layout)):
        assert {kind: made[kind].ranks for kind in KINDS} == {
            kind: list_members(layout, kind, rank=rank) for kind in KINDS
        }
        for name, axis in made.items():
            if name not in ("world", "twin", "pp_tie") and not name.startswith("pp"):
                assert set(axis.ranks) <= set(made["stage"].ranks), name  # none spans two pipeline stages


def test_a_dense_model_has_no_groups_of_experts() -> None:
    """Its order of axes may be one in which they would span pipeline stages."""
    for made in axes(Layout.parse("dp2 tp2 pp2 order=dp-pp-tp-cp"), experts=False):
        assert {made[kind].size for kind in ("ep", "etp", "expert_shard", "expert_replica")} == {1}


@pytest.mark.parametrize(("kv_heads", "expected"), [(1, (0, 4, 8, 12)), (2, (0, 4)), (4, (0,)), (8, (0,))])
def test_tensor_parallel_ranks_with_the_same_key_head_form_a_group(kv_heads: int, expected: tuple[int, ...]) -> None:
    assert axes(Layout.parse("tp4 dp4 order=dp-tp-cp-pp"), kv_heads=kv_heads)[0]["kv"].ranks == expected


@pytest.mark.parametrize(
    ("text", "apart"), [("cp2", True), ("dp2 cp2", True), ("cp4", False), ("cp2 cp=ulysses", False)]
)
def test_a_ring_of_two_has_a_group_for_each_way(text: str, apart: bool) -> None:
    """Over one connection of gloo a post of one way waits while a message of the other is read."""
    layout = Layout.parse(text)
    names = []
    for rank in list_members(layout, "cp", rank=0)[:2]:
        with enter_fake_rank(layout, rank=rank):
            made = create_ranks(layout, kv_heads=2, device=torch.device("cpu"))
            axis = made["cp"]
            there, home = axis.way(0, 1), axis.way(1, 0)
            assert there is not None
            assert home is not None
            assert {made.axis(group.group_name) for group in (there, home)} == {"cp"}
            assert tuple(dist.get_process_group_ranks(home)) == axis.ranks
            names.append((there.group_name, home.group_name))
            assert create_ranks(layout, kv_heads=2, device=torch.device("cuda"), streams=False)["cp"].back is None
    assert len(set(names)) == 1  # both ends mean the same
    assert (names[0][0] != names[0][1]) == apart


def test_models_that_run_in_turns_share_their_groups() -> None:
    """Each axis keeps groups of its own: a ring's two ways, and the messages of dp and shards, do not share one."""
    groups: ProcessGroups = {}
    cpu = torch.device("cpu")
    with enter_fake_rank(Layout.parse("dp2 cp2"), rank=0):
        first, second = (
            create_ranks(Layout.parse("dp2 cp2"), kv_heads=2, device=cpu, groups=groups) for _model in range(2)
        )
        alone = create_ranks(Layout.parse("dp2 cp2"), kv_heads=2, device=cpu)
        for name, axis in first.axes.items():
            assert second[name].group is axis.group
            assert second[name].back is axis.back
        assert second.listener is not first.listener
        shared = [group for axis in first.axes.values() for group in axis.groups if axis.name != "world"]
        assert len({id(group) for group in shared}) == len(shared) == len(groups)
        assert alone["dp"].group is not first["dp"].group
