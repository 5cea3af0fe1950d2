from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.machine.catalog import resolve
from fivefold.step import Memory, Mfu, StageMemory, Step, Time, Traffic, Work, count_sent_bytes

# The contract that users' scripts read; more keys may be added, none may go.
CONTRACT: dict[str, Any] = {
    "kind": 0, "model": 0, "machine": 0, "layout": 0, "job": 0, "world": 0,
    "memory": {
        "peak_bytes": 0, "reserved_bytes": 0, "fits": 0,
        "stages": [{
            "stage": 0, "parameters_bytes": 0, "gradients_bytes": 0, "optimizer_bytes": 0,
            "activations_bytes": 0, "temporary_bytes": 0, "peak_bytes": 0,
        }],
    },
    "work": {
        "parameters": 0, "active_parameters": 0, "model_flops_causal": 0, "model_flops_non_causal": 0,
        "hardware_flops": 0,
    },
    "traffic": [{"axis": 0, "collective": 0, "calls": 0, "bytes": 0}],
    "time": {
        "step_seconds": 0, "compute_seconds": 0, "bubble_seconds": 0, "exposed_seconds": 0,
        "optimizer_seconds": 0, "error": 0, "longest_part": 0,
    },
    "tokens_per_second_per_gpu": 0,
    "mfu": {"causal": 0, "non_causal": 0},
    "hfu": 0,
}  # fmt: skip

STEP = Step(
    kind="predicted",
    model="tiny",
    machine="local:2",
    layout="dp2 zero1 mbs1",
    job={"sequence": 128, "global_batch": 4},
    world=2,
    memory=Memory(
        peak_bytes=300,
        stages=(
            StageMemory(
                stage=0,
                parameters_bytes=10,
                gradients_bytes=20,
                optimizer_bytes=40,
                activations_bytes=150,
                temporary_bytes=80,
                peak_bytes=300,
            ),
        ),
    ),
    work=Work(
        parameters=5, active_parameters=5, model_flops_causal=1000, model_flops_non_causal=1500, hardware_flops=2000
    ),
    traffic=(Traffic(axis="dp", collective="all_reduce", calls=1, bytes=20),),
    time=Time(step_seconds=2.0, compute_seconds=1.5, exposed_seconds={"dp": 0.4}, optimizer_seconds=0.1),
    tokens_per_second_per_gpu=128.0,
    mfu=Mfu(causal=0.1, non_causal=0.15),
    hfu=0.2,
)  # fmt: skip


def list_missing(contract: Any, found: Any, place: str = "step") -> list[str]:
    if isinstance(contract, dict):
        missing = [f"{place}.{key}" for key in contract if key not in found]
        present = [key for key in contract if key in found]
        return missing + [gap for key in present for gap in list_missing(contract[key], found[key], f"{place}.{key}")]
    if isinstance(contract, list):
        return [gap for item in found for gap in list_missing(contract[0], item, f"{place}[]")]
    return []


def test_json_of_a_step_has_the_recorded_keys() -> None:
    result = json.loads(STEP.model_dump_json())
    assert list_missing(CONTRACT, result) == []
    assert result["time"]["exposed_seconds"] == {"dp": 0.4}
    assert result["memory"]["fits"] is None


def test_the_contract_test_can_fail() -> None:
    result = json.loads(STEP.model_dump_json())
    del result["traffic"][0]["calls"], result["mfu"]["non_causal"]
    assert list_missing(CONTRACT, result) == ["step.traffic[].calls", "step.mfu.non_causal"]


def test_a_step_reads_back_from_json() -> None:
    assert Step.model_validate_json(STEP.model_dump_json()) == STEP


def test_states_are_parameters_gradients_and_moments() -> None:
    assert STEP.memory.stages[0].states_bytes == 10 + 20 + 40


@pytest.mark.parametrize(
    ("collective", "bytes_sent"),
    [
        ("all_reduce", 2 * 7 * 1000),
        ("all_gather", 7 * 1000),
        ("reduce_scatter", 7 * 1000),
        ("all_to_all", 7 * 1000),
        ("broadcast", 8000),
        ("p2p", 8000),
    ],
)
def test_sent_bytes_of_ring_collectives_equal_those_by_hand(collective: str, bytes_sent: int) -> None:
    assert count_sent_bytes(collective, payload=8000, ranks=8) == bytes_sent
    assert count_sent_bytes(collective, payload=8000, ranks=1) == 0


def test_all_reduce_is_scatter_and_gather() -> None:
    parts = [count_sent_bytes(name, payload=4096, ranks=16) for name in ("reduce_scatter", "all_gather")]
    assert count_sent_bytes("all_reduce", payload=4096, ranks=16) == sum(parts)


def test_fewer_processes_than_a_cpu_has_ranks_share_all_its_cores() -> None:
    gpus = resolve("h100:2", local=Path("none"))
    cpu = gpus.replace(backend="gloo", ranks_per_node=2)
    peak = gpus.chip.peak("bf16")
    assert [gpus.count_peak_flops("bf16", ranks=ranks) for ranks in (1, 2)] == [peak, 2 * peak]
    assert [cpu.count_peak_flops("bf16", ranks=ranks) for ranks in (1, 2, 4)] == [2 * peak, 2 * peak, 4 * peak]


def test_mfu_is_of_all_chips() -> None:
    mfu = STEP.work.compute_mfu(2.0 * 2 * 1000.0)
    assert (mfu.causal, mfu.non_causal) == (0.25, 0.375)
