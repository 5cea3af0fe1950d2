"""The process groups of many layouts at once are those of each layout's mesh."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.job import Job
from fivefold.layout.mesh import group
from fivefold.model.catalog import build_model
from fivefold.planner.search.placements import list_groups
from fivefold.planner.search.space import Space

AXES = ("tp", "cp", "dp", "pp", "shard", "replica", "etp", "ep", "expert_shard", "expert_replica")


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b"])
def test_groups_of_many_layouts_equal_those_of_each_mesh(name: str) -> None:
    space = Space(build_model(name), Job(sequence=4096, global_batch=96), world=48)
    rows = np.random.default_rng(0).permutation(len(space.partials.dp))[:300]
    candidates = space.place(space.partials, space.shard(space.partials, space.expand(space.partials, rows)))
    candidates = candidates.take(np.random.default_rng(1).permutation(len(candidates.order))[:1000])
    groups = list(list_groups(space.partials.take(candidates.partial), candidates, AXES, orders=space.orders))
    for row in range(len(candidates.order)):
        layout = space.layout(space.partials, candidates, row)
        assert [(ranks[row], stride[row]) for ranks, stride in groups] == [group(layout, axis) for axis in AXES], layout


def test_an_unknown_axis_has_no_groups() -> None:
    space = Space(build_model("tiny"), Job(sequence=64, global_batch=8), world=2)
    candidates = space.expand(space.partials, np.zeros(1, np.int64))
    with pytest.raises(KeyError, match="world"):
        list(list_groups(space.partials.take(candidates.partial), candidates, ("world",), orders=space.orders))
