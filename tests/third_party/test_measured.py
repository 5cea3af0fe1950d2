"""A few of the loops of ``make interop``: counts equal, peaks within three percent."""

from __future__ import annotations

import pytest

from tests.selection import mark_share
from tests.third_party.measured import CASES, compare_case

PEFT = (
    "peft LoRA, recomputed", "peft LoRA, DDP, 2 micro-batches", "peft LoRA, bf16", "peft LoRA, autocast",
    "peft LoRA on q and the head with dropout, autocast", "peft LoRA with dropout, bf16", "peft DoRA, recomputed",
    "peft DoRA on q and v, DDP, 2 micro-batches", "peft DoRA, autocast",
    "peft LoRA, FSDP2, recomputed, 2 micro-batches", "peft LoRA, FSDP2, gathered, as zero2",
    "peft LoRA, embedding and head trained, FSDP2", "peft LoRA, embedding and head trained, autocast, DDP",
    "peft LoRA on attention and experts", "peft LoRA on q and the experts' down projection, bf16",
    "peft LoRA on attention and experts, autocast", "peft QLoRA, FSDP2",
    "peft QLoRA, FSDP2, recomputed, 2 micro-batches", "peft QLoRA, DDP, recomputed, 2 micro-batches",
)  # fmt: skip
FEW = ("FSDP2, reshard", "FSDP2, gathered", "DDP, 2 micro-batches", "TP, DTensor", "PP, 1F1B")


@pytest.mark.parametrize("name", mark_share(len(FEW), FEW))
def test_messages_states_and_flops_of_other_software_equal_the_prediction(name: str) -> None:
    assert name in CASES
    result = compare_case(name)
    assert result.traffic[0] == result.traffic[1]
    assert result.states[0] == result.states[1]
    assert result.predicted.work.hardware_flops == result.measured.work.hardware_flops
    assert max(map(abs, result.errors)) < 0.02
    assert result.is_equal


DEEPSPEED = (
    "peft LoRA, DeepSpeed, ZeRO-3", "peft LoRA, DeepSpeed, ZeRO-3, a little ahead, 2 micro-batches",
    "peft LoRA, DeepSpeed, ZeRO-3, recomputed", "peft LoRA, DeepSpeed, ZeRO-3, weight by weight",
    "peft LoRA, DeepSpeed, ZeRO-3, weight by weight, recomputed",
    "peft LoRA, DeepSpeed, ZeRO-3, a little ahead, recomputed, 2 micro-batches",
    "peft LoRA on q and v, DeepSpeed, ZeRO-3, recomputed", "peft QLoRA, DeepSpeed, ZeRO-3",
    "peft QLoRA, DeepSpeed, ZeRO-3, a little ahead, recomputed",
    "peft QLoRA, DeepSpeed, ZeRO-2, recomputed, 2 micro-batches",
)  # fmt: skip


@pytest.mark.skipif(DEEPSPEED[0] not in CASES, reason="peft and DeepSpeed are installed by make interop")
@pytest.mark.parametrize("name", mark_share(2, DEEPSPEED))
def test_adapters_under_deepspeed_are_as_they_are_predicted(name: str) -> None:
    result = compare_case(name)
    assert result.is_equal
    assert max(map(abs, result.errors)) < 0.02


OFFLOADED = (
    "DeepSpeed, ZeRO-3, bf16", "DeepSpeed, ZeRO-3", "DeepSpeed, ZeRO-3, weight by weight",
    "DeepSpeed, ZeRO-3, offload_optimizer, 2 micro-batches",
    "DeepSpeed, ZeRO-3, offload_param and _optimizer", "DeepSpeed, ZeRO-3, bf16, offload_param",
    "DeepSpeed, ZeRO-3, bf16, offload_param and _optimizer, recomputed, a little ahead, 2 micro-batches",
    "DeepSpeed, ZeRO-1, offload_optimizer, 2 micro-batches",
    "DeepSpeed, ZeRO-2, bf16, offload_optimizer, 2 micro-batches",
    "DeepSpeed, one rank, ZeRO-1, bf16, offload_optimizer",
    "DeepSpeed, one rank, ZeRO-2, bf16, offload_optimizer, 2 micro-batches",
    "DeepSpeed, one rank, ZeRO-3, bf16", "DeepSpeed, one rank, ZeRO-3, bf16, offload_optimizer, 2 micro-batches",
    "DeepSpeed, one rank, ZeRO-3, bf16, offload_param and _optimizer, 2 micro-batches",
    "DeepSpeed, one rank, ZeRO-3, bf16, offload_param, a little ahead", "DeepSpeed, ZeRO-3, bf16, in groups",
)  # fmt: skip


@pytest.mark.skipif(OFFLOADED[0] not in CASES, reason="DeepSpeed is installed by make interop")
@pytest.mark.parametrize("name", mark_share(3, OFFLOADED))
def test_what_deepspeed_keeps_in_host_memory_is_as_it_is_predicted(name: str) -> None:
    """Each rank checks its bytes of host memory with ``==``; on CPUs copies from there are made for this comparison."""
    result = compare_case(name)
    assert result.is_equal
    assert max(map(abs, result.errors)) < 0.002


@pytest.mark.skipif("peft LoRA" not in CASES, reason="peft is installed by make interop")
@pytest.mark.parametrize("name", mark_share(2, PEFT))
def test_memory_of_peft_adapters_equals_the_prediction(name: str) -> None:
    result = compare_case(name)
    assert result.is_equal
    assert max(map(abs, result.errors)) < 0.005
