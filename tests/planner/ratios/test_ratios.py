from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine import catalog as machines
from fivefold.machine.spec import Machine
from fivefold.model.catalog import build_model
from fivefold.planner.ratios import compute_ratios, compute_sizing
from fivefold.planner.ratios.exchanges import build_expert_layer_exchange
from fivefold.results.balance import Axis, Ratios

JOB = Job(sequence=8192, global_batch=512)


def machine(name: str) -> Machine:
    return machines.resolve(name, local=Path("none"))


def axis(found: Ratios, name: str, overlapped_with: str = "") -> Axis:
    return next(row for row in found.axes if row.axis == name and overlapped_with in row.overlapped_with)


def test_ratios_of_llama_on_h100_equal_those_by_hand() -> None:
    """H100: 989 TFLOP/s over 450 GB/s of NVLink and 50 GB/s of NIC ask for 2198 and 19780 FLOPs per byte."""
    result = compute_ratios(build_model("llama3-70b"), machine=machine("h100:512"), job=JOB)
    assert result.balances == pytest.approx({"NVLink 4": 989e12 / 450e9, "NIC": 989e12 / 50e9})
    tp = axis(result, "tp")
    assert [degree.flops_per_byte for degree in tp.degrees[:3]] == pytest.approx([8192, 8192 / 3, 8192 / 7])
    assert (tp.largest, tp.reason) == (4, "tp8 has 1,170 FLOPs per byte, NVLink 4 needs 2,198")
    cp = axis(result, "cp")  # 8·(8192/8)/2 = 4096 within the node, 2048 at cp16 across
    assert (cp.largest, cp.reason) == (8, "cp16 has 2,048 FLOPs per byte, NIC needs 19,780")
    assert axis(result, "zero3", "forward").largest == 8  # 8192 tokens hide behind NVLink, not behind a NIC
    pp = axis(result, "pp")
    assert (pp.largest, pp.degrees[-1].token) == (64, "pp64")
    assert pp.reason == "overlapped at every degree possible with this model, batch and 512 ranks"


def test_an_axis_uses_the_slower_link_when_inner_axes_fill_the_node() -> None:
    result = compute_ratios(build_model("llama3-70b"), machine=machine("h100:512"), job=JOB, layout=Layout(tp=8))
    assert {degree.link for degree in axis(result, "zero3").degrees} == {"NIC"}
    assert [degree.degree for degree in axis(result, "dp", "step").degrees] == [2, 4, 8, 16, 32, 64]


def test_fixed_axes_do_not_limit_the_varied_axis() -> None:
    """ZeRO-3 is asked with one group over all replicas, ep with no more replicas than it takes."""
    job = Job(sequence=1024, global_batch=16)
    layout = Layout.parse("dp8 zero3/4")
    result = compute_ratios(build_model("qwen3-30b-a3b"), machine=machine("h100:64"), job=job, layout=layout)
    assert [degree.degree for degree in axis(result, "zero3").degrees] == [2, 4, 8, 16]
    assert [degree.degree for degree in axis(result, "ep").degrees] == [2, 4, 8, 16]


def test_2d_tensor_parallelism_uses_the_fastest_of_its_splits() -> None:
    """Within a node g(y−1) + w(x−1) is least where fp8 travels farther than bf16: 4x2 of 8 in bf16, 2x4 in fp8."""
    bf16 = axis(compute_ratios(build_model("llama3-70b"), machine=machine("h100:8"), job=JOB), "tp2d")
    job = Job(sequence=8192, global_batch=512, precision="fp8-deepseek")
    fp8 = axis(compute_ratios(build_model("llama3-70b"), machine=machine("h100:8"), job=job), "tp2d")
    assert bf16.degrees[-1].flops_per_byte == pytest.approx(8192 / 4)
    assert (fp8.degrees[-1].token, fp8.degrees[-1].flops_per_byte) == ("tp2x4", pytest.approx(2 * 8192 / (3 + 2)))


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt2"]),
    chips=st.sampled_from(["h100:64", "gb200:144", "l40s:16", "a100:1"]),
    layout=st.sampled_from(["dp1", "dp2 tp2", "dp4 cp2 zero1", "tp4 pp2", "dp8 zero3 mbs2"]),
)
def test_the_largest_degree_is_where_overlap_ends(name: str, chips: str, layout: str) -> None:
    chosen, hardware = Layout.parse(layout), machine(chips)
    if chosen.world > hardware.ranks:
        return
    result = compute_ratios(
        build_model(name), machine=hardware, job=Job(sequence=1024, global_batch=128), layout=chosen
    )
    for row in result.axes:
        assert all(a.degree < b.degree for a, b in pairwise(row.degrees))
        assert all(degree.overlaps == (degree.flops_per_byte >= degree.balance) for degree in row.degrees)
        assert all(degree.overlaps for degree in row.degrees if degree.degree <= row.largest)
        beyond = [degree for degree in row.degrees if degree.degree > row.largest]
        assert not beyond or not beyond[0].overlaps
        assert row.reason
        assert "\n" not in row.reason
    assert Ratios.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize("link", [0, 1])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b"])
def test_expert_sizes_are_where_overlap_begins(name: str, link: int) -> None:
    """At the given width or top-k the layer takes longer than all-to-alls of a very large ep; one step less not."""
    model, hardware, job = build_model(name), machine("h100:512"), Job(sequence=4096, global_batch=512)
    assert model.moe is not None
    tier = hardware.links[link]
    result = compute_sizing(model, machine=hardware, job=job, link=tier)
    balance = hardware.chip.peak("bf16") / tier.bandwidth

    def compute_ratio(**changes: int) -> float:
        assert model.moe is not None
        shared = model.moe.shared_ffn or model.moe.ffn  # stays as it is
        one_group = {"groups": 1, "topk_groups": 1}  # which bound topk
        changed = model.replace(moe=model.moe.replace(shared_ffn=shared, **one_group, **changes))
        return build_expert_layer_exchange(changed, job, Layout(dp=8, ep=8)).flops_per_byte * 7 / 8  # (n−1)/n → 1

    assert compute_ratio(ffn=max(1, result.ffn_layer)) >= balance
    assert result.ffn_layer == 0 or compute_ratio(ffn=result.ffn_layer - 1) < balance
    assert result.ffn_alone == -(-4 * balance // 6)  # 6·F/(g+w) = balance
    if result.topk_layer is None:
        assert compute_ratio(topk=model.moe.experts) >= balance
        return
    assert result.topk_layer == 0 or compute_ratio(topk=result.topk_layer) >= balance
    assert compute_ratio(topk=result.topk_layer + 1) < balance


def test_messages_of_wide_experts_overlap_for_any_topk() -> None:
    """Mixtral: F = 14336 offers 21504, more than a NIC of an H100 asks for."""
    hardware = machine("h100:512")
    result = compute_ratios(build_model("mixtral-8x7b"), machine=hardware, job=Job(sequence=4096, global_batch=512))
    assert [size.topk_layer for size in result.sizing] == [None, None]
    assert result.sizing[1].ffn_alone == 13_187
    assert axis(result, "ep", "experts").largest == 8


def test_impossible_ratio_is_an_error() -> None:
    with pytest.raises(UserError, match="heads=32 is not divisible by tp=3; try tp2"):
        compute_ratios(build_model("llama3-8b"), machine=machine("h100:8"), job=JOB, layout=Layout(tp=3))
    hardware = machine("h100:8")
    with pytest.raises(UserError, match="llama3-8b has no experts"):
        compute_sizing(build_model("llama3-8b"), machine=hardware, job=JOB, link=hardware.links[0])
    alone = compute_ratios(build_model("llama3-8b"), machine=machine("h100:1"), job=JOB)
    assert {row.largest for row in alone.axes} == {1}
    assert axis(alone, "tp").reason == "dp1 zero0 mbs1 already uses 1 of 1 ranks"
    odd = compute_ratios(build_model("llama3-8b"), machine=machine("h100:3"), job=JOB)
    assert "global batch 512 is not divisible by dp·mbs=3·1=3" in axis(odd, "dp").reason


def test_a_model_without_attention_has_none_to_overlap_messages_of_context_parallelism_with() -> None:
    """A layer that is a short convolution sends to the next rank of cp, and no attention runs meanwhile."""
    model = build_model("lfm2-1.2b").replace(layers=1)
    layout = Layout.parse("cp2 cp=ulysses")
    row = axis(compute_ratios(model, machine=machine("h100:8"), job=JOB, layout=layout), "cp")
    assert (row.degrees, row.largest) == ((), 1)
    assert row.reason == "the most common layer has no attention of a chunk to overlap messages with"
