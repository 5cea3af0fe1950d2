"""What fits of full fine-tuning, LoRA and QLoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UserError
from fivefold.job import Job
from fivefold.layout.spec import Layout
from fivefold.machine.catalog import resolve
from fivefold.model.catalog import build_model, find_published
from fivefold.planner.predict import Planner
from fivefold.planner.questions.fine_tune import list_fine_tunes
from tests.planner.questions.cases import JOB, NODE


@pytest.mark.slow
def test_an_answer_lists_fine_tuning_methods_that_are_not_modelled() -> None:
    model = build_model("gemma3-4b")
    job = Job(sequence=4096, global_batch=8, images=2, freeze_vision_tower=True, freeze_projector=True)
    full, _, lora, faster = list_fine_tunes(model=model, machine=NODE, job=job)
    assert (full.method, lora.method, faster.method) == ("full", "lora:16", "lora:16")
    assert (lora.layout, faster.layout) == ("dp8 zero3 mbs1 ac=full", "dp8 zero3 mbs1")
    assert faster.tokens_per_second > lora.tokens_per_second
    assert full.memory_bytes > 1.5 * lora.memory_bytes
    (remark,) = full.remarks
    assert remark.startswith("no answer for qlora:16: layout 'dp8 zero3 mbs1 ac=full': images=2 are not counted with")
    only = list_fine_tunes(model=build_model("deepseek-v3-mtp"), machine=NODE, job=JOB)
    assert [way.method for way in only] == ["full"]
    assert [remark.split(":")[0] for remark in only[0].remarks] == [
        *("no answer for lora", "no answer for qlora", "no answer for lora")
    ]
    with pytest.raises(UserError, match="dp16"):
        list_fine_tunes(model=model, machine=NODE, job=job, layout=Layout.parse("dp16"))


@pytest.mark.slow
def test_a_model_that_is_published_in_few_bits_is_fine_tuned_over_its_own_weights() -> None:
    """gpt-oss fits a GPU with 24 GB with its experts in MXFP4, not with nf4 next to experts in 16 bits."""
    machine, job = resolve("rtx4090:1", local=Path("/nowhere")), Job(sequence=2048, global_batch=16)
    ways = list_fine_tunes(model=build_model("gpt-oss-20b"), machine=machine, job=job)
    assert [way.method for way in ways if way.micro_batch] == ["lora:16 over mxfp4", "lora:16 over mxfp4"]
    assert ways[2].method == "qlora:16"
    assert ways[2].memory_bytes > 30 * 2**30 > 24 * 2**30 > ways[3].memory_bytes
    planner = Planner(model=build_model("gpt-oss-20b"), machine=machine, job=job.replace(adapter={"base": "mxfp4"}))
    assert planner.estimate(Layout.parse(ways[3].layout)).peak_bytes == ways[3].memory_bytes
    in_16_bits = find_published("unsloth/gpt-oss-20b-BF16")
    assert in_16_bits is None or [
        way.method for way in list_fine_tunes(model=in_16_bits, machine=machine, job=job)
    ] == ["full", "lora:16", "qlora:16"]


@pytest.mark.long  # `test_fine_tuning_of_an_8b_model…` has this line too
@pytest.mark.slow
def test_an_answer_says_on_how_many_gpus_a_method_fits_if_none_does() -> None:
    """Experts stay in 16 bits next to a base in nf4, which the remarks say too."""
    machine, job = resolve("rtx4090:1", local=Path("/nowhere")), Job(sequence=2048, global_batch=16)
    ways = list_fine_tunes(model=build_model("qwen3-30b-a3b"), machine=machine, job=job)
    assert {way.micro_batch for way in ways} == {0}
    assert [line for line in ways[0].remarks if "routed experts stay in the dtype of activations" in line]
    assert [line for line in ways[0].remarks if line.startswith("qlora:16 fits on 8 of rtx4090, as 'dp8 zero3 mbs1")]


@pytest.mark.long  # four searches for one line
def test_a_remark_compares_the_step_of_the_fastest_way_to_fine_tune_alone() -> None:
    ways = list_fine_tunes(model=build_model("qwen3.5-0.8b"), machine=NODE, job=Job(sequence=1024, global_batch=8))
    assert len(ways) >= 3
    assert len([line for line in ways[0].remarks if "fused_scans=true" in line]) == 1


@pytest.mark.slow
def test_fine_tuning_of_an_8b_model_on_one_24_gb_gpu() -> None:
    """It needs QLoRA: weights in 16 bits take 15 GiB, and their states more than there is."""
    machine = resolve("rtx4090:1", local=Path("/nowhere"))
    ways = list_fine_tunes(model=build_model("llama3-8b"), machine=machine, job=Job(sequence=2048, global_batch=16))
    assert [way.method for way in ways] == ["full", "lora:16", "qlora:16", "qlora:16"]
    full, lora, qlora, faster = ways
    assert (full.longest_sequence, full.micro_batch) == (0, 0)
    assert full.remarks == (
        "sequences longer than 8,192 tokens are beyond the model's positions: scale its rotary embedding, train on "
        "longer text",
        "full fits as 'dp1 zero3 mbs1 ac=full offload=optimizer+parameters' with --stack deepspeed, with 164.53 GiB in "
        "the memory of each host",
        "full fits on 16 of rtx4090, as 'dp16 zero3 mbs1 ac=full'",
    )
    assert lora.longest_sequence < qlora.longest_sequence > 8192
    assert qlora.micro_batch >= 4
    assert faster.layout == "dp1 zero0 mbs1"
    assert faster.tokens_per_second > qlora.tokens_per_second
    for way in ways[1:]:
        chosen = Job(sequence=2048, global_batch=16, adapter=way.method)  # type: ignore[arg-type]
        planner = Planner(model=build_model("llama3-8b"), machine=machine, job=chosen)
        if way.micro_batch:
            result = planner.estimate(Layout.parse(way.layout))
            assert planner.fits(result.layout)
            assert result.peak_bytes == way.memory_bytes
            memory = planner.step(result.layout).memory
            assert (memory.driver_bytes, memory.risk) == (way.driver_bytes, way.risk)
            assert chosen.tokens_per_step / result.step_time.seconds == way.tokens_per_second
        longer = chosen.replace(sequence=way.longest_sequence + 2)
        single = Layout.parse(way.layout).replace(mbs=1)
        assert not Planner(model=build_model("llama3-8b"), machine=machine, job=longer).fits(single)
