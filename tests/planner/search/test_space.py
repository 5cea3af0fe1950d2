"""The space against every layout written out, legal by ``Layout`` and ``refuse`` alone."""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.names import DEFAULT_ORDER
from fivefold.layout.schedule.pipeline_schedule import SCHEDULES
from fivefold.layout.spec import Layout
from fivefold.layout.validity import list_reasons, refuse
from fivefold.layout.validity.job import list_mismatches
from fivefold.layout.validity.stack import can_express
from fivefold.layout.where import ANY_LAYOUT, Where
from fivefold.model.catalog import build_model
from fivefold.model.experts import MoE
from fivefold.model.latent_attention import MLA
from fivefold.model.mixers.mamba2 import Mamba2
from fivefold.model.mixers.short_conv import ShortConv
from fivefold.model.spec import Model
from fivefold.planner.search.columns import CandidateLayouts
from fivefold.planner.search.space import Space
from fivefold.stack.catalog import build_stack
from fivefold.stack.spec import Stack, SupportedLayouts
from fivefold.update import Ramp
from tests.planner import draws
from tests.selection import mark_share

DENSE = Model(name="dense", layers=6, width=64, heads=4, kv_heads=2, head_dim=32, ffn=128, vocab=128)
MOE = DENSE.replace(name="moe", moe=MoE(experts=4, topk=2, ffn=32, dense_layers=1))
MIXER = MOE.replace(name="mixer", mixers=("short_conv", "attention"), short_conv=ShortConv())
GROUPS = DENSE.replace(
    name="groups", mixers=("mamba2", "attention"), mamba2=Mamba2(heads=4, head_dim=8, state=8, groups=2)
)
JOB = Job(sequence=64, global_batch=8)
LEAVE_OUT = ("megatron-core", "deepspeed", "torchtitan", "nanotron", "fsdp2")

JOBS_THAT_NARROW: list[dict[str, Any]] = [
    {"adapter": "lora:16"},
    {"adapter": {"rank": 16, "base": "int8"}},
    {"adapter": {"rank": 16, "base": "fp8"}},
    {"adapter": "qlora:16"},  # tp4 cuts blocks, tp2 does not
    {"adapter": "qlora:16", "stack": "deepspeed"},
    {"adapter": "lora:6", "stack": "megatron-bridge"},
    {"objective": "dpo"},
    {"objective": "dpo", "adapter": "qlora:16"},
    {"freeze": ["embed_tokens", "layers[:3]"]},
    {"freeze": ["embed_tokens", "layers[0]"], "stack": "torchtitan"},  # stages without a backward are not modelled
]


def list_leaves(space: Space) -> CandidateLayouts:
    partials = space.partials
    candidates = space.expand(partials, partials.dp.nonzero()[0])
    return space.shard(partials, space.place(partials, candidates))


def list_layouts(model: Model, job: Job, *, world: int) -> set[Layout]:
    """All that are legal, without regard to how the space is made; one order, and v that divides a rank's layers."""
    return {layout for layout in list_parsed(model, world=world) if _is_legal(layout, model, job)}


def _is_legal(layout: Layout, model: Model, job: Job) -> bool:
    """Tell whether a layout is legal and, with frozen weights, has no more stages than layers, as the search has it."""
    return (
        not (job.freezes_text and layout.pp * layout.v > model.layers)
        and next(list_reasons(layout, model=model, job=job, machine=None), None) is None
    )


@lru_cache
def list_parsed(model: Model, *, world: int) -> frozenset[Layout]:
    """All that parse."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    experts = [1, 2, 4] if model.moe else [1]
    result = set()
    for dp, tp, cp, pp in product(sizes, repeat=4):
        if dp * tp * cp * pp != world:
            continue
        several = {d for n in (model.layers // pp, -(-model.layers // pp)) for d in range(1, n + 1) if n % d == 0}
        several |= {d for d in range(2, model.layers + 3) if pp * d in (model.layers + 1, model.layers + 2)}
        choices = product(
            experts,
            experts,
            sorted({1, 2, *several}),
            SCHEDULES,
            (1, 2, 4, 8),
            ("ring", "ulysses"),
            (True, False),
            [(0, None), *((z, s) for z in (1, 2, 3) for s in (None, *sizes))],
        )
        for ep, etp, v, schedule, mbs, kind, sp, (zero, shards) in choices:
            if shards in (1, dp * cp) or (zero and dp * cp == 1) or (schedule == "interleaved" and v not in several):
                continue
            try:
                layout = Layout(
                    dp=dp,
                    tp=tp,
                    cp=cp,
                    pp=pp,
                    ep=ep,
                    etp=etp,
                    v=v,
                    schedule=schedule,
                    mbs=mbs,
                    cp_kind=kind,
                    sp=sp,
                    zero=zero,
                    shard_group=shards,
                )
            except ValidationError:
                continue
            result.add(layout)
    return frozenset(result)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [64, 6])  # 3 tokens under cp2, which tp2 shares only if there are two of them
@pytest.mark.parametrize("model", mark_share(4, [MOE, DENSE, MIXER, GROUPS]), ids=lambda model: model.name)
def test_the_space_is_every_legal_layout_once(model: Model, sequence: int) -> None:
    _check_space(model, JOB.replace(sequence=sequence))


@pytest.mark.parametrize("job", JOBS_THAT_NARROW, ids=str)
def test_the_space_of_adapters_and_preferences_is_every_legal_layout_once(job: dict[str, Any]) -> None:
    every, mine = _space(DENSE, JOB), _check_space(DENSE, Job.model_validate({**dict(JOB), **job}))
    assert mine < every


@pytest.mark.parametrize("stack", ["fivefold", "nemo-automodel"])
@pytest.mark.parametrize("targets", [("q_proj", "experts.gate_up_proj"), ("q_proj", "embed_tokens")], ids=str)
def test_the_space_of_adapters_that_some_axes_do_not_shard_is_every_legal_layout_once(
    targets: tuple[str, ...], stack: str
) -> None:
    job = Job.model_validate({**dict(JOB), "adapter": {"rank": 8, "targets": targets}, "stack": stack})
    assert _check_space(MOE, job) < _space(MOE, JOB.replace(stack=job.stack))


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_share(8, range(24)))
def test_the_space_of_a_drawn_job_is_every_legal_layout_once(seed: int) -> None:
    _check_space(*_draw_model_and_job(random.Random(seed)))


def _draw_model_and_job(some: random.Random) -> tuple[Model, Job]:
    """Draw until they are valid and fit each other."""
    while True:
        try:
            model, job = draws.model(some), draws.job(some, batch=8).replace(sequence=64, ramp=None)
        except (UserError, ValidationError):
            continue
        if next(list_mismatches(model, job), None) is None:
            return model, job


@pytest.mark.parametrize("other", [{"precision": "fp8-param"}, {"objective": "dpo"}], ids=str)
def test_the_space_of_offloaded_weights_is_empty_if_they_are_gathered_in_fp8_or_copied(other: dict[str, str]) -> None:
    job = {**dict(JOB), "offload": ("optimizer", "parameters")}
    assert _space(DENSE, Job.model_validate(job))
    assert not _space(DENSE, Job.model_validate(job | other))


def test_the_space_of_a_batch_ramp_has_only_layouts_that_divide_every_batch() -> None:
    _check_space(DENSE, JOB.replace(ramp=Ramp(first=4, step=2, every=9)))


@pytest.mark.parametrize("text", ["zero=3", "zero>=1 shards<4", "tp=4 zero=1", "zero=0 pp>1 schedule!=1f1b"])
@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda model: model.name)
def test_constraints_leave_the_layouts_that_meet_them(model: Model, text: str) -> None:
    """Also where some degrees are left without any ZeRO stage."""
    where = Where.parse(text)
    assert _space(model, JOB, where) == {layout for layout in _space(model, JOB) if where.is_satisfied_by(layout)}


def test_the_space_can_be_limited_to_unusual_orders_of_axes() -> None:
    """Those in which the axes with ranks follow one another otherwise than they usually do."""
    both, others = (
        Space(DENSE, JOB, world=4, recomputations=("none",), where=Where.parse(text)) for text in ("", "order!=default")
    )
    every, mine = (
        {space.layout(space.partials, leaves, at) for at in range(len(leaves.partial))}
        for space in (both, others)
        for leaves in [list_leaves(space)]
    )
    assert mine == {layout for layout in every if layout.order != DEFAULT_ORDER}
    assert 0 < len(mine) < len(every)


NARROW = Stack(
    name="narrow", runs=SupportedLayouts(expert_tensor=False, no_sp=False, cp_kinds=("ulysses",), pipelined_zero=(1,))
)


@pytest.mark.slow
@pytest.mark.parametrize("stack", [*map(build_stack, LEAVE_OUT), NARROW], ids=lambda stack: stack.name)
@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda model: model.name)
def test_a_stack_leaves_out_what_it_cannot_run(model: Model, stack: Stack) -> None:
    every, mine = _space(model, JOB), _check_space(model, JOB.replace(stack=stack))
    assert mine < every


def _check_space(model: Model, job: Job) -> set[Layout]:
    mine = _space(model, job)
    assert mine == {layout for layout in list_layouts(model, job, world=4) if can_express(layout, model=model, job=job)}
    return mine


def _space(model: Model, job: Job, where: Where = ANY_LAYOUT) -> set[Layout]:
    """As the search makes it, each layout once."""
    space = Space(model, job, world=4, recomputations=("none",), placements=False, where=where)
    candidates = list_leaves(space)
    mine = [space.layout(space.partials, candidates, at) for at in range(len(candidates.partial))]
    assert len(mine) == len(set(mine)) == int(space.count_candidates(space.partials).sum())
    return set(mine)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda model: model.name)
@pytest.mark.parametrize(
    "text", ["dp8", "dp2 tp2 cp2", "dp2 cp2 pp2", "dp2 tp2 pp2", "tp4 pp2", "dp2 tp4 etp2", "dp2 tp2 pp2 etp2"]
)
def test_orders_are_the_legal_ways_in_which_axes_with_ranks_follow_one_another(model: Model, text: str) -> None:
    layout = Layout.parse(text if model.moe else text.partition(" etp")[0])
    in_use = [axis for axis in DEFAULT_ORDER if getattr(layout, axis) > 1]
    legal = set()
    for order in permutations(DEFAULT_ORDER):
        try:
            refuse(layout.replace(order=order), model=model, job=JOB)
        except UserError:
            continue
        legal.add(tuple(axis for axis in order if axis in in_use))
    space = Space(model, JOB, world=8)
    degrees = ("dp", "tp", "cp", "pp", "ep", "etp", "mbs")
    matches = [getattr(space.partials, name) == getattr(layout, name) for name in degrees]
    partial = np.flatnonzero(np.logical_and.reduce(matches))[:1]
    candidates = space.place(space.partials, space.expand(space.partials, partial))
    orders = [space.orders[at] for at in candidates.take(candidates.shape == candidates.shape[0]).order]
    results = [tuple(axis for axis in order if axis in in_use) for order in orders]
    assert len(results) == len(set(results))
    assert set(results) == legal


def test_latent_attention_recomputes_what_it_expands() -> None:
    """What DeepSeek-V3 recomputes; a software whose config has no words for it is not asked to."""
    latent, word = MOE.replace(mla=MLA(q_rank=16, kv_rank=16, nope_dim=16, rope_dim=8, v_dim=16)), "norm+up+rope+act"
    assert [word in Space(model, JOB, world=2).recomputations for model in (latent, MOE)] == [True, False]
    software = {name: JOB.replace(stack=build_stack(name)) for name in ("megatron-core", "torchtitan")}
    tried = {name: Space(latent, job, world=2).recomputations for name, job in software.items()}
    assert [word in item for item in tried.values()] == [True, False]
    assert word not in Space(latent, JOB, world=2, recomputations=("none", "full")).recomputations


def test_a_model_with_experts_recomputes_them_and_not_an_mlp() -> None:
    assert "moe" in Space(MOE, JOB, world=2).recomputations
    assert "mlp" in Space(DENSE, JOB, world=2).recomputations


def test_keys_that_an_indexer_chooses_are_not_sharded() -> None:
    space = Space(build_model("deepseek-v3.2"), Job(sequence=4096, global_batch=64), world=16)
    assert all((block.cp == 1).all() for block in space.blocks)
