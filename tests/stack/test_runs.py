"""What a stack cannot run is refused in one line, field by field, and taken once the stack can."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.layout.validity import refuse
from fivefold.model.experts import MoE
from fivefold.model.spec import Model
from fivefold.stack.spec import Stack, SupportedLayouts

MODEL = Model(
    name="small",
    layers=8,
    width=64,
    heads=8,
    kv_heads=8,
    head_dim=8,
    ffn=64,
    vocab=128,
    moe=MoE(experts=4, topk=2, ffn=32),
)
DENSE = MODEL.replace(moe=None)
LACKS: tuple[tuple[str, Any, str, str], ...] = (
    ("axes", ("dp", "tp"), "cp2", "mine does not support cp; use cp1 or another stack"),
    ("axes", ("dp", "tp"), "dp4 ep2", "mine does not support ep; use ep1 or another stack"),
    ("schedules", ("1f1b", "gpipe"), "pp2 zb1p", "mine does not support zb1p; use 1f1b or gpipe, or another stack"),
    ("zero", (0, 1), "dp4 zero2", "mine does not support zero2; use zero0 or zero1, or another stack"),
    (
        "zero",
        (0, 1),
        "dp2 pp2 zero2",
        "mine does not support zero2 with pipelines; use zero0 or zero1, or another stack",
    ),
    ("zero", (3,), "dp4 zero0", "mine does not support zero0; use zero3, or another stack"),
    (
        "pipelined_zero",
        (0,),
        "dp2 pp2 zero1",
        "mine does not support zero1 with pipelines; use zero0, or another stack",
    ),
    ("pipelined_zero", (), "dp2 pp2 zero1", "mine does not support zero1 with pipelines; use pp1, or another stack"),
    ("shard_groups", False, "dp4 zero3/2", "mine does not support shard groups; use zero3 or another stack"),
    ("cp_kinds", ("ulysses",), "cp2", "mine does not support cp=ring; use cp=ulysses or another stack"),
    ("cp_kinds", ("ring",), "cp2 cp=ulysses", "mine does not support cp=ulysses; use cp=ring or another stack"),
    (
        "expert_tensor",
        False,
        "dp2 tp2 etp2",
        "mine does not support tensor parallelism of experts; use etp1 or another stack",
    ),
    (
        "no_sp",
        False,
        "tp2 nosp",
        "mine does not support tensor parallelism without sequence parallelism; use it without nosp",
    ),
    (
        "optimizer_offload_zero",
        (1, 3),
        "dp2 zero2 offload=optimizer",
        "mine does not run offload=optimizer with zero2; use zero1 or zero3, on one rank too",
    ),
    ("uneven_stages", False, "pp2 stages=3-5", "mine does not support stages of other sizes; use it without stages="),
    (
        "orders",
        False,
        "dp2 pp2 order=pp-tp-cp-dp",
        "mine does not support other orders of the ranks; use it without order= or another",
    ),
)


@pytest.mark.parametrize("field", ["schedules", "zero", "cp_kinds"])
def test_a_stack_supports_at_least_one_value_of_each_layout_field(field: str) -> None:
    """What a layout cannot have is an error that names one that it can."""
    with pytest.raises(ValidationError, match="at least 1"):
        SupportedLayouts.model_validate({field: ()})


def test_every_field_of_the_supported_layouts_is_checked_or_searched() -> None:
    assert {field for field, *_ in LACKS} | SEARCHED == SupportedLayouts.model_fields.keys()


SEARCHED = {
    "recomputes",
    "expert_recomputes",
    "fused_dispatcher",
    "experts_as_mlp",
    "config_axes",
    "config_zero",
    "config_optimizers",
    "precisions",
    "config_precisions",
    "config_dense_precisions",
    "cp_shards",
    "offloads",
}  # what the search or advice keeps to, or a remark says, and legality does not


def test_stack_that_shards_over_cp_has_no_zero0() -> None:
    assert (
        SupportedLayouts(cp_shards=True).expressible_zero(1),
        SupportedLayouts(cp_shards=True).expressible_zero(2, cp=2),
    ) == ((0, 1, 2, 3), (1, 2, 3))


def test_a_stack_may_support_other_orders_of_the_axes() -> None:
    job = Job(sequence=64, global_batch=16, stack=Stack(name="mine", runs=SupportedLayouts(orders=("tp-cp-pp-dp",))))
    refuse(Layout.parse("dp2 pp2 order=tp-cp-pp-dp"), model=DENSE, job=job)
    with pytest.raises(UserError, match="use it without order= or order=tp-cp-pp-dp or another stack"):
        refuse(Layout.parse("dp2 pp2 order=pp-tp-cp-dp"), model=DENSE, job=job)


@pytest.mark.parametrize(
    ("ac", "experts", "told"),
    [
        ("none", False, True), ("full", False, True), ("full/2", False, False), ("selective", False, True),
        ("norm+act", False, False), ("norm+act", True, True), ("norm", False, True), ("qkv", True, False),
    ],
)  # fmt: skip
def test_recomputations_that_a_config_can_express(ac: str, experts: bool, told: bool) -> None:
    assert (
        SupportedLayouts(recomputes=("full", "core", "norm"), expert_recomputes=("act",)).can_express(
            ac, experts=experts
        )
        == told
    )
    assert SupportedLayouts().can_express(ac, experts=experts)


def test_groups_that_a_config_recomputes_together_are_not_recomputed_one_by_one() -> None:
    software = SupportedLayouts(recomputes=("full", "norm+rope+act"))
    assert software.list_joint_recomputes() == ["norm+rope+act"]
    known = [ac for ac in ("norm+rope+act", "norm", "norm+act", "full/2") if software.can_express(ac, experts=False)]
    assert known == ["norm+rope+act"]


@pytest.mark.parametrize(("field", "value", "text", "reason"), LACKS)
def test_feature_missing_from_a_stack_is_an_error(field: str, value: Any, text: str, reason: str) -> None:
    model, layout = DENSE if "nosp" in text else MODEL, Layout.parse(text)
    job = Job(sequence=64, global_batch=16, stack=Stack(name="mine"))
    refuse(layout, model=model, job=job)
    with pytest.raises(UserError) as refused:
        refuse(layout, model=model, job=job.replace(stack=Stack(name="mine", runs=SupportedLayouts(**{field: value}))))
    assert str(refused.value).startswith(f"layout {str(layout)!r}: {reason}")


def test_a_stack_that_always_shards_runs_on_one_rank() -> None:
    """A stack that always shards (FSDP2) takes one rank, where zero0 is all there is."""
    stack = Stack(name="mine", runs=SupportedLayouts(zero=(3,)))
    refuse(Layout.parse("tp2"), model=DENSE, job=Job(sequence=64, global_batch=16, stack=stack))
