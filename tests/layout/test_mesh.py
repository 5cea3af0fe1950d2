"""Every group of ``layout/mesh.py`` against a mesh made of coordinates, as docs/notation.md §7 defines it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.mesh import group, list_members
from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons, refuse
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.planner.counts.counts import Counts
from fivefold.planner.counts.traffic import list_first_stages, list_messages

DRAWN = 250
MAX_RANKS = 128
KINDS = ("world", "stage", "tp", "cp", "dp", "pp", "shard", "replica", "ep", "etp", "expert_shard", "expert_replica")
Coordinates = dict[str, int]
Team = tuple[int, ...]


def mesh(layout: Layout) -> list[Coordinates]:
    """Of every rank: the first axis of ``order`` counts fastest."""
    results: list[Coordinates] = [{}]
    for axis in layout.order:
        results = [{**at, axis: place} for place in range(getattr(layout, axis)) for at in results]
    return results


def group_ranks(ranks: Team, key: Callable[[int], Hashable]) -> list[Team]:
    """The ranks parted by what they share."""
    teams: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks):
        teams.setdefault(key(rank), []).append(rank)
    return [tuple(team) for team in teams.values()]


def split_runs(team: Team, size: int) -> list[Team]:
    assert len(team) % size == 0
    return [team[start : start + size] for start in range(0, len(team), size)]


def take_across(team: Team, size: int) -> list[Team]:
    """One of each run, in the same place."""
    return [tuple(run[place] for run in split_runs(team, size)) for place in range(size)]


def teams(layout: Layout) -> dict[str, list[Team]]:
    """All groups of every kind."""
    at = mesh(layout)
    everyone = tuple(range(layout.world))

    def list_teams(*axes: str) -> list[Team]:
        return group_ranks(everyone, lambda rank: tuple(at[rank][axis] for axis in axes))

    def room_of(rank: int) -> Hashable:
        return at[rank]["pp"], at[rank]["tp"] % layout.etp

    def etp_of(rank: int) -> Hashable:
        return at[rank]["pp"], at[rank]["dp"], at[rank]["cp"], at[rank]["tp"] // layout.etp

    result = {"world": [everyone], "stage": list_teams("pp"), "etp": group_ranks(everyone, etp_of)}
    for axis in DEFAULT_ORDER:
        result[axis] = list_teams(*(other for other in DEFAULT_ORDER if other != axis))
    result["shard"] = [run for team in list_teams("pp", "tp") for run in split_runs(team, layout.shards)]
    result["replica"] = [item for team in list_teams("pp", "tp") for item in take_across(team, layout.shards)]
    rooms = group_ranks(everyone, room_of)
    result["ep"] = [run for room in rooms for run in split_runs(room, layout.ep)]
    holders = [team for room in rooms for team in take_across(room, layout.ep)]
    result["expert_shard"] = [run for team in holders for run in split_runs(team, layout.expert_shards)]
    result["expert_replica"] = [item for team in holders for item in take_across(team, layout.expert_shards)]
    return result


def make_model_and_job(layout: Layout, *, experts: bool) -> tuple[Model, Job]:
    """What takes every degree of the layout, whatever it is."""
    moe = MoE(experts=12 * layout.ep, topk=2, ffn=12 * layout.etp) if experts else None
    heads = layout.tp * layout.cp
    model = Model(
        name="m",
        layers=2 * layout.pp,
        width=24,
        heads=heads,
        kv_heads=heads,
        head_dim=4,
        ffn=layout.tp * 4,
        vocab=64,
        moe=moe,
    )
    return model, Job(sequence=4 * layout.cp * layout.tp, global_batch=2 * layout.dp * layout.pp)


def choose_divisor(chance: random.Random, number: int) -> int:
    return chance.choice([size for size in range(1, number + 1) if number % size == 0])


def draw_layouts(*, experts: bool) -> Iterator[Layout]:
    """Layouts in any order of axes, that of which is legal."""
    chance, many = random.Random(12), 0
    while many < DRAWN:
        dp, tp, cp, pp = (chance.choice((1, 1, 2, 3, 4, 6, 8, 10)) for _ in range(4))
        etp = choose_divisor(chance, tp) if experts else 1
        zero = chance.choice((0, 1, 2, 3))
        layout = Layout(
            dp=dp,
            tp=tp,
            cp=cp,
            pp=pp,
            etp=etp,
            ep=choose_divisor(chance, dp * cp * tp // etp) if experts else 1,
            zero=zero,
            shard_group=chance.choice((None, choose_divisor(chance, dp * cp))) if zero else None,
            order=tuple(chance.sample(DEFAULT_ORDER, 4)),
        )
        if layout.world > MAX_RANKS:
            continue
        model, job = make_model_and_job(layout, experts=experts)
        refused = list(list_reasons(layout, model=model, job=job, machine=None))
        assert all(reason.startswith("order=") for reason in refused)
        if not refused:
            many += 1
            yield layout


WERE_WRONG = [
    # an axis of one rank before pp: groups of experts spanned stages, and the first step hung
    Layout.parse("tp2 pp2 order=dp-pp-tp-cp"),
    Layout.parse("tp2 pp2 ep2 gpipe order=cp-pp-tp-dp"),
    Layout.parse("tp4 pp2 ep2 etp2 order=cp-dp-pp-tp"),
    # half of five ranks that hold the same experts: groups that reached beyond the world
    Layout.parse("dp10 ep2 zero1/5"),
    Layout.parse("tp5 dp2 ep2 zero2/1"),
]


def test_an_order_whose_groups_have_gaps_is_rejected() -> None:
    """dp and cp with tp between them: ZeRO would have cut dense weights over ranks of tp, and no message been amiss."""
    layout = Layout.parse("dp2 tp2 cp2 zero1 order=dp-tp-cp-pp")
    model, job = make_model_and_job(layout, experts=True)
    with pytest.raises(
        UserError, match=r"tp, dp and cp must be neighbours, dp next to cp; try order=tp-dp-cp-pp or order=dp-cp-tp-pp"
    ):
        refuse(layout, model=model, job=job)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_every_group_is_that_of_the_coordinates(experts: bool) -> None:
    layouts = [*draw_layouts(experts=experts), *(WERE_WRONG if experts else [])]
    kinds = KINDS if experts else KINDS[:8]
    assert len({layout.order for layout in layouts}) == 24
    for layout in layouts:
        expected = teams(layout)
        for kind in kinds:
            result = group(layout, kind)
            assert sorted(rank for team in expected[kind] for rank in team) == list(range(layout.world))
            for team in expected[kind]:
                assert result.ranks == len(team)
                assert list_members(layout, kind, rank=team[-1]) == team, (str(layout), kind)
                for place, rank in enumerate(team) if kind != "stage" else ():  # among whose ranks pp may lie
                    assert result.members(rank) == team, (str(layout), kind, rank)
                    assert result.place(rank) == place, (str(layout), kind, rank)


@pytest.mark.parametrize("layout", [*draw_layouts(experts=True), *WERE_WRONG][::4], ids=str)
def test_expert_groups_meet_their_requirements(layout: Layout) -> None:
    """Without a definition: what the exchange of rows and ZeRO take for granted."""
    at = mesh(layout)

    def places(rank: int, *kinds: str) -> tuple[int, ...]:
        return tuple(group(layout, kind).place(rank) for kind in kinds)

    for stage in teams(layout)["stage"]:
        whole = [places(rank, "ep", "etp", "expert_shard", "expert_replica") for rank in stage]
        assert len(set(whole)) == len(stage)  # each part of an expert, shard and replica lies on one rank
        assert len({places(rank, "tp", "shard", "replica") for rank in stage}) == len(stage)
    for rank in range(layout.world):
        for kind in KINDS:
            if kind not in ("world", "pp"):
                assert {at[other]["pp"] for other in list_members(layout, kind, rank=rank)} == {at[rank]["pp"]}
        for kind in ("expert_shard", "expert_replica"):
            same = {places(other, "ep", "etp") for other in list_members(layout, kind, rank=rank)}
            assert same == {places(rank, "ep", "etp")}
        assert len({places(other, "etp") for other in list_members(layout, "ep", rank=rank)}) == 1
        tensor = list_members(layout, "etp", rank=rank)
        assert len({places(other, "ep") for other in tensor}) == 1  # parts of the same experts
        assert len({places(other, "expert_shard", "expert_replica") for other in tensor}) == 1


@pytest.mark.parametrize("experts", [False, True])
def test_the_planner_counts_with_the_same_sizes(experts: bool) -> None:
    for layout in [*draw_layouts(experts=experts)][::8]:
        model, job = make_model_and_job(layout, experts=experts)
        counts, expected = Counts(model, job), teams(layout)
        for unit, shards, replicas in counts.list_local_parts(layout, counts.stage_work(layout)[0][1][0].name):
            prefix = "expert_" if unit.name == "experts" else ""
            assert shards == len(expected[f"{prefix}shard"][0]), str(layout)
            assert replicas == len(expected[f"{prefix}replica"][0]), str(layout)
        for message in list_messages(counts, layout, chunks=list_first_stages(layout)):
            if message.axis != "pp":  # two neighbours, or the two ends
                assert message.ranks == len(expected[message.group][0]), (str(layout), message)
